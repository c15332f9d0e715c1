"""Programs: compiling, what they say of themselves, their end; and that every request has a handler."""

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, OpId
from pathways_runtime.core.operations import DeleteExecutable
from pathways_runtime.core.session import events, requests, responses
from pathways_runtime.core.session.core import HANDLERS
from pathways_runtime.core.session.instructions import CompileProgram, SubmitOperation
from pathways_runtime.core.sharding import TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status
from pathways_runtime.testing.session_client import SHAPE, SLICE_0, Client
from pathways_runtime.testing.session_driver import SessionDriver


def test_every_request_has_a_handler() -> None:
    assert set(HANDLERS) == set(requests.Request.__subclasses__())
    assert all(issubclass(kind, msgspec.Struct) for kind in HANDLERS)


def test_a_program_is_known_when_it_is_compiled(session: SessionDriver, client: Client) -> None:
    request_id = client.ask_to_compile()
    (asked,) = client.last()
    assert isinstance(asked, CompileProgram)
    assert (asked.program, asked.options, asked.devices) == (b"identity 0", b"options", SLICE_0)
    assert client.refused(requests.LoadedExecutableMetadata(asked.executable)).code is Code.NOT_FOUND
    assert session.core.figures()["compiling"] == [asked.executable]
    session.compile_all()
    answer = session.answers[request_id]
    assert isinstance(answer, responses.Compiled)
    assert answer.loaded_executable_handle == asked.executable and answer.name == "identity 0"
    assert answer.fingerprint == b"print"
    assert session.ask(requests.CheckFuture(answer.ready_future_handle)) == responses.EMPTY
    assert session.ask(requests.LoadedExecutableMetadata(asked.executable)) == responses.ExecutableMetadata(None)
    assert session.ask(requests.LoadedExecutableCostAnalysis(asked.executable)) == responses.CostAnalysis(
        {"flops": 12.0}
    )
    text = session.ask(requests.LoadedExecutableHumanReadableProgramText(asked.executable))
    assert text == responses.HumanReadableProgramText("HloModule")


def test_a_program_that_does_not_compile(session: SessionDriver, client: Client) -> None:
    request_id = client.ask_to_compile()
    failure = Status(Code.NOT_FOUND, "No FFI handler")
    session.compile_all(failure)
    assert session.answers[request_id] == failure
    assert session.core.figures()["executables"] == 0


def test_a_program_whose_outputs_make_no_sense(session: SessionDriver, client: Client) -> None:
    request_id = client.ask_to_compile()
    (asked,) = session.compiling
    session.compiling.clear()
    tiles = TileAssignment(TileKind.TILED, (2, 1), places=(0, 1))
    output = events.ProgramOutput(DType.S32, SHAPE, tiles, None)
    session.feed(events.ProgramCompiled(asked.executable, events.CompiledProgram("odd", b"", (output,)), None))
    answer = session.answers[request_id]
    assert isinstance(answer, Status) and answer.code is Code.INTERNAL
    assert answer.message == (
        "output 0 of odd makes no sense: INVALID_ARGUMENT: a sharding of 2 tiles cannot lie on 4 devices"
    )


def test_a_program_ends_once(session: SessionDriver, client: Client) -> None:
    executable = client.identity()
    assert session.ask(requests.LoadedExecutableIsDeleted(executable)) == responses.Deleted(False)
    future = session.ask(requests.LoadedExecutableDelete(executable))
    delete = client.last()[0]
    assert delete == SubmitOperation(DeleteExecutable(OpId(1), executable), (0, 1), consumes=(executable,))
    assert isinstance(future, responses.FutureHandle)
    assert session.ask(requests.CheckFuture(future.future_handle)) == responses.EMPTY
    assert session.ask(requests.LoadedExecutableIsDeleted(executable)) == responses.Deleted(True)
    refusal = client.refused(requests.LoadedExecutableExecute(executable, (client.array(),)))
    assert refusal.message == f"loaded executable {executable} (identity 0) has been deleted"
    assert session.ask(requests.LoadedExecutableDestruct(executable)) == responses.EMPTY
    assert len(client.last()) == 1
    assert client.refused(requests.LoadedExecutableIsDeleted(executable)).code is Code.NOT_FOUND


def test_defaults(session: SessionDriver, client: Client) -> None:
    assignment = session.ask(requests.GetDefaultDeviceAssignment(2, 3))
    assert assignment == responses.DeviceAssignment(((0, 1, 2), (3, 4, 5)))
    assert client.refused(requests.GetDefaultDeviceAssignment(3, 3)).code is Code.INVALID_ARGUMENT
    layout = session.ask(requests.GetDefaultLayout(DType.F32, (2, 3, 4), DeviceId(0), "device"))
    assert layout == responses.DefaultLayout((2, 1, 0))
