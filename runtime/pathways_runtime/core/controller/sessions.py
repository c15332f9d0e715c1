"""Sessions: who is attached, from which proxy. Every session may use every device from attach to detach."""

from pathways_runtime.core.controller.events import PeerId, ProtocolViolation, SessionRequested
from pathways_runtime.core.ids import SessionId


class Session:
    """One attached client; ``request`` says who it is."""

    def __init__(self, session: SessionId, request: SessionRequested) -> None:
        self.session = session
        self.request = request
        self.peer = request.peer


class Sessions:
    """Attached sessions, and requests that wait until the runtime is ready."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, Session] = {}
        self._last_id = SessionId(0)
        self._waiting: list[SessionRequested] = []

    def all(self) -> list[Session]:
        """By id."""
        return list(self._sessions.values())

    def get(self, session: SessionId) -> Session | None:
        """An attached session."""
        return self._sessions.get(session)

    def owned(self, session: SessionId, peer: PeerId) -> Session:
        """An attached session of the proxy on ``peer``.

        Raises:
            ProtocolViolation: there is none.
        """
        found = self._sessions.get(session)
        if found is None or found.peer != peer:
            raise ProtocolViolation(f"this proxy has no session {session}")
        return found

    def wait(self, request: SessionRequested) -> None:
        """The runtime is not ready yet."""
        self._waiting.append(request)

    def waiting(self) -> list[SessionRequested]:
        """Requests that wait, in order."""
        return list(self._waiting)

    def take_waiting(self) -> list[SessionRequested]:
        """The runtime is ready: requests that waited for it, in order."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def open(self, request: SessionRequested) -> Session:
        """A new session."""
        self._last_id = SessionId(self._last_id + 1)
        session = Session(self._last_id, request)
        self._sessions[session.session] = session
        return session

    def close(self, session: SessionId) -> None:
        """The session is no more."""
        del self._sessions[session]

    def close_peer(self, peer: PeerId) -> list[Session]:
        """A proxy is gone: forget its requests that wait, and name its sessions, which are to be closed."""
        self._waiting = [request for request in self._waiting if request.peer != peer]
        return [session for session in self._sessions.values() if session.peer == peer]
