"""What a sandbox is to be: how many nodes, what each says it has, and where each listens."""

import msgspec

from slurm_pathways.sandbox.errors import SandboxError

#: Each node is a handful of small processes (some 15 MB); addresses would allow for 250.
MAX_NODES = 64

#: The host name of the machine from which users submit; slurmctld, slurmdbd, the database and munge run there.
LOGIN = "login"


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as it was asked for.

    Attributes:
        num_nodes: ``node0`` and so on.
        has_netns: whether every node has a network of its own, which can be cut; else all share the machine's.
        nodes_per_switch: leaves of the topology, in the order of nodes; also the nodes' feature ``rack<i>``.
        cpus_per_node, memory_mb: what nodes say they have; the machine may have less.
        gres_type, gres_per_node: so many ``gres/tpu`` of this type on each.
        slurmd_timeout_s: SlurmdTimeout: a node that is silent for about twice as long is DOWN.
        plugins: absolute paths of SPANK plugins, loaded as ``optional``.
    """

    num_nodes: int = 8
    has_netns: bool = False
    nodes_per_switch: int = 4
    cpus_per_node: int = 8
    memory_mb: int = 8000
    gres_type: str = "v5p"
    gres_per_node: int = 4
    slurmd_timeout_s: int = 10
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise SandboxError(f"a sandbox has 1 to {MAX_NODES} nodes, not {self.num_nodes}")
        for plugin in self.plugins:
            # plugstack.conf knows no quoting.
            if not plugin.startswith("/") or any(character.isspace() for character in plugin):
                raise SandboxError(f"a SPANK plugin is named by an absolute path without spaces, not {plugin!r}")

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, in order."""
        return tuple(f"node{index}" for index in range(self.num_nodes))

    def switches(self) -> tuple[range, ...]:
        """The nodes of each leaf switch."""
        step = self.nodes_per_switch
        return tuple(range(first, min(first + step, self.num_nodes)) for first in range(0, self.num_nodes, step))


class Addressing(msgspec.Struct, frozen=True, kw_only=True):
    """Who listens where.

    Attributes:
        login_address: of slurmctld and slurmdbd.
        controller_port, dbd_port: theirs.
        node_addresses, node_ports: of each slurmd, in the order of nodes.
    """

    login_address: str
    controller_port: int
    dbd_port: int
    node_addresses: tuple[str, ...]
    node_ports: tuple[int, ...]


def isolated_addressing(spec: SandboxSpec) -> Addressing:
    """With networks of its own: nothing else is there, so Slurm's usual ports are free and any subnet will do."""
    return Addressing(
        login_address="10.77.0.1",
        controller_port=6817,
        dbd_port=6819,
        node_addresses=tuple(f"10.77.1.{index + 1}" for index in range(spec.num_nodes)),
        node_ports=(6818,) * spec.num_nodes,
    )


def num_shared_ports(spec: SandboxSpec) -> int:
    """How many free ports ``shared_addressing`` needs."""
    return 2 + spec.num_nodes


def shared_addressing(spec: SandboxSpec, free_ports: tuple[int, ...]) -> Addressing:
    """On the machine's own loopback, beside whatever else listens there."""
    controller_port, dbd_port, *node_ports = free_ports
    return Addressing(
        login_address="127.0.0.1",
        controller_port=controller_port,
        dbd_port=dbd_port,
        node_addresses=tuple(f"127.0.1.{index + 1}" for index in range(spec.num_nodes)),
        node_ports=tuple(node_ports),
    )
