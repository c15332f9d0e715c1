"""``python -m pathways_runtime.controller``: the controller process of an allocation."""

import argparse
import asyncio
import dataclasses
import gc
import logging
import signal
import sys

import uvloop

from pathways_runtime.controller.server import Controller
from pathways_runtime.core.controller.core import ControllerCore
from pathways_runtime.core.defaults import HEARTBEAT_TIMEOUT_S, RELAY_FANOUT
from pathways_runtime.core.topology import Topology
from pathways_runtime.transport import addresses, network
from pathways_runtime.transport.credentials import CredentialsError
from pathways_runtime.transport.lifeline import EventWriter, watch_lifeline_on_loop

#: Of the heartbeat timeout: how long a host may not answer its peers' kernels.
_UNREACHABLE_SHARE = 3 / 8


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="pathways_runtime.controller", description="The controller of an allocation.")
    parser.add_argument(
        "--listen",
        required=True,
        action="append",
        metavar="ADDRESS",
        help="unix:/path or tcp:host:port; may be repeated",
    )
    network.add_options(parser)
    parser.add_argument("--num-slices", type=int, required=True)
    parser.add_argument("--hosts-per-slice", type=int, required=True)
    parser.add_argument("--devices-per-host", type=int, required=True)
    parser.add_argument("--platform", default="cpu", help="PJRT platform of the executors")
    parser.add_argument("--spares", type=int, default=0, help="workers beyond those that the slices need")
    parser.add_argument("--absent-slices", type=int, default=0, help="further slices, which begin without workers")
    parser.add_argument(
        "--relay-fanout", type=int, default=RELAY_FANOUT, help="executors of more hosts than this are behind relays"
    )
    parser.add_argument("--heartbeat-timeout-s", type=float, default=HEARTBEAT_TIMEOUT_S)
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    arguments = parser.parse_args(argv)
    for name in ("num_slices", "hosts_per_slice", "devices_per_host", "relay_fanout"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(arguments.spares, arguments.absent_slices) < 0 or arguments.heartbeat_timeout_s <= 0:
        parser.error("--spares and --absent-slices must not be negative, --heartbeat-timeout-s must be positive")
    return arguments


async def serve(arguments: argparse.Namespace) -> int:
    """Run a controller until its launcher is gone or a signal asks it to end."""
    num_slices = arguments.num_slices + arguments.absent_slices
    topology = Topology(num_slices, arguments.hosts_per_slice, arguments.devices_per_host, arguments.platform)
    core = ControllerCore(
        topology,
        arguments.spares,
        int(arguments.heartbeat_timeout_s * 1e9),
        relay_fanout=arguments.relay_fanout,
        num_absent_slices=arguments.absent_slices,
    )
    between_hosts = network.Network.from_options(arguments.credentials, arguments.advertise)
    # A host without power says no more; that is seen sooner than that one of its processes is stuck.
    unreachable_s = arguments.heartbeat_timeout_s * _UNREACHABLE_SHARE
    controller = Controller(
        core,
        topology,
        arguments.listen,
        EventWriter(arguments.events_fd),
        None if between_hosts is None else dataclasses.replace(between_hosts, unreachable_timeout_s=unreachable_s),
    )
    watch_lifeline_on_loop(arguments.lifeline_fd, lambda: controller.request_end("the launcher is gone"))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, controller.request_end, f"signal {signal.Signals(number).name}")
    # What was made so far stays for good; of what operations make, reference counts free all that is not kept.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    return await controller.run()


def main() -> int:
    """Returns the exit code."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        exit_code: int = uvloop.run(serve(arguments))
    except (OSError, addresses.AddressError, CredentialsError) as failure:
        print(f"the controller cannot start: {failure}", file=sys.stderr)
        return 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
