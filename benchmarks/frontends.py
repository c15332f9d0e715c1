"""``python -m benchmarks.frontends``: what the proxy's front ends cost by themselves, side by side.

Each serves an echo in a process of its own to gRPC's own client. That client, in Python, is the slower half of most
rows, so the server's CPU time stands beside the rates.
"""

import asyncio
import multiprocessing
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from pathways_runtime.proxy.frontend import HOST_BUFFER_METADATA_KEY, SESSION_METADATA_KEY, Connection
from pathways_runtime.proxy.frontend_grpc import GrpcFrontend
from pathways_runtime.proxy.frontend_http2 import Http2Frontend
from pathways_runtime.wire.ifrt.schema import SERVICE

_MIB = 1 << 20
_MESSAGE = bytes(40)
_NUM_CALLS = 1000
_NUM_MESSAGES = 20_000
_TRANSFER_MIB = 256
_START_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 120.0
_REPEATS = 3


class _Echo:
    """A session that answers each request with itself, and an upload that forgets what comes."""

    def __init__(self, connection: Connection | None) -> None:
        if connection is not None:
            self.request = connection.send

    def disconnected(self) -> None:
        pass

    def begin(self, flow: Any) -> None:
        pass

    def cancel(self) -> None:
        pass

    def allocate(self, num_bytes: int) -> None:
        return None

    def write(self, message: Any) -> None:
        pass

    def finish(self) -> bytes:
        return b""


class _EchoBackend:
    """See ``frontend.Backend``."""

    def get_version(self, request: bytes) -> bytes:
        return b"%f" % time.process_time()

    def open_session(self, connection: Connection, metadata: bytes | None, peer: str) -> Any:
        return _Echo(connection)

    def open_upload(self, metadata: bytes | None) -> Any:
        return _Echo(None)

    def lookup_host_buffer(self, request: bytes) -> Iterator[bytes]:
        chunk = bytes(_MIB)
        return (chunk for _ in range(int(request)))

    def delete_host_buffer(self, request: bytes) -> bytes:
        return b""


def _serve(frontend: Callable[[str, Any], Any], address: str) -> None:
    async def serve() -> None:
        listening = frontend(address, _EchoBackend())
        await listening.start()
        await asyncio.Event().wait()

    uvloop.run(serve())


class _Client:
    """Measures one front end; figures in the order of ``_ROWS``."""

    def __init__(self, channel: Any) -> None:
        self._version = channel.unary_unary(f"/{SERVICE}/GetVersion")
        self._session = channel.stream_stream(f"/{SERVICE}/IfrtSession")
        self._store = channel.stream_unary(f"/{SERVICE}/HostBufferStore")
        self._lookup = channel.unary_stream(f"/{SERVICE}/HostBufferLookup")

    def server_cpu_s(self) -> float:
        return float(self._version(b"", timeout=_CALL_TIMEOUT_S))

    def measure(self) -> tuple[float, ...]:
        unary_s = self._timed(_NUM_CALLS, lambda: [self.server_cpu_s() for _ in range(_NUM_CALLS)])
        round_trip_s = self._timed(_NUM_CALLS, self._ping)
        windowed_s = self._timed(_NUM_MESSAGES, self._echo_all)
        up_s = self._timed(_TRANSFER_MIB, self._upload)
        down_s = self._timed(_TRANSFER_MIB, self._download)
        return (
            *(seconds * 1e6 for seconds in (*unary_s, *round_trip_s)),
            1 / windowed_s[0],
            windowed_s[1] * 1e6,
            1 / up_s[0],
            up_s[1] * 1e6,
            1 / down_s[0],
            down_s[1] * 1e6,
        )

    def _timed(self, count: int, action: Callable[[], object]) -> tuple[float, float]:
        """Seconds, and seconds of the server's CPU, for each of ``count``: medians."""
        figures = []
        for _ in range(_REPEATS):
            cpu_s, began_s = self.server_cpu_s(), time.perf_counter()
            action()
            took_s = time.perf_counter() - began_s
            figures.append((took_s / count, (self.server_cpu_s() - cpu_s) / count))
        return statistics.median(took for took, _ in figures), statistics.median(cpu for _, cpu in figures)

    def _stream(self) -> "tuple[queue.SimpleQueue[bytes | None], Any]":
        """A session: what is put is sent, None ends it; and what comes back."""
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = ((SESSION_METADATA_KEY, b""),)
        return requests, self._session(iter(requests.get, None), metadata=metadata, timeout=_CALL_TIMEOUT_S)

    def _ping(self) -> None:
        requests, responses = self._stream()
        for _ in range(_NUM_CALLS):
            requests.put(_MESSAGE)
            next(responses)
        requests.put(None)
        assert list(responses) == []

    def _echo_all(self) -> None:
        # The client's side stays open until all has come back: ending it ends the session.
        requests, responses = self._stream()
        for _ in range(_NUM_MESSAGES):
            requests.put(_MESSAGE)
        for _ in range(_NUM_MESSAGES):
            next(responses)
        requests.put(None)
        assert list(responses) == []

    def _upload(self) -> None:
        metadata = ((HOST_BUFFER_METADATA_KEY, b""),)
        self._store(iter([bytes(_MIB)] * _TRANSFER_MIB), metadata=metadata, timeout=_CALL_TIMEOUT_S)

    def _download(self) -> None:
        received = sum(map(len, self._lookup(b"%d" % _TRANSFER_MIB, timeout=_CALL_TIMEOUT_S)))
        assert received == _TRANSFER_MIB * _MIB


_ROWS = (
    "unary call, us",
    "    of it server CPU, us",
    "round trip in a stream, us",
    "    server CPU each, us",
    "messages in a stream, 1/s",
    "    server CPU each, us",
    "upload, MiB/s",
    "    server CPU, us/MiB",
    "download, MiB/s",
    "    server CPU, us/MiB",
)


def _measure(frontend: Callable[[str, Any], Any]) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 'socket'}"
        server = multiprocessing.get_context("spawn").Process(target=_serve, args=(frontend, address))
        server.start()
        try:
            options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
            with grpc.insecure_channel(address, options=options) as channel:
                grpc.channel_ready_future(channel).result(timeout=_START_TIMEOUT_S)
                return _Client(channel).measure()
        finally:
            server.terminate()
            server.join()


def main() -> None:
    """Print the table."""
    http2, reference = _measure(Http2Frontend), _measure(GrpcFrontend)
    print(f"{'':28}{'http2':>10}{'grpc':>10}")
    for row, ours, theirs in zip(_ROWS, http2, reference, strict=True):
        print(f"{row:28}{ours:10.0f}{theirs:10.0f}")


if __name__ == "__main__":
    main()
