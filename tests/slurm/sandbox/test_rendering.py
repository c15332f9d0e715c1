"""Configuration files, plans and commands, as text: nothing runs."""

from pathlib import Path

import pytest

from slurm_pathways.sandbox import packages, places, plan, render
from slurm_pathways.sandbox.configuration import in_containers, on_one_machine
from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.layout import Layout
from slurm_pathways.sandbox.record import Process, Record, decode, encode
from slurm_pathways.sandbox.spec import SandboxSpec, isolated_addressing, num_shared_ports, shared_addressing

LAYOUT = Layout(Path("/srv/box"), "the-mark")
SPEC = SandboxSpec(num_nodes=6, has_netns=True, gres_per_node=2, plugins=("/opt/pw.so",))
ADDRESSING = isolated_addressing(SPEC)
FILES = render.files(on_one_machine(SPEC, LAYOUT, ADDRESSING))


def settings(text: str) -> dict[str, str]:
    """The ``key=value`` lines of a file."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and " " not in line)


def test_nodes_partition_topology_and_gres() -> None:
    lines = FILES["slurm.conf"].splitlines()
    assert [line for line in lines if line.startswith("NodeName=")][3:5] == [
        "NodeName=node3 NodeAddr=10.77.1.4 Port=6818 Feature=rack0 CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 "
        "ThreadsPerCore=1 RealMemory=8000 Gres=tpu:v5p:2 State=UNKNOWN",
        "NodeName=node4 NodeAddr=10.77.1.5 Port=6818 Feature=rack1 CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 "
        "ThreadsPerCore=1 RealMemory=8000 Gres=tpu:v5p:2 State=UNKNOWN",
    ]
    assert lines[-2:] == [
        "PartitionName=tpu Default=YES PriorityTier=2 PreemptMode=OFF Nodes=node[0-5] MaxTime=1:00:00 State=UP",
        "PartitionName=preemptible PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 Nodes=node[0-5] MaxTime=1:00:00 "
        "State=UP",
    ]
    assert FILES["topology.conf"] == (
        "SwitchName=leaf0 Nodes=node[0-3]\nSwitchName=leaf1 Nodes=node[4-5]\nSwitchName=spine Switches=leaf[0-1]\n"
    )
    assert FILES["gres.conf"] == "AutoDetect=off\nNodeName=node[0-5] Name=tpu Type=v5p Count=2\n"


def test_one_node() -> None:
    files = render.files(
        on_one_machine(SandboxSpec(num_nodes=1), LAYOUT, isolated_addressing(SandboxSpec(num_nodes=1)))
    )
    assert files["topology.conf"] == "SwitchName=leaf0 Nodes=node0\nSwitchName=spine Switches=leaf[0-0]\n"
    assert "Nodes=node0 MaxTime" in files["slurm.conf"]


def test_all_that_speaks_munge_uses_the_private_socket() -> None:
    slurm, slurmdbd = settings(FILES["slurm.conf"]), settings(FILES["slurmdbd.conf"])
    assert slurm["AuthInfo"] == slurmdbd["AuthInfo"] == "socket=/srv/box/run/munge.socket"
    assert slurm["AccountingStoragePass"] == "/srv/box/run/munge.socket"


def test_every_path_lies_in_the_folder() -> None:
    for name, text in {**FILES, "my.cnf": render.my_cnf(LAYOUT)}.items():
        for value in settings(text).values():
            path = value.removeprefix("socket=")
            if path.startswith("/"):
                assert path.startswith("/srv/box/"), f"{name}: {value}"


def test_plugins_and_drop_ins() -> None:
    assert FILES["plugstack.conf"] == "optional /opt/pw.so\ninclude /srv/box/etc/plugstack.conf.d/*.conf\n"


def test_on_the_machines_network_every_port_is_its_own() -> None:
    spec = SandboxSpec(num_nodes=3)
    addressing = shared_addressing(spec, tuple(range(50000, 50000 + num_shared_ports(spec))))
    text = render.slurm_conf(on_one_machine(spec, LAYOUT, addressing))
    assert settings(text)["SlurmctldPort"] == "50000"
    assert settings(text)["AccountingStoragePort"] == "50001"
    nodes = [line.split()[:3] for line in text.splitlines() if line.startswith("NodeName=")]
    assert nodes == [
        ["NodeName=node0", "NodeAddr=127.0.1.1", "Port=50002"],
        ["NodeName=node1", "NodeAddr=127.0.1.2", "Port=50003"],
        ["NodeName=node2", "NodeAddr=127.0.1.3", "Port=50004"],
    ]


def test_containers_find_each_other_by_name() -> None:
    files = render.files(in_containers(SandboxSpec(num_nodes=2)))
    slurm, slurmdbd = settings(files["slurm.conf"]), settings(files["slurmdbd.conf"])
    assert (slurm["SlurmctldHost"], slurm["AccountingStorageHost"]) == ("slurmctld", "slurmdbd")
    assert (slurmdbd["DbdHost"], slurmdbd["StorageHost"], slurmdbd["StoragePass"]) == ("slurmdbd", "database", "slurm")
    assert "NodeAddr" not in files["slurm.conf"]
    assert not {"AuthInfo", "AccountingStoragePass", "SlurmctldLogFile"} & set(slurm)


def test_hosts() -> None:
    text = render.hosts(SandboxSpec(num_nodes=2), isolated_addressing(SandboxSpec(num_nodes=2)))
    assert text == "127.0.0.1 localhost\n10.77.0.1 login\n10.77.1.1 node0\n10.77.1.2 node1\n"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_nodes": 0}, "1 to 64 nodes, not 0"),
        ({"num_nodes": 65}, "1 to 64 nodes, not 65"),
        ({"plugins": ("pw.so",)}, "absolute path"),
        ({"plugins": ("/opt/my plugin.so",)}, "without spaces"),
    ],
)
def test_what_a_sandbox_cannot_be(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SandboxError, match=words):
        SandboxSpec(**fields)  # type: ignore[arg-type]


def test_the_order_of_the_start() -> None:
    stages = plan.start_all(SandboxSpec(num_nodes=2), LAYOUT, isolated_addressing(SandboxSpec(num_nodes=2)))
    names = [[getattr(step, "name", type(step).__name__) for step in stage] for stage in stages]
    assert names == [
        ["MakePlaces"],
        ["mariadb-install-db", "munged"],
        ["mariadbd"],
        ["slurmdbd"],
        ["slurmctld"],
        ["slurmd.node0", "slurmd.node1"],
        ["AwaitNodes"],
    ]


def test_every_program_that_is_started_has_a_package() -> None:
    spec = SandboxSpec(num_nodes=1, has_netns=True)
    argvs = [
        step.argv
        for stage in plan.start_all(spec, LAYOUT, isolated_addressing(spec))
        for step in stage
        if isinstance(step, plan.StartDaemon | plan.RunProgram)
    ]
    argvs += [places.init_argv("node0", spec, LAYOUT), places.daemon_argv(1, spec, ["true"])]
    provided = {program for programs in packages.DEBIAN_PACKAGES.values() for program in programs}
    assert {argv[0] for argv in argvs} <= provided


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    lacking = packages.missing(lambda program: None if program in ("munged", "slurmstepd") else f"/usr/sbin/{program}")
    assert lacking == ["slurmd", "munge"]
    assert packages.install_command(lacking) == "apt-get install -y --no-install-recommends slurmd munge"
    assert packages.missing(lambda program: program) == []


def test_only_with_netns_is_there_a_network_to_enter() -> None:
    for has_netns in (True, False):
        spec = SandboxSpec(has_netns=has_netns)
        commands = [
            places.init_argv("node0", spec, LAYOUT),
            places.daemon_argv(7, spec, ["x"]),
            places.user_argv(7, spec, LAYOUT, ["x"]),
        ]
        assert [any(word.startswith("--net") for word in command) for command in commands] == [has_netns] * 3
    assert places.network_argv(7, SandboxSpec(), ["ip", "link"]) == ("ip", "link")


def test_a_node_keeps_its_hardware_address() -> None:
    assert places.plug_in([(9, 4711)], places.LAN) == (
        "link add port9 type veth peer name eth0 address 02:00:0a:4d:01:0a netns 4711\nlink set port9 master lan up\n"
    )


def test_the_slurm_that_a_user_is_in_does_not_reach_the_sandbox() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_PATHWAYS_RUNS": "/r", "HOME": "/h"}
    assert plan.user_environ(LAYOUT, environ) == {
        "SLURM_CONF": "/srv/box/etc/slurm.conf",
        "SLURM_PATHWAYS_RUNS": "/r",
        "HOME": "/h",
    }


def test_records_of_other_versions_are_refused() -> None:
    record = Record(mark="m", spec=SPEC, addressing=ADDRESSING, inits={"login": Process(5, 77)}, cut=("node1",))
    assert decode(encode(record), LAYOUT.record) == record
    with pytest.raises(SandboxError, match="schema 2, not 1"):
        decode(encode(record).replace(b'"schema_version": 1', b'"schema_version": 2'), LAYOUT.record)
    with pytest.raises(SandboxError, match="is not the record of a sandbox"):
        decode(b"{}", LAYOUT.record)
