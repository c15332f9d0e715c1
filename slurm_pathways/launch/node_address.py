"""The address under which the other nodes of a job reach this one."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurm_pathways.config import ConfigurationError

#: Set by srun for its tasks: the address of the machine on which srun runs.
_SRUN_ADDRESS = "SLURM_SRUN_COMM_HOST"
_ANY_PORT = 9
#: Together the same for all processes that have one loopback interface: one machine, since its start, and on it one
#: network namespace.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")

#: The addresses of each interface.
Interfaces = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is: its Slurm name, the address that it gives others, and with whom it shares its loopback
    interface."""

    node: str
    address: str
    machine: str


def own_address(environ: Mapping[str, str], interface: str | None = None) -> str:
    """An IP address of this node: that of ``interface``, else of the one towards the launcher where Slurm says where
    that is.

    Names that resolve to the loopback interface, as many distributions have it for a machine's own, are passed over;
    only where there is nothing else, such an address is the answer: ``explain_unreachable`` says whether it will do.

    Args:
        interface: the setting; see ``choose``.

    Raises:
        ConfigurationError: see ``choose``.
    """
    if interface is not None:
        return choose(interface, own_interfaces())
    found = list(_candidates(environ))
    for address in found:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return found[0] if found else "127.0.0.1"


def own_place(environ: Mapping[str, str], interface: str | None = None) -> Place:
    """Where this node is; arguments and errors are those of ``own_address``."""
    node = environ.get("SLURMD_NODENAME") or os.uname().nodename
    return Place(node, own_address(environ, interface), own_machine())


def own_machine() -> str:
    """The same text for all processes that share the loopback interface of this one, and for no other."""
    return f"{_BOOT_ID.read_text().strip()} {_NETWORK.readlink()}"


def own_interfaces() -> dict[str, list[str]]:
    """This node's interfaces that are up, with their IP addresses."""
    is_up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in is_up
    }


def choose(interface: str, there: Interfaces) -> str:
    """The address that a node with these interfaces has on the network that the user named; IPv4 goes first.

    Args:
        interface: an interface's name (``ib0``) or a network (``10.0.0.0/8``, ``fd00::/8``).

    Raises:
        ConfigurationError: it has none, or one that only itself reaches.
    """
    if "/" in interface:
        network = ipaddress.ip_network(interface, strict=False)
        found = [text for addresses in there.values() for text in addresses if _plain(text) in network]
        missing = f"has no address in the network {interface}"
    else:
        found = list(there.get(interface, ()))
        missing = f"has no interface {interface} with an address" if interface in there else f"has no {interface}"
    # Link-local addresses need the name of an interface, which is another on other nodes.
    found = sorted((text for text in found if "%" not in text), key=lambda text: _plain(text).version)
    if not found:
        raise ConfigurationError(
            f"--interface {interface}: this node {missing}; it has {_list(there)}. Name one that all nodes of the job "
            "have, or a network in which each has an address"
        )
    if _plain(found[0]).is_loopback:
        raise ConfigurationError(
            f"--interface {interface}: {found[0]} is a loopback address, which other nodes cannot reach; this node has "
            f"{_list(there)}"
        )
    return found[0]


def explain_unreachable(places: Sequence[Place]) -> str | None:
    """Why some of these cannot reach another; None if nothing speaks against it.

    A loopback address is good enough as long as all share that interface.
    """
    if len({place.machine for place in places}) < 2:
        return None
    lost = [place for place in places if _plain(place.address).is_loopback]
    if not lost:
        return None
    names = ", ".join(f"{place.node} ({place.address})" for place in lost)
    return (
        f"the names of nodes resolve to loopback addresses on these nodes, where others cannot reach them: {names}. "
        "Say which network to use with --interface, an interface's name or a network like 10.0.0.0/8; or take the "
        "node's name out of the loopback line of its /etc/hosts"
    )


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])


def _list(there: Interfaces) -> str:
    listed = ", ".join(
        f"{name} ({', '.join(addresses)})"
        for name, addresses in sorted(there.items())
        if any(not _plain(text).is_loopback for text in addresses)
    )
    return listed or "no interface with an address but loopback"


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
