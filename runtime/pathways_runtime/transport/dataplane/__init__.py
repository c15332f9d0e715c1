"""Bytes of arrays between executors, directly: shared memory on one host, sockets between hosts."""

from pathways_runtime.transport.dataplane.messages import Key, PeerLost
from pathways_runtime.transport.dataplane.payload import Payload
from pathways_runtime.transport.dataplane.plane import DEFAULT_BUDGET_BYTES, DataPlane

__all__ = ["DEFAULT_BUDGET_BYTES", "DataPlane", "Key", "Payload", "PeerLost"]
