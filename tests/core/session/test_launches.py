"""Executions: exact operations, donation, failures, outcomes."""

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import SERVER_HANDLES_START, Handle, OpId
from pathways_runtime.core.operations import Delete, Launch, Transfer
from pathways_runtime.core.session import events, requests, responses
from pathways_runtime.core.session.instructions import Respond, SubmitOperation
from pathways_runtime.core.session.requests import ArrayCopySemantics, ArraySpec
from pathways_runtime.core.status import Code, Status
from pathways_runtime.testing.session_client import ON_SLICE_0, ON_SLICE_1, SHAPE, Client
from pathways_runtime.testing.session_driver import SessionDriver

OOM = Status(Code.RESOURCE_EXHAUSTED, "host 0: out of memory")


def test_the_first_execution_tells_what_it_returns(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity()
    answer = session.ask(requests.LoadedExecutableExecute(executable, (array,)))
    assert isinstance(answer, responses.Executed)
    (output,) = answer.outputs
    assert output.array_handle >= SERVER_HANDLES_START
    assert (output.dtype, output.shape, output.sharding) == (DType.S32, SHAPE, ON_SLICE_0)
    assert answer.status_handle == 0


def test_a_later_execution_is_one_launch_and_one_answer(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity()
    result = client.execute(executable, array)
    launch, answer = client.last()
    assert launch == SubmitOperation(
        Launch(OpId(2), executable, (array,), (result,)),
        hosts=(0, 1),
        is_launch=True,
        reads=(executable, array),
        writes=(result,),
    )
    assert isinstance(answer, Respond) and answer.response == responses.Executed(Handle(0), ())


def test_donated_arguments_are_deleted_and_consumed(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity(donated=(0,))
    result = client.execute(executable, array)
    launch = client.last()[0]
    assert isinstance(launch, SubmitOperation)
    assert launch.consumes == (array,) and launch.reads == (executable, array)
    assert session.ask(requests.IsArrayDeleted(array)) == responses.Deleted(True)
    again = client.refused(requests.LoadedExecutableExecute(executable, (array,), (client.mint(),)))
    assert again == Status(Code.INVALID_ARGUMENT, f"array {array} (S32[4,3]) has been deleted or donated")
    session.ask(requests.DestructArray((array,)))
    assert client.last() == [Respond(session.log[-1][0].request_id, responses.EMPTY)]
    session.run_workers()
    assert session.ask(requests.IsArrayDeleted(result)) == responses.Deleted(False)


def test_what_the_client_keeps_is_not_donated(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity(donated=(0,))
    session.ask(
        requests.LoadedExecutableExecute(executable, (array,), (client.mint(),), non_donatable_input_indices=(0,))
    )
    launch = client.last()[0]
    assert isinstance(launch, SubmitOperation) and isinstance(launch.operation, Launch)
    assert launch.operation.non_donatable == (0,) and launch.consumes == ()
    assert session.ask(requests.IsArrayDeleted(array)) == responses.Deleted(False)


def test_a_shard_that_another_array_names_is_not_taken(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity(donated=(0,))
    alias = client.mint()
    session.ask(requests.CopyArrays((array,), (), None, ArrayCopySemantics.ALWAYS_COPY, (alias,)))
    client.execute(executable, array)
    launch, delete, _ = client.last()
    assert isinstance(launch, SubmitOperation) and isinstance(launch.operation, Launch)
    assert launch.operation.non_donatable == (0,) and launch.consumes == ()
    assert isinstance(delete, SubmitOperation) and delete.operation == Delete(OpId(4), (array,))
    # The alias is alone now, and may be taken: after all that ever read the shards, which the token stands for.
    client.execute(executable, alias)
    second = client.last()[0]
    assert isinstance(second, SubmitOperation) and isinstance(second.operation, Launch)
    assert second.operation.non_donatable == ()
    (taken, token, founder) = second.consumes
    assert (taken, founder) == (alias, array) and token in launch.reads
    session.run_workers()


def test_shards_are_taken_after_who_read_them_before_they_were_shared(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity(donated=(0,))
    # This reader knows of no sharing yet.
    client.execute(client.identity(), array)
    reader = client.last()[0]
    assert isinstance(reader, SubmitOperation) and isinstance(reader.operation, Launch)
    alias = client.mint()
    session.ask(requests.CopyArrays((array,), (), None, ArrayCopySemantics.DONATE_INPUT, (alias,)))
    client.execute(executable, alias)
    taker = client.last()[0]
    assert isinstance(taker, SubmitOperation) and isinstance(taker.operation, Launch)
    assert taker.operation.non_donatable == ()
    assert array in reader.reads and array in taker.consumes
    session.run_workers()


def test_one_array_twice_is_not_donated(session: SessionDriver, client: Client) -> None:
    array = client.array()
    request_id = client.ask_to_compile(donated=(0, 1))
    (asked,) = session.compiling
    compiled, program = session.programs[asked.program]
    session.programs[asked.program] = (
        events.CompiledProgram("pair", b"", compiled.outputs, (0, 1), num_parameters=2),
        program,
    )
    session.compile_all()
    answer = session.answers[request_id]
    assert isinstance(answer, responses.Compiled)
    session.ask(requests.LoadedExecutableExecute(answer.loaded_executable_handle, (array, array), (client.mint(),)))
    launch, delete, _ = client.last()
    assert isinstance(launch, SubmitOperation) and isinstance(launch.operation, Launch)
    assert launch.operation.non_donatable == (0, 1) and launch.consumes == ()
    assert isinstance(delete, SubmitOperation) and delete.consumes == (array,)


def test_a_launch_waits_for_the_transfers_behind_its_arguments(session: SessionDriver, client: Client) -> None:
    source, executable = client.array(ON_SLICE_1), client.identity()
    moved, alias = client.mint(), client.mint()
    spec = ArraySpec(DType.S32, SHAPE, ON_SLICE_0)
    session.ask(requests.ReshardArrays((source,), (spec,), ArrayCopySemantics.ALWAYS_COPY, (moved,)))
    transfer = client.last()[0]
    assert isinstance(transfer, SubmitOperation) and isinstance(transfer.operation, Transfer)
    session.ask(requests.CopyArrays((moved,), (), None, ArrayCopySemantics.REUSE_INPUT, (alias,)))
    first = client.execute(executable, alias)
    launch = client.last()[0]
    assert isinstance(launch, SubmitOperation)
    assert launch.after_transfers == (transfer.operation.op_id,)
    client.execute(executable, first)
    second = client.last()[0]
    assert isinstance(second, SubmitOperation) and second.after_transfers == ()
    # Once it is known to have arrived there is nothing to wait for.
    session.request(requests.CheckValueReady((moved,)))
    session.run_workers()
    client.execute(executable, moved)
    third = client.last()[0]
    assert isinstance(third, SubmitOperation) and third.after_transfers == ()


def test_requests_that_are_wrong_are_refused_and_name_the_reason(session: SessionDriver, client: Client) -> None:
    array, elsewhere, executable = client.array(), client.array(ON_SLICE_1), client.identity()
    result = client.mint()

    def refusal(*arguments: Handle, **options: object) -> Status:
        return client.refused(requests.LoadedExecutableExecute(executable, arguments, (client.mint(),), **options))

    assert refusal(elsewhere) == Status(
        Code.INVALID_ARGUMENT,
        f"identity 0 runs on devices [0, 1, 2, 3], but its argument array {elsewhere} (S32[4,3]) lies on [4, 5, 6, 7]",
    )
    assert refusal(array, array) == Status(Code.INVALID_ARGUMENT, "identity 0 takes 1 arguments, not 2")
    assert refusal(Handle(77)) == Status(Code.NOT_FOUND, "there is no array 77")
    assert refusal(array, device_ids=(3, 2, 1, 0)).code is Code.INVALID_ARGUMENT
    unknown = client.refused(requests.LoadedExecutableExecute(Handle(5), (array,), (result,)))
    assert unknown == Status(Code.NOT_FOUND, "there is no loaded executable 5")
    assert client.refused(requests.CheckValueReady((result,))) == unknown, "the result carries the refusal"
    assert not any(isinstance(i, SubmitOperation) and i.is_launch for _, told in session.log for i in told)


def test_an_execution_of_what_failed_is_answered_ok_and_fails_as_its_argument(
    session: SessionDriver, client: Client
) -> None:
    array, executable = client.array(), client.identity(donated=(0,))
    session.feed(events.OperationFailed(OpId(1), (array,), OOM))
    session.feed(events.OperationFailed(OpId(1), (array,), Status(Code.INTERNAL, "a later cause")))
    answer = session.ask(requests.LoadedExecutableExecute(executable, (array,), (), Handle(0), True))
    assert isinstance(answer, responses.Executed) and len(answer.outputs) == 1
    (_,) = client.last()
    result = client.execute(executable, answer.outputs[0].array_handle)
    assert client.refused(requests.CheckValueReady((result,))) == OOM
    assert client.refused(requests.LoadedExecutableFetchExecuteResult(answer.status_handle)) == OOM
    assert session.ask(requests.IsArrayDeleted(array)) == responses.Deleted(False)


def test_the_outcome_of_an_execution_is_told_once(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity()
    status, result = client.mint(), client.mint()
    session.ask(requests.LoadedExecutableExecute(executable, (array,), (result,), status, True))
    session.ask(requests.DestructArray((result,)))
    waiting = session.request(requests.LoadedExecutableFetchExecuteResult(status))
    assert waiting not in session.answers
    session.run_workers()
    assert session.answers[waiting] == responses.EMPTY
    assert client.refused(requests.LoadedExecutableFetchExecuteResult(status)).code is Code.NOT_FOUND


def test_the_outcome_that_came_first_is_kept(session: SessionDriver, client: Client) -> None:
    array, executable = client.array(), client.identity()
    status = client.mint()
    session.workers.to_fail[OpId(2)] = OOM
    session.ask(requests.LoadedExecutableExecute(executable, (array,), (client.mint(),), status, True))
    session.run_workers()
    assert client.refused(requests.LoadedExecutableFetchExecuteResult(status)) == OOM


def test_an_execution_without_outputs_fails_by_report(session: SessionDriver, client: Client) -> None:
    array = client.array()
    request_id = session.request(requests.Compile(b"none", b"", ON_SLICE_0.devices))
    (asked,) = session.compiling
    session.compiling.clear()
    session.feed(events.ProgramCompiled(asked.executable, events.CompiledProgram("none", b"", ()), None))
    assert isinstance(session.answers[request_id], responses.Compiled)
    outcomes = [client.mint(), client.mint()]
    for status in outcomes:
        session.ask(requests.LoadedExecutableExecute(asked.executable, (array,), (), status, True))
    session.feed(events.OperationFailed(OpId(3), (), OOM))
    assert session.ask(requests.LoadedExecutableFetchExecuteResult(outcomes[0])) == responses.EMPTY
    assert client.refused(requests.LoadedExecutableFetchExecuteResult(outcomes[1])) == OOM


def test_a_launch_names_the_interned_hosts(session: SessionDriver, client: Client) -> None:
    """So that a step costs the same for any number of hosts."""
    array, executable = client.array(), client.identity()
    told = []
    for _ in range(2):
        array = client.execute(executable, array)
        told.append(client.last()[0])
    session.ask(requests.DestructArray((array,)))
    told.append(client.last()[0])
    hosts = {id(i.hosts) for i in told if isinstance(i, SubmitOperation)}
    assert len(hosts) == 1
