"""A Python process: ``python -m pathways_runtime.worker.colocated``. Started by an executor, for one session of it."""

import argparse
import logging
import socket
from pathlib import Path

from pathways_runtime.worker.colocated import guard


def main() -> None:
    """Serve the executor until it is gone. Never returns."""
    options = _parser().parse_args()
    # First: there is one thread yet, and little memory.
    guard.start(options.lifeline_fd, (options.socket_fd,))
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {options.name} python of session {options.session}: %(message)s",
    )
    from pathways_runtime.transport.frames import ConnectionClosed
    from pathways_runtime.worker.colocated import devices, server
    from pathways_runtime.worker.colocated.connection import Connection

    connection = Connection(socket.socket(fileno=options.socket_fd))
    made = devices.make(options.host, options.num_hosts, options.devices_per_host, options.coordination_socket)
    made.install()
    try:
        server.Server(connection, options.name, made.by_id).run()
    except ConnectionClosed as gone:
        server.end(0, str(gone))
    except BaseException:
        logging.exception("the Python process failed")
        server.end(1, "it failed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pathways_runtime.worker.colocated", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True, help="its end of the pair to the executor")
    parser.add_argument("--name", required=True, help="the host's name for people")
    parser.add_argument("--session", type=int, required=True)
    parser.add_argument("--host", type=int, required=True, help="the host's number")
    parser.add_argument("--num-hosts", type=int, required=True)
    parser.add_argument("--devices-per-host", type=int, required=True)
    parser.add_argument("--coordination-socket", type=Path, required=True, help="a socket that nobody else uses")
    parser.add_argument("--lifeline-fd", type=int, required=True)
    return parser


if __name__ == "__main__":
    main()
