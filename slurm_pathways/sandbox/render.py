"""The text of every configuration file. The keys and their traps are Slurm 22.05's; later versions take them too."""

from collections.abc import Iterable, Mapping

from slurm_pathways.sandbox.configuration import (
    CLUSTER,
    DATABASE,
    GRACE_TIME_S,
    PARTITION,
    PREEMPTIBLE,
    Configuration,
)
from slurm_pathways.sandbox.layout import Layout
from slurm_pathways.sandbox.spec import LOGIN, Addressing, SandboxSpec


def files(configuration: Configuration) -> dict[str, str]:
    """Name in the folder ``etc`` to text, for all files that Slurm reads. slurmdbd.conf must have mode 0600."""
    return {
        "slurm.conf": slurm_conf(configuration),
        "slurmdbd.conf": slurmdbd_conf(configuration),
        "gres.conf": gres_conf(configuration.spec),
        "topology.conf": topology_conf(configuration.spec),
        "plugstack.conf": plugstack_conf(configuration),
    }


def slurm_conf(configuration: Configuration) -> str:
    """The configuration of slurmctld, slurmd and the commands."""
    spec = configuration.spec
    address = f"({configuration.controller_address})" if configuration.controller_address else ""
    settings: dict[str, object] = {
        "ClusterName": CLUSTER,
        "SlurmctldHost": f"{configuration.controller}{address}",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "SlurmctldPort": configuration.controller_port,
        "StateSaveLocation": configuration.state,
        "SlurmdSpoolDir": configuration.spool,
        "SlurmctldPidFile": configuration.run / "slurmctld.pid",
        "SlurmdPidFile": configuration.run / "slurmd.%n.pid",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        "PlugStackConfig": configuration.etc / "plugstack.conf",
        # Neither needs cgroups, which a container or a machine without systemd may not let us make.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=5",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        # Without it a job that asks for no memory has all of its nodes', and no other job fits beside it.
        "DefMemPerCPU": spec.memory_mb // spec.cpus_per_node,
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=5,bf_interval=5",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "TopologyPlugin": "topology/tree",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "MpiParams": "ports=20000-20999",
        # 1: only a node that was silent comes back by itself; one that was set DOWN or rebooted waits for "resume".
        "ReturnToService": 1,
        "SlurmdTimeout": spec.slurmd_timeout_s,
        "SlurmctldTimeout": 30,
        "BatchStartTimeout": 10,
        "MessageTimeout": 10,
        "KillWait": 5,
        "InactiveLimit": 0,
        "MinJobAge": 300,
        # Nodes have what is written here, whatever the machine has.
        "SlurmdParameters": "config_overrides",
        "PropagateResourceLimits": "NONE",
        "GresTypes": "tpu",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": configuration.dbd_address,
        "AccountingStoragePort": configuration.dbd_port,
        "AccountingStorageTRES": f"gres/tpu,gres/tpu:{spec.gres_type}",
        "AccountingStoreFlags": "job_comment,job_env,job_script",
    }
    if configuration.munge_socket is not None:
        # Both: the second is for what talks to slurmdbd, which looks at munge's usual socket without it.
        settings["AuthInfo"] = f"socket={configuration.munge_socket}"
        settings["AccountingStoragePass"] = configuration.munge_socket
    if configuration.log is not None:
        settings["SlurmctldLogFile"] = configuration.log / "slurmctld.log"
        settings["SlurmdLogFile"] = configuration.log / "slurmd.%n.log"
    return _assignments(settings) + "\n".join([*_node_lines(configuration), *_partition_lines(spec), ""])


def _node_lines(configuration: Configuration) -> list[str]:
    spec = configuration.spec
    common = (
        f"CPUs={spec.cpus_per_node} Boards=1 SocketsPerBoard=1 CoresPerSocket={spec.cpus_per_node} ThreadsPerCore=1 "
        f"RealMemory={spec.memory_mb} Gres=tpu:{spec.gres_type}:{spec.gres_per_node} State=UNKNOWN"
    )
    lines = []
    for rack, members in enumerate(spec.switches()):
        for index in members:
            address = f" NodeAddr={configuration.node_addresses[index]}" if configuration.node_addresses else ""
            port = configuration.node_ports[index]
            lines.append(f"NodeName={spec.nodes[index]}{address} Port={port} Feature=rack{rack} {common}")
    return lines


