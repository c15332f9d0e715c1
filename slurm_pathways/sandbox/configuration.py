"""The facts that Slurm's configuration files state, for a sandbox on one machine and for containers."""

from dataclasses import dataclass
from pathlib import Path

from slurm_pathways.sandbox.layout import Layout
from slurm_pathways.sandbox.spec import LOGIN, Addressing, SandboxSpec

CLUSTER = "sandbox"
PARTITION = "tpu"
#: Of the same nodes; its jobs make room for those of the other, and are queued again.
PREEMPTIBLE = "preemptible"
#: What these jobs have to save and end, from the SIGTERM that all their steps get.
GRACE_TIME_S = 30
DATABASE = "slurm_acct_db"


@dataclass(frozen=True, slots=True)
class Storage:
    """How slurmdbd reaches MariaDB. With ``host`` "localhost" it uses the socket that MYSQL_UNIX_PORT names."""

    host: str
    user: str
    password: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A cluster, as its configuration files state it.

    Attributes:
        controller: host name of slurmctld; must be what that machine calls itself.
        controller_address: where it is reached; None for "by its name".
        dbd_host: what slurmdbd's machine calls itself, or localhost.
        dbd_address: where slurmdbd is reached.
        node_addresses: of each slurmd; None for "by the node's name".
        munge_socket: None for munge's usual one.
        storage: slurmdbd's database.
        etc, state, spool, run: folders. ``spool`` may contain ``%n``.
        log: folder of logs; None for stderr only.
    """

    spec: SandboxSpec
    controller: str
    controller_address: str | None
    controller_port: int
    dbd_host: str
    dbd_address: str
    dbd_port: int
    node_addresses: tuple[str, ...] | None
    node_ports: tuple[int, ...]
    munge_socket: Path | None
    storage: Storage
    etc: Path
    state: Path
    spool: Path
    run: Path
    log: Path | None


def on_one_machine(spec: SandboxSpec, layout: Layout, addressing: Addressing) -> Configuration:
    """That of ``slurm-pathways sandbox up``."""
    return Configuration(
        spec=spec,
        controller=LOGIN,
        controller_address=addressing.login_address,
        controller_port=addressing.controller_port,
        dbd_host="localhost",
        dbd_address=addressing.login_address,
        dbd_port=addressing.dbd_port,
        node_addresses=addressing.node_addresses,
        node_ports=addressing.node_ports,
        munge_socket=layout.munge_socket,
        # MariaDB lets the system's root in as its root, by the socket's credentials: there is no password.
        storage=Storage("localhost", "root"),
        etc=layout.etc,
        state=layout.state,
        spool=layout.spool / "%n",
        run=layout.run,
        log=layout.log,
    )


def in_containers(spec: SandboxSpec) -> Configuration:
    """That of docker/compose.yaml: one container for each daemon, which finds the others by their names."""
    return Configuration(
        spec=spec,
        controller="slurmctld",
        controller_address=None,
        controller_port=6817,
        dbd_host="slurmdbd",
        dbd_address="slurmdbd",
        dbd_port=6819,
        node_addresses=None,
        node_ports=(6818,) * spec.num_nodes,
        munge_socket=None,
        # The database has no port outside the compose network.
        storage=Storage("database", "slurm", "slurm"),
        etc=Path("/etc/slurm"),
        state=Path("/var/lib/slurm/slurmctld"),
        spool=Path("/var/lib/slurm/slurmd"),
        run=Path("/run"),
        log=None,
    )
