"""Functions of colocated Python: what is compiled and called, and what goes wrong with it."""

import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle, HostIndex, OpId
from pathways_runtime.core.operations import CallFunction, ShardedResult
from pathways_runtime.core.session import events, requests, responses
from pathways_runtime.core.session.functions import CompileFunction
from pathways_runtime.core.session.instructions import CompileProgram, Respond, SubmitOperation
from pathways_runtime.core.session.requests import ArraySpec
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status
from pathways_runtime.testing.session_client import DEVICES, ON_SLICE_0, ON_SLICE_1, ROWS_0, SHAPE, SLICE_0, Client
from pathways_runtime.testing.session_driver import SessionDriver
from pathways_runtime.testing.session_workers import Program

STREAM = -7
LOSS = Status(Code.DATA_LOSS, "host-1 is lost")
BACKWARD = Sharding(SLICE_0[::-1], REPLICATED, "device")


def spec(sharding: Sharding = ON_SLICE_0, dtype: DType = DType.S32) -> ArraySpec:
    return ArraySpec(dtype, SHAPE, sharding)


def request(inputs: tuple[ArraySpec, ...] = (spec(),), outputs: tuple[ArraySpec, ...] = (spec(),)) -> CompileFunction:
    return CompileFunction("f", b"pickled", b"function", SLICE_0, inputs, outputs)


def compiled(session: SessionDriver, asked: CompileFunction) -> Handle:
    """The handle of a function that gives what it was given."""
    session.programs[b"pickled"] = (events.CompiledProgram("", b"", ()), Program(SLICE_0, lambda given: given, ()))
    request_id = session.request(asked)
    assert request_id not in session.answers, "answered once the hosts have it"
    session.compile_all()
    answer = session.answers[request_id]
    assert isinstance(answer, responses.Compiled) and (answer.name, answer.devices) == ("f", SLICE_0)
    return answer.loaded_executable_handle


def call(executable: Handle, *arguments: Handle, results: tuple[Handle, ...]) -> requests.LoadedExecutableExecute:
    return requests.LoadedExecutableExecute(executable, arguments, results, execution_stream=STREAM)


def test_a_call_is_a_transfer_that_every_host_sends(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), compiled(session, request())
    first = session.ask(requests.LoadedExecutableExecute(executable, (array,)))
    assert isinstance(first, responses.Executed)
    assert [(o.dtype, o.shape, o.sharding) for o in first.outputs] == [(DType.S32, SHAPE, ON_SLICE_0)]
    result = client.mint()
    session.ask(call(executable, array, results=(result,)))
    submit, answer = client.last()
    assert submit == SubmitOperation(
        CallFunction(
            OpId(3), executable, (array,), (ShardedResult(result, DType.S32, SHAPE, "device", SLICE_0),), STREAM
        ),
        hosts=(HostIndex(0), HostIndex(1)),
        is_transfer=True,
        reads=(executable, array),
        writes=(result,),
        senders=(HostIndex(0), HostIndex(1)),
    )
    assert isinstance(answer, Respond) and answer.response == responses.Executed(Handle(0), ())


def test_a_launch_waits_for_the_calls_whose_results_it_reads(session: SessionDriver, client: Client) -> None:
    array, executable, program = client.array(), compiled(session, request()), client.identity()
    result = client.mint()
    session.ask(call(executable, array, results=(result,)))
    client.execute(program, result)
    launch = client.last()[0]
    assert isinstance(launch, SubmitOperation) and launch.after_transfers == (OpId(2),)
    session.run_workers()
    assert session.ask(requests.IsArrayDeleted(result)) == responses.Deleted(False)


def test_results_lie_as_the_function_says(session: SessionDriver, client: Client) -> None:
    array = client.array()
    executable = compiled(session, request(outputs=(spec(BACKWARD),)))
    session.ask(call(executable, array, results=(client.mint(),)))
    submit = client.last()[0]
    assert isinstance(submit, SubmitOperation) and isinstance(submit.operation, CallFunction)
    assert submit.operation.results[0].devices == SLICE_0[::-1]
    session.run_workers()


def test_one_sharding_may_be_written_in_two_ways(session: SessionDriver, client: Client) -> None:
    iota = TileAssignment(TileKind.TILED, (4, 1), reshape_dims=(4,), transpose_perm=(0,))
    executable = compiled(session, request(inputs=(spec(Sharding(SLICE_0, iota, None)),)))
    answer = session.ask(call(executable, client.array(ROWS_0), results=(client.mint(),)))
    assert answer == responses.Executed(Handle(0), ())


