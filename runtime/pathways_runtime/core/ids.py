"""The identifiers that cross process boundaries, each a distinct type so that mypy tells them apart."""

from typing import NewType

#: One client's stream, from attach to detach. Unique in the life of a controller; 0 is never one.
SessionId = NewType("SessionId", int)

#: An array or executable in one session's handle space. The client counts up from 1; what the server mints starts at
#: ``SERVER_HANDLES_START``. 0 is never a handle. Handles are never reused, so (session, handle) names an array for
#: good.
Handle = NewType("Handle", int)

#: The place of an operation in its session, dense from 1 in the order the session core makes them.
#: Not to be confused with the op id of an IFRT request, which the client mints (``RequestId``).
OpId = NewType("OpId", int)

#: The op id of an IFRT request: what a response is matched by.
RequestId = NewType("RequestId", int)

#: The place of an operation in the one order that the controller decides. Every worker sees increasing values.
Seq = NewType("Seq", int)

#: What the client sees as ``device.id``: 0..N-1 without gaps.
DeviceId = NewType("DeviceId", int)

#: A virtual host: ``slice_index * hosts_per_slice + host_in_slice``. What operations are addressed to. Which worker
#: stands behind it is the controller's knowledge and may change.
HostIndex = NewType("HostIndex", int)

#: A worker process of the allocation (a supervisor and its executor), spare or not.
WorkerId = NewType("WorkerId", int)

#: A set of hosts whose devices can run one SPMD program. Never reused.
WorldId = NewType("WorldId", int)

#: Something that a proxy waits for a worker to say: readiness or a fetched value. Unique in its session.
WaitId = NewType("WaitId", int)

#: The first handle that the server mints. IFRT's client checks that its own stay below 2**62.
SERVER_HANDLES_START = Handle(1 << 62)
