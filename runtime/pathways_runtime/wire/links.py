"""Session links: one connection per (session, executor), for what must not pass through the controller.

The executor connects to the proxy's ``links_address`` when it is told ``OpenSession``. Every frame is a header, one of
the values below, and a payload of raw bytes (empty unless said). Frames of one link are read in order; nothing orders
them against the control streams, so either side keeps what comes early: a HostBuffer may precede its MakeArrays.
"""

import msgspec

from pathways_runtime.core.ids import HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.status import Status
from pathways_runtime.wire.callbacks import CallbackCall, CallbackResult, CallbacksDropped, CallbacksUnused


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all link headers."""


class LinkHello(LinkMessage, frozen=True, tag="H"):
    """Executor to proxy, first: who this is.

    ``change`` is that of OpenSession: an executor whose host was lost in a later change is not the one that serves now.
    """

    session: SessionId
    host: HostIndex
    change: int


class HostBuffer(LinkMessage, frozen=True, tag="B"):
    """Proxy to executor; payload: the bytes of buffer ``index`` of MakeArrays ``op_id``, row-major and dense."""

    op_id: OpId
    index: int


class ArraysReady(LinkMessage, frozen=True, tag="R"):
    """Executor to proxy: this host's part of an Await is done. ``failure`` is the first one among its arrays."""

    wait_id: WaitId
    failure: Status | None


class Fetched(LinkMessage, frozen=True, tag="F"):
    """Executor to proxy; payload: the shard's bytes, row-major and dense, unless ``failure``."""

    wait_id: WaitId
    failure: Status | None


#: CallbackCall and CallbacksUnused go from executor to proxy, the other two back; see ``wire.callbacks``.
AnyLinkMessage = (
    LinkHello | HostBuffer | ArraysReady | Fetched | CallbackCall | CallbackResult | CallbacksDropped | CallbacksUnused
)
