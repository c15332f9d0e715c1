"""A Python process: ``python -m pathways_runtime.worker.colocated``. Started by an executor, for one session of it."""

import argparse
import logging
import os
import socket
from pathlib import Path
from typing import NoReturn

from pathways_runtime.worker.colocated import guard, sigterm


def main() -> None:
    """Serve the executor until it is gone. Never returns."""
    options = _parser().parse_args()
    # First: there is one thread yet, and little memory.
    guard.start(options.lifeline_fd, (options.socket_fd,))
    sigterm.outlast()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {options.name} python of session {options.session}: %(message)s",
    )
    from pathways_runtime.transport.frames import ConnectionClosed
    from pathways_runtime.worker.colocated import devices, server
    from pathways_runtime.worker.colocated.connection import Connection

    connection = Connection(socket.socket(fileno=options.socket_fd))
    collectives_host = _private_sockets(options)
    path = options.coordination_socket
    made = devices.make(
        options.host, options.num_hosts, options.devices_per_host, path, collectives_host, options.first_id
    )
    made.install()
    try:
        server.Server(connection, options.name, made.by_id).run()
    except ConnectionClosed as gone:
        server.end(0, str(gone))
    except BaseException:
        logging.exception("the Python process failed")
        server.end(1, "it failed")


def _private_sockets(options: argparse.Namespace) -> str:
    """Where devices of this host meet: by sockets that only this user can open, where the library for that is there."""
    from pathways_runtime.core.ids import HostIndex
    from pathways_runtime.worker import collectives, private_sockets

    # What functions start has no use for it.
    preloaded = os.environ.pop(private_sockets.PRELOAD_VARIABLE, "")
    others = ":".join(name for name in preloaded.split(":") if private_sockets.LIBRARY.name not in name)
    if others:
        os.environ[private_sockets.PRELOAD_VARIABLE] = others
    if options.num_hosts == 1 or not private_sockets.is_preloaded():
        return collectives.LOOPBACK
    folder = private_sockets.folder_beside(f"unix:{options.coordination_socket.absolute()}")
    sockets = private_sockets.PrivateSockets(folder, HostIndex(options.host), _refuse)
    return sockets.own_stand_in


def _refuse(host: int, port: int) -> NoReturn:
    raise ConnectionRefusedError(f"functions do not compute together with those of host {host}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pathways_runtime.worker.colocated", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True, help="its end of the pair to the executor")
    parser.add_argument("--name", required=True, help="the host's name for people")
    parser.add_argument("--session", type=int, required=True)
    parser.add_argument("--host", type=int, required=True, help="the host's number")
    parser.add_argument("--num-hosts", type=int, required=True)
    parser.add_argument("--devices-per-host", type=int, required=True)
    parser.add_argument("--first-id", type=int, default=0, help="the client's number of the first CPU device")
    parser.add_argument("--coordination-socket", type=Path, required=True, help="a socket that nobody else uses")
    parser.add_argument("--lifeline-fd", type=int, required=True)
    return parser


if __name__ == "__main__":
    main()
