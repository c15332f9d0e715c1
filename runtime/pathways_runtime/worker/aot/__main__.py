"""``python -m pathways_runtime.worker.aot``: the process of a runtime that only compiles."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from pathways_runtime.transport import addresses
from pathways_runtime.transport.lifeline import EventWriter, watch_lifeline_on_loop
from pathways_runtime.worker import environment
from pathways_runtime.worker.aot import targets


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="pathways_runtime.worker.aot", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="unix:/path")
    parser.add_argument("--topology", required=True, type=targets.parse, help=targets.ALLOWED)
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--compile-cache", type=Path, required=True, metavar="DIR")
    parser.add_argument("--idle-launches", type=int, default=0, help="say so after so many launches of known programs")
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    return parser.parse_args(argv)


async def serve(arguments: argparse.Namespace) -> int:
    """Serve until the launcher is gone or a signal asks for the end. Returns the exit code."""
    events = EventWriter(arguments.events_fd)
    target: targets.Target = arguments.topology
    # jaxlib reads the environment when it is loaded, so what imports it comes only now.
    from pathways_runtime.worker import pjrt
    from pathways_runtime.worker.aot.compiler import Compiler
    from pathways_runtime.worker.aot.server import Ledger, Server

    try:
        compiler = Compiler(target, arguments.num_slices, arguments.compile_cache)
    except (pjrt.PjrtError, ImportError, RuntimeError) as failure:
        logging.getLogger(__name__).exception("no compiler for %s", target.name)
        events.write("failed", reason=f"there is no compiler for {target.name}: {failure}")
        return 1
    ledger = Ledger(events, arguments.idle_launches)
    server = Server(compiler, arguments.listen, events, ledger)
    watch_lifeline_on_loop(arguments.lifeline_fd, lambda: server.request_end("the launcher is gone"))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, server.request_end, f"signal {signal.Signals(number).name}"
        )
    await server.run()
    ledger.close()
    return 0


def main() -> None:
    """Never returns: threads may be in the compiler."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    target: targets.Target = arguments.topology
    environment.prepare(arguments.num_slices * target.hosts_per_slice * target.devices_per_host, None)
    environment.prepare_for_tpu_compiler()
    code = 1
    try:
        code = asyncio.run(serve(arguments))
    except (OSError, addresses.AddressError) as failure:
        print(f"the compiler's process cannot start: {failure}", file=sys.stderr)
    except Exception:
        logging.getLogger(__name__).exception("the compiler's process failed")
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
