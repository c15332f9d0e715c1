"""The streams of operations to the executors: encoded once, shared by all hosts that get the same."""

from collections.abc import Callable

import msgspec

from pathways_runtime.core.controller.host_groups import HostGroup
from pathways_runtime.core.controller.instructions import Dispatch, Substitute
from pathways_runtime.core.ids import HostIndex, Seq, SessionId
from pathways_runtime.wire.messages import Batch, Sequenced

#: Everything of an encoded Batch before the count of its operations: ``["Batch", [...]]``.
_BATCH_HEAD = msgspec.msgpack.encode(Batch(()))[:-1]
#: msgpack: an array whose 32 bit length follows.
_ARRAY32 = b"\xdd"


class OperationStreams:
    """Gathers the operations of one turn and sends each host one Batch with those of its own.

    Work per operation does not grow with its hosts: consecutive operations of one group of hosts are a *run*, joined
        once, and
    hosts that get the same runs get the same bytes.

    Args:
        send: called with a host and an encoded Batch.
    """

    def __init__(self, send: Callable[[HostIndex, bytes], None]) -> None:
        self._send = send
        self._encode = msgspec.msgpack.Encoder().encode
        self._runs: list[tuple[HostGroup, list[bytes]]] = []
        self._last_group: HostGroup | None = None
        self._elements: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def dispatch(self, instruction: Dispatch, body: msgspec.Raw) -> None:
        """Append a session's operation; ``body`` is it, encoded."""
        self._append(instruction.group, instruction.seq, instruction.submission.session, body)

    def substitute(self, instruction: Substitute) -> None:
        """Append an operation of the controller's own making."""
        body = msgspec.Raw(self._encode(instruction.operation))
        self._append(instruction.group, instruction.seq, instruction.session, body)

    def flush(self) -> None:
        """Send everything."""
        runs, self._runs, self._last_group = self._runs, [], None
        if len(runs) == 1:
            batch = _encode_batch(runs)
            for host in runs[0][0].hosts:
                self._send(host, batch)
            return
        runs_of_host: dict[HostIndex, list[int]] = {}
        for place, (group, _) in enumerate(runs):
            for host in group.hosts:
                runs_of_host.setdefault(host, []).append(place)
        batches: dict[tuple[int, ...], bytes] = {}
        for host, places in runs_of_host.items():
            key = tuple(places)
            shared = batches.get(key)
            if shared is None:
                shared = batches[key] = _encode_batch([runs[place] for place in places])
            self._send(host, shared)

    def _append(self, group: HostGroup, seq: Seq, session: SessionId, body: msgspec.Raw) -> None:
        if group is not self._last_group:
            self._last_group = group
            self._elements = []
            self._runs.append((group, self._elements))
        self._elements.append(self._encode(Sequenced(seq, session, body)))


def _encode_batch(runs: list[tuple[HostGroup, list[bytes]]]) -> bytes:
    count = sum(len(elements) for _, elements in runs)
    return b"".join([_BATCH_HEAD, _ARRAY32, count.to_bytes(4, "big"), *(e for _, elements in runs for e in elements)])
