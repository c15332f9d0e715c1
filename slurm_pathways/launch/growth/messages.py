"""What a run and those who lend it nodes say: JSON lines over a Unix socket in the run folder.

A companion says ``Lend`` and stays connected as long as its nodes are there; the run answers ``Taken`` or ``Refused``,
tells ``News`` of these nodes, and ``Over`` when it needs them no more. Who asks before says ``Inquire``, and who waits
for a companion ``Await``.
"""

import msgspec

from slurm_pathways.slurm.quantities import Gres

#: Of the socket, in the run folder.
SOCKET_NAME = "growth"


class Inquire(msgspec.Struct, frozen=True, tag="inquire"):
    """What would nodes have to be?"""


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Nodes for the run.

    Attributes:
        companion: what people call who lends them.
        nodes: of job ``job_id``, or, where that is None, names of more workers on this machine.
        cpus_per_node, gres_per_node: as in ``slurm.environment.Allocation``.
    """

    companion: str
    nodes: tuple[str, ...]
    job_id: int | None = None
    cpus_per_node: tuple[int, ...] | None = None
    gres_per_node: tuple[Gres, ...] = ()


class Await(msgspec.Struct, frozen=True, tag="await"):
    """Say ``Joined`` when all nodes of a companion have joined. Who asks goes after ``timeout_s``."""

    companion: str
    timeout_s: float


Request = Inquire | Lend | Await


class Facts(msgspec.Struct, frozen=True, tag="facts"):
    """What nodes have to be, and whose run it is. ``gres_per_node``: of the run's own nodes."""

    job_id: int | None
    devices_per_host: int
    platform: str
    gres_per_node: tuple[Gres, ...] = ()


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """Workers are started on the nodes; these are their names."""

    workers: tuple[str, ...]


class News(msgspec.Struct, frozen=True, tag="news"):
    """Something happened to the nodes, in words for people. ``num_ready``: how many have joined the run so far."""

    text: str
    num_ready: int


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """All nodes of a companion have joined."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The nodes cannot take part; the reason is for people."""

    reason: str


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The nodes are free. ``has_failed``: the run goes on, but has no use for them."""

    reason: str
    has_failed: bool = False


class StillThere(msgspec.Struct, frozen=True, tag="still_there"):
    """Said now and then by who passes the others on from the run's node to a companion."""


Answer = Facts | Taken | News | Joined | Refused | Over | StillThere
