"""Bytes of arrays between executors, directly: shared memory on one host, sockets between hosts.

What an executor on CPU should do with what arrives (256 MiB into a ``jax.Array``, both ends warm): ``Payload.adopt``
and ``batched_device_put`` with ``HostBufferSemantics.ZERO_COPY`` take 15 ms, a copy from ``Payload.array`` 29 ms, and
130 ms when malloc faults the destination anew each time (the supervisor's ``GLIBC_TUNABLES`` are against that). Arrays
made without a copy may be donated: XLA then copies. Of a payload that is only part of a shard, copy ``Payload.array``
to its place and ``release`` it at once.
"""

from pathways_runtime.transport.dataplane.messages import Key, PeerLost
from pathways_runtime.transport.dataplane.payload import Payload
from pathways_runtime.transport.dataplane.plane import DEFAULT_BUDGET_BYTES, DataPlane

__all__ = ["DEFAULT_BUDGET_BYTES", "DataPlane", "Key", "Payload", "PeerLost"]
