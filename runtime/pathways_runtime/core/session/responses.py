"""What requests are answered with. The front end turns one into the IFRT response of the request's kind."""

from typing import Any

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle
from pathways_runtime.core.sharding import Shape, Sharding


class Response(msgspec.Struct, frozen=True, gc=False):
    """Base of all responses."""


class Empty(Response, frozen=True):
    """Done; nothing to say."""


EMPTY = Empty()


class ArrayHandle(Response, frozen=True):
    """The new array's handle."""

    array_handle: Handle


class ArrayHandles(Response, frozen=True):
    """The new arrays' handles, in order."""

    array_handles: tuple[Handle, ...]


class FutureHandle(Response, frozen=True):
    """Something to ask with CheckFuture, once."""

    future_handle: Handle


class Deleted(Response, frozen=True):
    """Whether the array or executable is deleted."""

    deleted: bool


class Compiled(Response, frozen=True):
    """A loaded executable. All devices are addressable."""

    loaded_executable_handle: Handle
    name: str
    devices: tuple[DeviceId, ...]
    fingerprint: bytes
    ready_future_handle: Handle


class ExecutableMetadata(Response, frozen=True):
    """``metadata`` is what ProgramCompiled brought, untouched."""

    metadata: Any


class CostAnalysis(Response, frozen=True):
    """As PJRT gives it."""

    attributes: dict[str, float]


class HumanReadableProgramText(Response, frozen=True):
    """Optimized HLO as text."""

    text: str


class Output(Response, frozen=True):
    """One output of an execution."""

    dtype: DType
    shape: Shape
    sharding: Sharding
    array_handle: Handle


class Executed(Response, frozen=True):
    """An execution is under way.

    Attributes:
        status_handle: 0 unless the outcome is kept under it.
        outputs: empty when the client has named the results itself.
    """

    status_handle: Handle
    outputs: tuple[Output, ...]


class DeviceAssignment(Response, frozen=True):
    """``devices[replica][partition]``."""

    devices: tuple[tuple[DeviceId, ...], ...]


class DefaultLayout(Response, frozen=True):
    """Dimensions from fastest to slowest; the front end writes ``{1,0}``."""

    minor_to_major: tuple[int, ...]
