"""All sessions of a proxy: what front ends call, and where the controller's messages go."""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pathways_runtime.core.ids import Handle, SessionId
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.proxy.callback_server import CallbackServer
from pathways_runtime.proxy.controller_link import ControllerLink
from pathways_runtime.proxy.folders import Folders
from pathways_runtime.proxy.frontend import Connection, Message
from pathways_runtime.proxy.host_buffer_messages import lookup_messages
from pathways_runtime.proxy.link_server import LinkServer
from pathways_runtime.proxy.session_server import SessionServer
from pathways_runtime.proxy.upload import HostBufferUpload
from pathways_runtime.proxy.versions import Versions, negotiate
from pathways_runtime.wire import messages
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.values import decode_attributes

logger = logging.getLogger(__name__)

#: Told ``state`` ("attached", "over") and the session.
SessionObserver = Callable[[str, SessionServer], None]


class ProxyBackend:
    """See ``frontend.Backend``. All on one event loop.

    Args:
        controller, session_links: what sessions send through; started by the caller.
        callbacks: told which programs have them, and what is gone.
        folders: where what clients name lies.
    """

    def __init__(
        self,
        controller: ControllerLink,
        session_links: LinkServer,
        callbacks: CallbackServer,
        observe: SessionObserver,
        folders: Folders,
    ) -> None:
        self._folders = folders
        self._controller = controller
        self._links = session_links
        self._callbacks = callbacks
        self._observe = observe
        self._sessions: dict[SessionId, SessionServer] = {}
        # Sessions whose Attach is not answered, in the order of asking, which is the order of the answers. One that is
        # over by then stays in here, so that its answer finds it.
        self._attaching: deque[SessionServer] = deque()
        self._refusal: Status | None = None

    # frontend.Backend

    def get_version(self, request: bytes) -> bytes:
        """See ``frontend.Backend``."""
        proto = _parsed(schema.GetVersionRequest, request, "GetVersion")
        chosen = negotiate(
            Versions(proto.min_version.protocol_version, proto.min_version.ifrt_serdes_version_number),
            Versions(proto.max_version.protocol_version, proto.max_version.ifrt_serdes_version_number),
        )
        response = schema.GetVersionResponse()
        response.version.protocol_version = chosen.protocol
        response.version.ifrt_serdes_version_number = chosen.serdes
        encoded: bytes = response.SerializeToString()
        return encoded

    def open_session(self, connection: Connection, metadata: bytes | None, peer: str) -> SessionServer:
        """See ``frontend.Backend``."""
        if self._refusal is not None:
            raise error(self._refusal.code, self._refusal.message)
        if metadata is None:
            raise error(Code.INVALID_ARGUMENT, "IfrtSession came without its metadata")
        proto = _parsed(schema.SessionMetadata, metadata, "IfrtSession's metadata")
        offered = Versions(proto.version.protocol_version, proto.version.ifrt_serdes_version_number)
        negotiate(offered, offered)
        attributes = decode_attributes(proto.initialization_data)
        name, pid = attributes.get("client_name"), attributes.get("client_pid")
        client = name.decode(errors="replace") if isinstance(name, bytes) else peer
        session = SessionServer(
            connection, self._controller, self._links, self._callbacks, self._over, client, self._folders
        )
        self._attaching.append(session)
        self._controller.send(messages.Attach(client, pid if isinstance(pid, int) else 0, self._links.address))
        return session

    def open_upload(self, metadata: bytes | None) -> HostBufferUpload:
        """See ``frontend.Backend``."""
        if metadata is None:
            raise error(Code.INVALID_ARGUMENT, "HostBufferStore came without its metadata")
        proto = _parsed(schema.HostBufferStoreMetadata, metadata, "HostBufferStore's metadata")
        return HostBufferUpload(self._session(proto.session_id), Handle(proto.handle), proto.buffer_size)

    def lookup_host_buffer(self, request: bytes) -> Iterator[Message]:
        """See ``frontend.Backend``."""
        proto = _parsed(schema.HostBufferLookupRequest, request, "HostBufferLookup")
        return lookup_messages(self._session(proto.session_id).host_buffers.get(Handle(proto.handle)))

    def delete_host_buffer(self, request: bytes) -> bytes:
        """See ``frontend.Backend``."""
        proto = _parsed(schema.HostBufferDeleteRequest, request, "HostBufferDelete")
        if not self._session(proto.session_id).host_buffers.drop(Handle(proto.handle)):
            raise error(Code.NOT_FOUND, f"there is no host buffer {proto.handle}")
        return b""

    # From the controller

    def control_message(self, message: messages.Message) -> None:
        """A message from the controller."""
        match message:
            case (
                messages.Dispatched()
                | messages.ProgramCompiled()
                | messages.OperationFailed()
                | messages.ReadyOnHosts()
                | messages.SessionEnded()
            ):
                # A session that is over meanwhile has nobody to tell.
                session = self._sessions.get(message.session)
                if session is not None:
                    session.control_message(message)
            case messages.Attached():
                self._attached(message)
            case messages.HostChanged(state=state, change=change):
                if state.worker is None:
                    self._links.forget_host(state.host, change)
                    self._callbacks.forget_host(state.host)
                for session in list(self._sessions.values()):
                    session.control_message(message)
                self._controller.send(messages.HostChangesSeen(change))
            case messages.StatusRequest(request=request):
                self._controller.send(messages.StatusReply(request, self.report()))
            case messages.Refused(reason=reason):
                self.end_all(Status(Code.FAILED_PRECONDITION, f"the controller refused this proxy: {reason}"))
            case messages.Shutdown(reason=reason):
                self.end_all(Status(Code.UNAVAILABLE, f"the runtime shuts down: {reason}"))
            case _:
                raise TypeError(f"a proxy is not sent {type(message).__name__}")

    def end_all(self, status: Status) -> None:
        """End every session, and take no more."""
        self._refusal = status
        for session in (*self._sessions.values(), *self._attaching):
            session.end(status)

    def report(self) -> dict[str, Any]:
        """Figures of this proxy and its sessions."""
        reports = [session.report() for session in (*self._sessions.values(), *self._attaching) if not session.is_over]
        return {
            "role": "proxy",
            "pid": os.getpid(),
            "sessions": [report.figures for report in reports if report.figures["id"] is not None],
            "waiting": [each for report in reports for each in report.waiting],
        }

    def _attached(self, message: messages.Attached) -> None:
        session = self._attaching.popleft()
        if session.is_over:
            self._controller.send(messages.Detach(message.session))
            return
        self._sessions[message.session] = session
        session.attached(message)
        self._observe("attached", session)

    def _over(self, session: SessionServer) -> None:
        if session.session_id is not None and self._sessions.pop(session.session_id, None) is not None:
            self._callbacks.session_over(session.session_id)
            self._controller.send(messages.Detach(session.session_id))
            self._observe("over", session)

    def _session(self, session_id: int) -> SessionServer:
        session = self._sessions.get(SessionId(session_id))
        if session is None:
            raise error(Code.NOT_FOUND, f"there is no session {session_id}")
        return session


def _parsed(message_class: Any, content: bytes, what: str) -> Any:
    try:
        return message_class.FromString(content)
    except schema.DecodeError as failure:
        raise error(Code.INVALID_ARGUMENT, f"{what} cannot be parsed") from failure
