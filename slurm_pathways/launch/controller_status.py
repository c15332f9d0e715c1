"""Ask a controller for its status report; docs/status.md has the schema."""

import json
import os
import sys
from typing import Any

_CONNECT_TIMEOUT_S = 2.0

Report = dict[str, Any]


class NoAnswer(Exception):
    """There was none in time, or none that can be used; the message says so without naming the controller."""


def ask(address: str, timeout_s: float) -> Report:
    """The report of the controller that listens at a Unix socket.

    Raises:
        NoAnswer: see the class.
    """
    # Here: whoever can ask imports this module (launchers, every agent), few ever ask, and these import asyncio.
    from pathways_runtime.transport.addresses import ConnectFailed, connect_unix
    from pathways_runtime.transport.frames import Channel, ConnectionClosed, FrameCodec, FrameError
    from pathways_runtime.wire.messages import PROTOCOL_VERSION, AnyMessage, Hello, Refused, StatusReply, StatusRequest

    try:
        with connect_unix(address, min(timeout_s, _CONNECT_TIMEOUT_S)) as sock:
            sock.settimeout(timeout_s)
            channel: Channel[AnyMessage] = Channel(sock, FrameCodec(AnyMessage))
            channel.send(Hello("status", PROTOCOL_VERSION, os.getpid()))
            channel.send(StatusRequest(1))
            while True:
                for frame in channel.receive():
                    match frame.message:
                        case StatusReply(_, report):
                            return report
                        case Refused(reason):
                            raise NoAnswer(f"refuses: {reason}")
                        case other:
                            raise NoAnswer(f"answers with {type(other).__name__}")
    except (ConnectFailed, ConnectionClosed, FrameError) as failure:
        raise NoAnswer(f"does not answer: {failure}") from failure


def main() -> int:
    """Ask from another process, by ``ADDRESS TIMEOUT_S``: the report as JSON, or why there is none on stderr."""
    try:
        print(json.dumps(ask(sys.argv[1], float(sys.argv[2]))))
    except NoAnswer as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
