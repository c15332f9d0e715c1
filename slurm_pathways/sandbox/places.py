"""Places: the login and the nodes, each made of namespaces.

A place has its own process ids, mounts and host name, and with ``has_netns`` its own network. All its processes descend
from one, its *init*, and the kernel ends them with it, whatever they did to get away (double forks, sessions, changed
users). Mounts and network devices go with the last process. So nothing has to be taken down in an order, and ending
a node's init is what losing the node's power is to its processes.

With ``has_netns`` the login's network holds two bridges: ``lan``, and ``cut``, to which the ports of nodes move that
are partitioned off: they reach each other and nobody else, and no device goes down.
"""

from collections.abc import Iterable, Sequence

from slurm_pathways.sandbox.layout import Layout
from slurm_pathways.sandbox.spec import LOGIN, Addressing, SandboxSpec

#: What a place's init writes once it is set up.
READY = "ready"

#: The bridges of the login's network.
LAN = "lan"
CUT = "cut"

_NETWORK_BITS = 16

# Init stays and reaps: shells collect whatever is orphaned to them. Arguments: host name, hosts file, folders on which
# to put file systems of their own.
_INIT = f"""
hostname "$1"
mount --bind "$2" /etc/hosts
shift 2
for folder; do mount -t tmpfs -o mode=1777 sandbox "$folder"; done
echo {READY}
exec </dev/null >/dev/null 2>&1
sleep infinity & wait
"""

# Arguments: hosts file, then the command.
_ENTER = 'mount --bind "$0" /etc/hosts && exec "$@"'


def init_argv(place: str, spec: SandboxSpec, layout: Layout) -> tuple[str, ...]:
    """The command that makes a place and stays as its init's parent; it writes ``READY`` to stdout."""
    own_folders = () if place == LOGIN else ("/dev/shm", str(layout.local))
    return (
        *("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount", "--mount-proc", "--uts"),
        *(("--net",) if spec.has_netns else ()),
        *("--", "sh", "-eu", "-c", _INIT, "sh", place, str(layout.hosts(place)), *own_folders),
    )


def daemon_argv(init_pid: int, spec: SandboxSpec, argv: Sequence[str]) -> tuple[str, ...]:
    """A command that runs ``argv`` as one of a place's own processes: it ends with the place."""
    network = ("--net",) if spec.has_netns else ()
    return ("nsenter", f"--target={init_pid}", "--pid", "--mount", "--uts", *network, "--wd=/", "--", *argv)


def network_argv(init_pid: int, spec: SandboxSpec, argv: Sequence[str]) -> tuple[str, ...]:
    """A command that runs ``argv`` in a place's network, and is outside of it otherwise."""
    return ("nsenter", f"--net=/proc/{init_pid}/ns/net", "--", *argv) if spec.has_netns else tuple(argv)


def user_argv(init_pid: int, spec: SandboxSpec, layout: Layout, argv: Sequence[str]) -> tuple[str, ...]:
    """A command that becomes ``argv`` on the login: its host name, hosts and network, and the machine's process ids.

    With the machine's process ids it keeps its parent, terminal and signals; by its mount of ``/etc/hosts`` it is found
    when the sandbox ends.
    """
    network = (f"--net=/proc/{init_pid}/ns/net",) if spec.has_netns else ()
    return (
        *("nsenter", f"--uts=/proc/{init_pid}/ns/uts", *network, "--", "unshare", "--mount", "--"),
        *("sh", "-c", _ENTER, str(layout.hosts(LOGIN)), *argv),
    )


def login_network(addressing: Addressing) -> str:
    """Commands for ``ip -batch`` in the login's network."""
    return _lines(
        "link set lo up",
        f"link add {LAN} type bridge",
        f"link add {CUT} type bridge",
        f"addr add {addressing.login_address}/{_NETWORK_BITS} dev {LAN}",
        f"link set {LAN} up",
        f"link set {CUT} up",
    )


def plug_in(inits: Iterable[tuple[int, int]], bridge: str) -> str:
    """Commands for ``ip -batch`` in the login's network that connect nodes.

    Args:
        inits: for each node, its index and the process id of its init.
        bridge: ``LAN`` or ``CUT``.
    """
    return _lines(
        *(
            line
            for index, pid in inits
            for line in (
                f"link add {port(index)} type veth peer name eth0 address {_mac(index)} netns {pid}",
                f"link set {port(index)} master {bridge} up",
            )
        )
    )


def node_network(index: int, addressing: Addressing) -> str:
    """Commands for ``ip -batch`` in a node's network, after ``plug_in``."""
    return _lines(
        "link set lo up", f"addr add {addressing.node_addresses[index]}/{_NETWORK_BITS} dev eth0", "link set eth0 up"
    )


def unplug(index: int) -> str:
    """Commands for ``ip -batch`` in the login's network: what a node says from now on reaches nobody."""
    return _lines(f"link set {port(index)} down")


def remove_port(index: int) -> str:
    """Commands for ``ip -batch -force`` in the login's network; the kernel may have been quicker."""
    return _lines(f"link del {port(index)}")


def move(indices: Iterable[int], bridge: str) -> str:
    """Commands for ``ip -batch`` in the login's network that move nodes' ports to ``LAN`` or ``CUT``."""
    return _lines(*(f"link set {port(index)} master {bridge}" for index in indices))


def port(index: int) -> str:
    """The device of a node in the login's network."""
    return f"port{index}"


def _mac(index: int) -> str:
    """A node's hardware address: it keeps it over reboots, as peers remember it."""
    return f"02:00:0a:4d:01:{index + 1:02x}"


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)
