"""What to start in which order, as values: stages one after the other, the steps of a stage at once."""

from dataclasses import dataclass, field
from pathlib import Path

from slurm_pathways.sandbox.layout import Layout
from slurm_pathways.sandbox.packages import SYSTEM_PATH
from slurm_pathways.sandbox.spec import LOGIN, Addressing, SandboxSpec

#: For one daemon; on a quiet machine each takes less than a second.
DAEMON_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SocketAnswers:
    """A daemon is ready when its Unix socket takes connections."""

    path: Path


@dataclass(frozen=True, slots=True)
class PortListens:
    """A daemon is ready when somebody listens on a TCP port in its network."""

    port: int


@dataclass(frozen=True, slots=True)
class MakePlaces:
    """Make the namespaces of places, and connect them if they have networks."""

    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunProgram:
    """Run a program on the login and wait for its end; anything but exit code 0 is a failure."""

    name: str
    argv: tuple[str, ...]
    timeout_s: float = DAEMON_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class StartDaemon:
    """Start a daemon in a place and wait until it is ready.

    Attributes:
        name: of its log.
        environ: all of its environment.
        ready: how to tell.
    """

    name: str
    place: str
    argv: tuple[str, ...]
    ready: SocketAnswers | PortListens
    environ: dict[str, str] = field(default_factory=dict)
    timeout_s: float = DAEMON_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class AwaitNodes:
    """Wait until slurmctld says that nodes are idle."""

    nodes: tuple[str, ...]
    timeout_s: float = DAEMON_TIMEOUT_S


Step = MakePlaces | RunProgram | StartDaemon | AwaitNodes
Stage = tuple[Step, ...]


def start_all(spec: SandboxSpec, layout: Layout, addressing: Addressing) -> tuple[Stage, ...]:
    """From folders with configuration files to a cluster whose nodes are idle."""
    environ = daemon_environ(layout)
    return (
        (MakePlaces((LOGIN, *spec.nodes)),),
        (
            RunProgram(
                "mariadb-install-db",
                (
                    *("mariadb-install-db", f"--defaults-file={layout.my_cnf}", "--user=root", "--skip-test-db"),
                    *("--auth-root-authentication-method=socket", "--auth-root-socket-user=root"),
                    "--skip-name-resolve",
                ),
            ),
            StartDaemon(
                "munged",
                LOGIN,
                (
                    *("munged", "--foreground", f"--key-file={layout.munge_key}", f"--socket={layout.munge_socket}"),
                    *(f"--pid-file={layout.run / 'munged.pid'}", f"--seed-file={layout.munge_key.parent / 'seed'}"),
                    # The folder's parents may be anybody's choice, such as /tmp; the socket's own folder is root's.
                    *(f"--log-file={layout.daemon_log('munged')}", "--force"),
                ),
                SocketAnswers(layout.munge_socket),
                environ,
            ),
        ),
        (
            StartDaemon(
                "mariadbd",
                LOGIN,
                ("mariadbd", f"--defaults-file={layout.my_cnf}"),
                SocketAnswers(layout.database_socket),
                environ,
            ),
        ),
        (
            StartDaemon(
                "slurmdbd",
                LOGIN,
                ("slurmdbd", "-D"),
                PortListens(addressing.dbd_port),
                {**environ, "MYSQL_UNIX_PORT": str(layout.database_socket)},
            ),
        ),
        (
            StartDaemon(
                "slurmctld",
                LOGIN,
                ("slurmctld", "-D", "-f", str(layout.slurm_conf)),
                PortListens(addressing.controller_port),
                environ,
            ),
        ),
        tuple(start_slurmd(index, spec, layout, addressing) for index in range(spec.num_nodes)),
        (AwaitNodes(spec.nodes),),
    )


def start_node(
    index: int, spec: SandboxSpec, layout: Layout, addressing: Addressing, *options: str
) -> tuple[Stage, ...]:
    """From nothing to a node whose slurmd listens; ``options`` are slurmd's."""
    return (
        (MakePlaces((spec.nodes[index],)),),
        (start_slurmd(index, spec, layout, addressing, *options),),
    )


def start_slurmd(index: int, spec: SandboxSpec, layout: Layout, addressing: Addressing, *options: str) -> StartDaemon:
    """The daemon of one node."""
    node = spec.nodes[index]
    return StartDaemon(
        f"slurmd.{node}",
        node,
        ("slurmd", "-D", "-N", node, "-f", str(layout.slurm_conf), *options),
        PortListens(addressing.node_ports[index]),
        daemon_environ(layout),
    )


def daemon_environ(layout: Layout) -> dict[str, str]:
    """All that daemons see: nothing of whoever brings the sandbox up."""
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(layout.slurm_conf)}


def user_environ(layout: Layout, environ: dict[str, str]) -> dict[str, str]:
    """What commands of users see: their own environment, without the Slurm that they may be in, and with this one."""
    kept = {name: value for name, value in environ.items() if not name.startswith("SLURM_") or _is_ours(name)}
    return {**kept, "SLURM_CONF": str(layout.slurm_conf)}


def _is_ours(name: str) -> bool:
    return name.startswith("SLURM_PATHWAYS_")
