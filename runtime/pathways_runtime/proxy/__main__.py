"""``python -m pathways_runtime.proxy``: see ``proxy.shell``."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from pathways_runtime.proxy.frontend_grpc import GrpcFrontend
from pathways_runtime.proxy.frontend_http2 import Http2Frontend
from pathways_runtime.proxy.host_memory import DEFAULT_BUDGET_BYTES
from pathways_runtime.proxy.shell import Ending, FrontendFactory, Proxy, ProxyAddresses
from pathways_runtime.transport import network
from pathways_runtime.transport.addresses import AddressError
from pathways_runtime.transport.credentials import CredentialsError
from pathways_runtime.transport.lifeline import EventWriter, watch_lifeline_on_loop

logger = logging.getLogger(__name__)

FRONTENDS: dict[str, FrontendFactory] = {"grpc": GrpcFrontend, "http2": Http2Frontend}


def main() -> int:
    """The process; returns its exit code: 0 if it was asked to end, 1 if it could not go on."""
    parser = argparse.ArgumentParser(prog="python -m pathways_runtime.proxy", description=__doc__)
    parser.add_argument("--controller", required=True, metavar="ADDRESS", help="the controller's control socket")
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="where the client connects")
    parser.add_argument("--links", required=True, metavar="ADDRESS", help="where executors connect")
    network.add_options(parser)
    parser.add_argument("--frontend", choices=sorted(FRONTENDS), default="http2")
    parser.add_argument(
        "--connect-timeout-s", type=float, default=30.0, metavar="S", help="how long the controller may take to listen"
    )
    parser.add_argument(
        "--host-buffers-mib",
        type=int,
        default=DEFAULT_BUDGET_BYTES >> 20,
        metavar="MIB",
        help="how much memory host buffers may take before clients that run ahead are held back",
    )
    parser.add_argument("--gs-directory", metavar="DIR", help="gs://bucket/path is DIR/bucket/path")
    parser.add_argument("--events-fd", type=int, metavar="N", help="JSON lines about this process go here")
    parser.add_argument("--lifeline-fd", type=int, metavar="N", help="end of file here: the launcher is gone")
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    arguments = parser.parse_args()
    logging.basicConfig(
        level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        return _run(_serve(arguments))
    except (AddressError, CredentialsError, OSError) as failure:
        logger.error("%s", failure)
        EventWriter(arguments.events_fd).write("ended", reason=str(failure), is_failure=True)
        return 1


async def _serve(arguments: argparse.Namespace) -> int:
    proxy = Proxy(
        ProxyAddresses(
            arguments.controller,
            arguments.listen,
            arguments.links,
            network.Network.from_options(arguments.credentials, arguments.advertise),
        ),
        FRONTENDS[arguments.frontend],
        EventWriter(arguments.events_fd),
        arguments.connect_timeout_s,
        arguments.host_buffers_mib << 20,
        arguments.gs_directory,
    )
    loop = asyncio.get_running_loop()
    watch_lifeline_on_loop(arguments.lifeline_fd, lambda: proxy.end(Ending("the launcher is gone", is_failure=False)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, proxy.end, Ending(f"asked to end by {number.name}", is_failure=False))
    ending = await proxy.run()
    return int(ending.is_failure)


def _run(main_task: Coroutine[Any, Any, int]) -> int:
    """Run on uvloop where it is installed."""
    runner: Callable[[Coroutine[Any, Any, int]], int] = asyncio.run
    try:
        import uvloop
    except ImportError:
        logger.info("uvloop is not installed; the proxy is slower without it")
    else:
        runner = uvloop.run
    return runner(main_task)


if __name__ == "__main__":
    raise SystemExit(main())