def test_wrong_arguments_are_refused(session: SessionDriver, client: Client) -> None:
    array, elsewhere, rows = client.array(), client.array(ON_SLICE_1), client.array(ROWS_0)
    executable = compiled(session, request())
    for wrong in (elsewhere, rows):
        refusal = client.refused(call(executable, wrong, results=(client.mint(),)))
        assert refusal.code is Code.INVALID_ARGUMENT
        assert f"argument 0 of f, array {wrong} (S32[4,3]), is not of the type, shape or sharding" in refusal.message
    none = client.refused(call(executable, results=(client.mint(),)))
    assert none.message == "f takes 1 arguments, not 0"
    many = client.refused(call(executable, array, results=(client.mint(), client.mint())))
    assert many.message == "f has 1 results, but 2 result handles"


@pytest.mark.parametrize("side", ["argument", "result"])
def test_arrays_of_hosts_that_do_not_run_it_are_refused(session: SessionDriver, client: Client, side: str) -> None:
    far = (spec(Sharding(DEVICES, REPLICATED, "device")),)
    refusal = client.refused(request(inputs=far) if side == "argument" else request(outputs=far))
    assert refusal.code is Code.INVALID_ARGUMENT
    assert f"its {side} 0 lies on [0, 1, 2, 3, 4, 5, 6, 7], some of which are on host 2" in refusal.message


def test_a_poisoned_argument_poisons_the_results(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), compiled(session, request())
    session.run_workers()
    bad, result = client.mint(), client.mint()
    cause = Status(Code.UNKNOWN, "ValueError: first")
    session.ask(requests.MakeErrorArrays(cause, (spec(),), (bad,)))
    session.ask(call(executable, bad, results=(result,)))
    assert len(client.last()) == 1, "it is not called"
    assert client.refused(requests.CheckValueReady((result,))) == cause
    session.ask(call(executable, array, results=(client.mint(),)))
    session.run_workers()


def test_the_outcome_of_a_call_is_kept(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), compiled(session, request())
    status, result = client.mint(), client.mint()
    session.ask(requests.LoadedExecutableExecute(executable, (array,), (result,), status, fill_status=True))
    session.workers.to_fail[OpId(2)] = Status(Code.UNKNOWN, "ValueError: boom")
    asked = session.request(requests.LoadedExecutableFetchExecuteResult(status))
    session.run_workers()
    assert session.answers[asked] == Status(Code.UNKNOWN, "ValueError: boom")


def test_while_a_host_is_lost_functions_are_compiled_and_their_results_poisoned(
    session: SessionDriver, client: Client
) -> None:
    executable = compiled(session, request())
    session.lose_host(HostIndex(1), LOSS)
    answer = session.ask(request())
    assert isinstance(answer, responses.Compiled)
    late = answer.loaded_executable_handle
    assert session.ask(requests.LoadedExecutableMetadata(late)) == responses.ExecutableMetadata(None)
    empty = compiled_without_arguments(session)
    for handle in (executable, late):
        refusal = client.refused(call(handle, results=(client.mint(),)))
        assert refusal.code is Code.INVALID_ARGUMENT, "what is wrong in itself stays wrong"
    result = client.mint()
    session.ask(call(empty, results=(result,)))
    assert client.refused(requests.CheckValueReady((result,))) == LOSS
    session.bind_host(HostIndex(1))
    loaded = {each.executable for each in session.compiling}
    assert len(loaded) == 3 and loaded.isdisjoint({executable, late, empty}), "what is loaded again has a new name"
    session.compile_all()
    array, fresh = client.array(), client.mint()
    session.ask(call(late, array, results=(fresh,)))
    ready = session.request(requests.CheckValueReady((fresh,)))
    session.run_workers()
    assert session.answers[ready] == responses.EMPTY


def compiled_without_arguments(session: SessionDriver) -> Handle:
    answer = session.ask(request(inputs=()))
    assert isinstance(answer, responses.Compiled)
    return answer.loaded_executable_handle


def test_a_function_that_cannot_be_loaded_is_refused_with_the_cause(session: SessionDriver) -> None:
    asked = session.request(request())
    (instruction,) = session.compiling
    assert instruction == CompileProgram(instruction.executable, b"pickled", b"function", SLICE_0)
    session.compile_all(Status(Code.UNKNOWN, "ModuleNotFoundError: no"))
    assert session.answers[asked] == Status(Code.UNKNOWN, "ModuleNotFoundError: no")


def test_a_host_that_is_lost_while_a_function_loads_poisons_its_results(session: SessionDriver, client: Client) -> None:
    asked = session.request(request(inputs=()))
    session.lose_host(HostIndex(1), LOSS)
    session.compile_all(LOSS)
    answer = session.answers[asked]
    assert isinstance(answer, responses.Compiled)
    result = client.mint()
    session.ask(call(answer.loaded_executable_handle, results=(result,)))
    assert client.refused(requests.CheckValueReady((result,))) == LOSS
