"""What a session says of itself in the ``status`` report; docs/status.md says what the fields mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pathways_runtime.core.ids import Handle, RequestId, SessionId

#: Of the requests that wait for their answer, so many are listed, the oldest first.
MAX_REPORTED_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that is not answered, for ``since_s``."""

    request_id: RequestId
    kind: str
    since_s: float

    @property
    def what(self) -> str:
        """IFRT's name of the request."""
        return self.kind.removesuffix("_request")


@dataclass(frozen=True, slots=True)
class SessionReport:
    """``figures`` is the entry under ``sessions``, ``waiting`` the entries under ``waiting``; all JSON-able."""

    figures: dict[str, Any]
    waiting: list[dict[str, Any]]


def session_report(
    *,
    session_id: SessionId | None,
    client: str,
    age_s: float,
    open_requests: Sequence[OpenRequest],
    queued: Sequence[RequestId],
    missing_buffers: Sequence[Handle],
    figures: Mapping[str, Any],
    counts: Mapping[str, Any],
) -> SessionReport:
    """Put a report together.

    Args:
        session_id: None while the controller has not opened the session.
        queued: requests that have not been begun, in order; the first waits for ``missing_buffers``, if any.
        figures: the core's.
        counts: the shell's.
    """
    # The controller has an ``operations`` of its own, and asks for ``bytes``.
    core = {name: value for name, value in figures.items() if name not in ("operations", "waits")}
    held = figures.get("held_bytes", {})
    waits = {wait["request_id"]: wait for wait in figures.get("waits", ())}
    behind = set(queued[1:])

    def waits_for(request: OpenRequest) -> str:
        if session_id is None:
            return "the controller to open the session: every slice's world must have formed"
        if queued and request.request_id == queued[0]:
            if missing_buffers:
                return f"the client to send host buffers {_list(missing_buffers)}"
            return f"the controller to dispatch operations: {counts['undispatched_operations']} wait there"
        if request.request_id in behind:
            return "the requests before it"
        wait = waits.get(request.request_id)
        if wait is not None:
            return f"hosts {_list(wait['missing_hosts'])}, for the {wait['for']} of arrays {_list(wait['arrays'])}"
        if request.kind == "compile_request":
            return "the controller, to have the program compiled and loaded on its hosts"
        return "an operation that an earlier request waits for too"

    return SessionReport(
        figures={
            "id": session_id,
            "client": client,
            "age_s": age_s,
            **counts,
            **core,
            "bytes": sum(memory["total"] for memory in held.values()),
        },
        waiting=[
            {
                "what": f"{request.what} (request {request.request_id} of session {session_id})",
                "waits_for": waits_for(request),
                "since_s": request.since_s,
                "session": session_id,
            }
            for request in open_requests
        ],
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
