"""What SessionCore tells the proxy's shell to do, in the imperative. Perform them in the order given."""

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, RequestId, WaitId
from pathways_runtime.core.operations import Operation
from pathways_runtime.core.session.responses import Response
from pathways_runtime.core.sharding import Box, Shape
from pathways_runtime.core.status import Status


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """Base of all instructions."""


class SubmitOperation(Instruction, frozen=True):
    """Hand an operation to the controller; the fields are those of ``wire.messages.Submit``."""

    operation: Operation
    hosts: tuple[HostIndex, ...]
    is_launch: bool = False
    is_transfer: bool = False
    reads: tuple[Handle, ...] = ()
    writes: tuple[Handle, ...] = ()
    consumes: tuple[Handle, ...] = ()
    after_transfers: tuple[OpId, ...] = ()
    senders: tuple[HostIndex, ...] = ()


class CompileProgram(Instruction, frozen=True):
    """Hand a program to the controller; ProgramCompiled is the answer."""

    executable: Handle
    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]


class SendHostBuffer(Instruction, frozen=True):
    """Send the bytes of buffer ``index`` of MakeArrays ``op_id`` to ``hosts`` over their session links.

    The bytes are read as an array of ``dtype`` and ``shape`` with ``byte_strides`` (None: row-major and dense). What is
    sent is the part ``box`` of it (None: all), extended at the end of each dimension by zeros to ``sent_shape``,
    row-major and dense: exactly ``prod(sent_shape) * itemsize_bytes`` bytes.
    """

    host_buffer_handle: Handle
    op_id: OpId
    index: int
    hosts: tuple[HostIndex, ...]
    dtype: DType
    shape: Shape
    byte_strides: tuple[int, ...] | None
    box: Box | None
    sent_shape: Shape


class DropHostBuffer(Instruction, frozen=True):
    """The host buffer that the client stored is not needed any more, once the sends above are done."""

    host_buffer_handle: Handle


class StoreFetched(Instruction, frozen=True):
    """Keep the bytes that came with the ShardFetched just handled, for the client to look up.

    They are row-major and dense; the client wants them with ``byte_strides`` (None: as they are).
    """

    wait_id: WaitId
    host_buffer_handle: Handle
    dtype: DType
    shape: Shape
    byte_strides: tuple[int, ...] | None


class Respond(Instruction, frozen=True):
    """Answer a request; every request is answered exactly once, by this or by RespondError."""

    request_id: RequestId
    response: Response


class RespondError(Instruction, frozen=True):
    """Answer a request with a failure."""

    request_id: RequestId
    status: Status