def _partition_lines(spec: SandboxSpec) -> tuple[str, str]:
    common = f"Nodes={_nodes(range(spec.num_nodes))} MaxTime=1:00:00 State=UP"
    return (
        f"PartitionName={PARTITION} Default=YES PriorityTier=2 PreemptMode=OFF {common}",
        f"PartitionName={PREEMPTIBLE} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_TIME_S} {common}",
    )


def slurmdbd_conf(configuration: Configuration) -> str:
    """The configuration of slurmdbd."""
    storage = configuration.storage
    settings: dict[str, object] = {
        "AuthType": "auth/munge",
        "DbdHost": configuration.dbd_host,
        "DbdAddr": configuration.dbd_address,
        "DbdPort": configuration.dbd_port,
        "SlurmUser": "root",
        "DebugLevel": "verbose",
        "PidFile": configuration.run / "slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": storage.host,
        "StorageUser": storage.user,
        "StorageLoc": DATABASE,
    }
    if storage.password:
        settings["StoragePass"] = storage.password
    if configuration.munge_socket is not None:
        settings["AuthInfo"] = f"socket={configuration.munge_socket}"
    if configuration.log is not None:
        settings["LogFile"] = configuration.log / "slurmdbd.log"
    return _assignments(settings)


def gres_conf(spec: SandboxSpec) -> str:
    """Counted devices without device files."""
    return (
        "AutoDetect=off\n"
        f"NodeName={_nodes(range(spec.num_nodes))} Name=tpu Type={spec.gres_type} Count={spec.gres_per_node}\n"
    )


def topology_conf(spec: SandboxSpec) -> str:
    """Leaf switches below one."""
    leaves = [f"SwitchName=leaf{leaf} Nodes={_nodes(members)}" for leaf, members in enumerate(spec.switches())]
    return "\n".join([*leaves, f"SwitchName=spine Switches=leaf[0-{len(leaves) - 1}]", ""])


def plugstack_conf(configuration: Configuration) -> str:
    """The SPANK plugins, and the folder where further ones may be dropped in."""
    named = [f"optional {plugin}" for plugin in configuration.spec.plugins]
    return "\n".join([*named, f"include {configuration.etc}/plugstack.conf.d/*.conf", ""])


def my_cnf(layout: Layout) -> str:
    """MariaDB for a database that is thrown away: small, without a port, and never waiting for the disk."""
    return "[mariadbd]\n" + _assignments(
        {
            "datadir": layout.data,
            "socket": layout.database_socket,
            "pid-file": layout.database / "mariadbd.pid",
            "log-error": layout.daemon_log("mariadbd"),
            "user": "root",
            "skip-networking": 1,
            "innodb_buffer_pool_size": "32M",
            "innodb_log_file_size": "16M",
            # slurmdbd asks for at least this.
            "innodb_lock_wait_timeout": 900,
            "innodb_flush_log_at_trx_commit": 0,
            "innodb_flush_method": "nosync",
            "innodb_doublewrite": 0,
        }
    )


def hosts(spec: SandboxSpec, addressing: Addressing) -> str:
    """``/etc/hosts`` of every place."""
    named = [
        (addressing.login_address, LOGIN),
        *zip(addressing.node_addresses, spec.nodes, strict=True),
    ]
    return "\n".join(["127.0.0.1 localhost", *(f"{address} {name}" for address, name in named), ""])


def _assignments(settings: Mapping[str, object]) -> str:
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _nodes(indices: Iterable[int]) -> str:
    """A run of nodes as Slurm writes it."""
    listed = list(indices)
    return f"node[{listed[0]}-{listed[-1]}]" if len(listed) > 1 else f"node{listed[0]}"
