"""The address under which the other nodes of a job reach this one."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping

#: Set by srun for its tasks: the address of the machine on which srun runs.
_SRUN_ADDRESS = "SLURM_SRUN_COMM_HOST"
_ANY_PORT = 9


def own_address(environ: Mapping[str, str]) -> str:
    """An IP address of this node, of the interface towards the launcher where Slurm says where that is.

    Names that resolve to the loopback interface, as many distributions have it for a machine's own, are passed over;
    only where there is nothing else, such an address is the answer: then all nodes are one machine.
    """
    found = list(_candidates(environ))
    for address in found:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return found[0] if found else "127.0.0.1"


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    if peer := environ.get(_SRUN_ADDRESS):
        # Nothing is sent: connecting a datagram socket only chooses the interface.
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, _ANY_PORT))
            yield probe.getsockname()[0]
    for name in (environ.get("SLURMD_NODENAME"), os.uname().nodename):
        if name:
            with contextlib.suppress(OSError):
                yield socket.gethostbyname(name)
