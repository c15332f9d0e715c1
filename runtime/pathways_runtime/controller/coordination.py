"""The coordination service of one world, in a process of its own.

When a coordination service ends, jaxlib aborts every process that is connected to it, within a fifth of a second. So
it lives neither in a worker nor in the controller but in this process, which does nothing else and is as small as
jaxlib allows.

    python -m pathways_runtime.controller.coordination --num-members 4 --listen unix:/path --lifeline-fd N --events-fd M

It says ``{"event": "listening", "address": "unix:/path"}`` once members may connect. jaxlib's service knows no
authentication, so it listens at that socket only, which is for this user. With ``--credentials`` and ``--advertise``,
members of other hosts come through a tunnel whose exit is in this process too: the address is then
``tcp:host:port,unix:/path``.

This is the second place, beside ``worker.pjrt``, that calls jaxlib's private API: it must run without the rest of
JAX, and controller and worker do not import one another.
"""

import argparse
import os
import sys
import threading
import traceback

from jaxlib import _jax

from pathways_runtime.transport import addresses, network
from pathways_runtime.transport.lifeline import EventWriter, die_with_parent
from pathways_runtime.transport.tunnel import Exit

#: Silence after which the service takes a member for dead; must equal what ``worker.pjrt`` gives its clients. Long,
#: because it is the controller's heartbeat that finds dead hosts.
HEARTBEAT_TIMEOUT_S = 100
SHUTDOWN_TIMEOUT_S = 5


def main() -> int:
    """Serve until the parent is gone or SIGTERM comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-members", type=int, required=True)
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="unix:/path")
    network.add_options(parser)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    threading.excepthook = _end_with
    events = EventWriter(arguments.events_fd)
    # The socket is of mode 0600 from the start.
    os.umask(0o177)
    # Recoverable: the loss of one member must not abort the others, whose arrays are still good.
    service = _jax.get_distributed_runtime_service(
        str(addresses.parse_unix(arguments.listen)),
        arguments.num_members,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        recoverable=True,
    )
    between_hosts = network.Network.from_options(arguments.credentials, arguments.advertise)
    tunnels = None if between_hosts is None else Exit(arguments.listen, between_hosts)
    address = arguments.listen if tunnels is None else addresses.both_ways(tunnels.address, arguments.listen)
    events.write("listening", address=address)
    while os.read(arguments.lifeline_fd, 4096):
        pass
    # No orderly shutdown: it would wait for members, and whoever ends the service has ended them.
    del service
    return 0


def _end_with(failed: threading.ExceptHookArgs) -> None:
    """Tunnels that nobody serves would leave members waiting; the end of this process is noticed."""
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
