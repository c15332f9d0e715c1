"""Hosts that go and come: what is poisoned, what is freed, what is answered, what is loaded again."""

import pytest

from pathways_runtime.core.ids import Handle, HostIndex, OpId
from pathways_runtime.core.operations import Delete, DeleteExecutable, Launch
from pathways_runtime.core.session import events, requests, responses
from pathways_runtime.core.session.core import ImpossibleEvent
from pathways_runtime.core.session.executables import stand_in_devices
from pathways_runtime.core.session.instructions import CompileProgram, Respond, RespondError, SubmitOperation
from pathways_runtime.core.session.requests import ArrayCopySemantics
from pathways_runtime.core.sharding import REPLICATED, Sharding
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.session_client import (
    ON_SLICE_0,
    ON_SLICE_1,
    SLICE_0,
    SLICE_1,
    TOPOLOGY,
    VALUES,
    Client,
)
from pathways_runtime.testing.session_driver import SessionDriver, submitted

LOSS = Status(Code.DATA_LOSS, "host-1 went at 12:00")
HOST_1 = HostIndex(1)


def test_arrays_with_a_shard_there_are_lost_and_their_other_shards_freed(
    session: SessionDriver, client: Client
) -> None:
    lost, other = client.array(), client.array(ON_SLICE_1)
    session.run_workers()
    session.lose_host(HOST_1, LOSS)
    (delete,) = client.last()
    assert isinstance(delete, SubmitOperation) and isinstance(delete.operation, Delete)
    assert delete.operation.handles == (lost,) and delete.hosts == (0,)
    assert client.refused(requests.CheckValueReady((other, lost))) == LOSS
    session.ask(requests.DestructArray((lost,)))
    assert len(client.last()) == 1, "nothing is left to free"
    session.ask(requests.DestructArray((other,)))
    session.run_workers()
    assert not session.workers.held()


def test_waits_that_need_the_host_end_with_its_loss(session: SessionDriver, client: Client) -> None:
    array, other = client.array(), client.array(ON_SLICE_1)
    ready = session.request(requests.CheckValueReady((array,)))
    fetched = session.request(requests.CopyToHostBuffer(array, client.mint()))
    elsewhere = session.request(requests.CheckValueReady((other,)))
    session.feed(events.ArraysReady(1, HOST_1, None))
    session.feed(events.HostChanged(HostIndex(0), False, "host-0", LOSS))
    assert session.answers[ready] == LOSS and session.answers[fetched] == LOSS
    assert elsewhere not in session.answers
    # What the host sent before it went may arrive after the news, once.
    assert session.feed(events.ArraysReady(1, HostIndex(0), None)) == []
    with pytest.raises(ImpossibleEvent, match="host 0 reports on wait 1"):
        session.core.handle(events.ArraysReady(1, HostIndex(0), None))
    session.feed(events.ArraysReady(3, HostIndex(2), None))
    session.feed(events.ArraysReady(3, HostIndex(3), None))
    assert session.answers[elsewhere] == responses.EMPTY


def test_a_down_slice_accepts_executions_and_poisons_their_outputs(session: SessionDriver, client: Client) -> None:
    executable = client.identity()
    session.lose_host(HOST_1, LOSS)
    array = client.array()
    answer = session.ask(requests.LoadedExecutableExecute(executable, (array,)))
    assert isinstance(answer, responses.Executed) and len(answer.outputs) == 1
    assert client.refused(requests.CheckValueReady((answer.outputs[0].array_handle,))) == LOSS
    result = client.execute(executable, array)
    assert client.refused(requests.CopyToHostBuffer(result, client.mint())) == LOSS
    assert all(not isinstance(i, SubmitOperation) for _, told in session.log[-4:] for i in told)


def test_a_slice_comes_back_when_its_programs_are_loaded(session: SessionDriver, client: Client) -> None:
    executable = client.identity()
    session.lose_host(HOST_1, LOSS)
    session.bind_host(HOST_1)
    (asked,) = session.compiling
    load, delete = client.last()
    assert load == CompileProgram(asked.executable, b"identity 0", b"options", SLICE_0)
    assert asked.executable != executable, "what is loaded again has another name"
    assert isinstance(delete, SubmitOperation) and delete.operation == DeleteExecutable(OpId(1), executable)
    array = client.array()
    result = client.execute(executable, array)
    (launch,) = submitted(session.log[-1][1])
    assert isinstance(launch.operation, Launch) and launch.operation.executable == asked.executable
    assert launch.reads == (asked.executable, array), "so the controller holds it until that is loaded"
    ready = session.request(requests.CheckValueReady((result,)))
    session.ask(requests.DeleteArray((array,)))
    session.run_workers()
    assert ready not in session.answers
    session.compile_all()
    session.run_workers()
    assert session.answers[ready] == responses.EMPTY


def test_a_load_that_fails_keeps_the_program_down(session: SessionDriver, client: Client) -> None:
    executable = client.identity()
    session.lose_host(HOST_1, LOSS)
    session.bind_host(HOST_1)
    early = client.execute(executable, client.array())
    (asked,) = session.compiling
    second = Status(Code.RESOURCE_EXHAUSTED, "no room on host-1")
    session.compile_all(second)
    late = client.execute(executable, client.array())
    assert client.refused(requests.CheckValueReady((late,))) == second
    session.run_workers()
    assert client.refused(requests.CheckValueReady((early,))) == second
    # What may be there of it on other hosts goes with the next load, or with the program.
    session.ask(requests.LoadedExecutableDelete(executable))
    delete = client.last()[0]
    assert isinstance(delete, SubmitOperation) and isinstance(delete.operation, DeleteExecutable)
    assert delete.operation.executable == asked.executable


def test_a_program_on_one_host_whose_world_did_not_form_for_want_of_another_is_loaded_when_that_is_back(
    session: SessionDriver, client: Client
) -> None:
    on_host_0 = Sharding(SLICE_0[:2], REPLICATED, "device")
    executable = client.identity(on_host_0)
    client.identity(ON_SLICE_1)
    session.lose_host(HostIndex(0), LOSS)
    session.bind_host(HostIndex(0))
    session.lose_host(HOST_1, LOSS)
    session.compile_all(LOSS)
    assert client.refused(requests.CheckValueReady((client.execute(executable, client.array(on_host_0)),))) == LOSS
    session.bind_host(HOST_1)
    (asked,) = session.compiling
    assert asked.devices == SLICE_0[:2]
    result = client.execute(executable, client.array(on_host_0))
    session.compile_all()
    ready = session.request(requests.CheckValueReady((result,)))
    session.run_workers()
    assert session.answers[ready] == responses.EMPTY


def test_only_the_last_of_two_loads_counts(session: SessionDriver, client: Client) -> None:
    executable = client.identity()
    session.lose_host(HOST_1, LOSS)
    session.bind_host(HOST_1)
    session.lose_host(HOST_1, LOSS)
    session.bind_host(HOST_1)
    first, second = (asked.executable for asked in session.compiling)
    assert len({executable, first, second}) == 3
    compiled, _ = session.programs[b"identity 0"]
    session.feed(events.ProgramCompiled(first, compiled, None))
    (delete,) = client.last()
    assert isinstance(delete, SubmitOperation) and delete.operation == DeleteExecutable(OpId(2), first)
    session.feed(events.ProgramCompiled(second, compiled, None))
    assert client.last() == []
    client.execute(executable, client.array())
    launch = client.last()[0]
    assert isinstance(launch, SubmitOperation) and isinstance(launch.operation, Launch)
    assert launch.operation.executable == second
    session.compiling.clear()


def test_a_host_that_is_replaced_at_once_has_lost_all_the_same(session: SessionDriver, client: Client) -> None:
    array = client.array()
    session.workers.lose(HOST_1, LOSS)
    session.feed(events.HostChanged(HOST_1, True, "spare-7", None))
    failure = client.refused(requests.CheckValueReady((array,)))
    assert failure.code is Code.DATA_LOSS
    assert failure.message == "host spare-7 (host 1 of the topology) was replaced; what it held is lost"
    fresh = client.array()
    ready = session.request(requests.CheckValueReady((fresh,)))
    session.workers.lost_hosts.clear()
    session.run_workers()
    assert session.answers[ready] == responses.EMPTY


def test_a_down_slice_accepts_compilations(session: SessionDriver, client: Client) -> None:
    session.lose_host(HOST_1, LOSS)
    request_id = client.ask_to_compile()
    (asked,) = client.last()
    assert isinstance(asked, CompileProgram) and asked.devices == SLICE_1, "the other slice tells what it is like"
    session.compile_all()
    answer = session.answers[request_id]
    assert isinstance(answer, responses.Compiled) and answer.devices == SLICE_0
    delete, _ = client.last()
    assert isinstance(delete, SubmitOperation)
    assert isinstance(delete.operation, DeleteExecutable) and delete.operation.executable == asked.executable
    assert delete.hosts == (2, 3)
    first = session.ask(requests.LoadedExecutableExecute(answer.loaded_executable_handle, (client.array(),)))
    assert isinstance(first, responses.Executed) and first.outputs[0].sharding == ON_SLICE_0
    assert client.refused(requests.CheckValueReady((first.outputs[0].array_handle,))) == LOSS
    session.bind_host(HOST_1)
    session.compile_all()
    client.execute(answer.loaded_executable_handle, client.array())
    session.run_workers()


def test_without_a_whole_slice_the_controller_has_the_word(session: SessionDriver, client: Client) -> None:
    session.lose_host(HOST_1, LOSS)
    session.lose_host(HostIndex(2), LOSS)
    request_id = client.ask_to_compile()
    (asked,) = client.last()
    assert isinstance(asked, CompileProgram) and asked.devices == SLICE_0
    session.compile_all(LOSS)
    assert session.answers[request_id] == LOSS


def test_a_session_may_open_with_a_host_down() -> None:
    driver = SessionDriver(TOPOLOGY, losses={HOST_1: None})
    client = Client(driver)
    failure = client.refused(requests.CheckValueReady((client.array(),)))
    assert failure == Status(Code.DATA_LOSS, "no worker stands behind host 1")
    driver.bind_host(HOST_1)
    array = client.array()
    ready = driver.request(requests.CheckValueReady((array,)))
    driver.run_workers()
    assert driver.answers[ready] == responses.EMPTY


def test_stand_ins_keep_places() -> None:
    topology = Topology(num_slices=4, hosts_per_slice=1, devices_per_host=2, platform="cpu")
    lost = frozenset({HostIndex(0)})
    assert stand_in_devices((1, 0), topology, lost) == (3, 2)
    assert stand_in_devices((0, 1, 2, 3), topology, lost) == (4, 5, 2, 3)
    assert stand_in_devices((0, 2, 4, 6), topology, lost) is None
    assert stand_in_devices((0, 2), topology, frozenset(map(HostIndex, range(4)))) is None
    accelerators = Topology(num_slices=4, hosts_per_slice=1, devices_per_host=2, platform="tpu")
    assert stand_in_devices((9, 2), accelerators, lost) == (8 + 5, 2), "a CPU stands in for a CPU"


def test_a_program_that_is_destructed_while_it_loads_is_deleted_after(session: SessionDriver, client: Client) -> None:
    executable = client.identity()
    session.lose_host(HOST_1, LOSS)
    session.bind_host(HOST_1)
    (asked,) = session.compiling
    delete = client.last()[1]
    assert isinstance(delete, SubmitOperation) and delete.operation == DeleteExecutable(OpId(1), executable)
    assert session.ask(requests.LoadedExecutableDestruct(executable)) == responses.EMPTY
    assert [type(told) for told in client.last()] == [Respond]
    session.compile_all()
    (delete,) = client.last()
    assert isinstance(delete, SubmitOperation) and delete.operation == DeleteExecutable(OpId(2), asked.executable)
    session.run_workers()
    assert not session.workers.programs.keys() & {executable, asked.executable}
    with pytest.raises(ImpossibleEvent, match="nobody asked"):
        session.core.handle(events.ProgramCompiled(executable, None, LOSS))


def test_nothing_is_said_after_the_client_has_gone(session: SessionDriver, client: Client) -> None:
    array = client.array()
    session.request(requests.CheckValueReady((array,)))
    assert session.feed(events.ClientDisconnected()) == []
    assert session.feed(events.ArraysReady(1, HostIndex(0), None)) == []
    assert session.feed(events.HostChanged(HOST_1, False, "host-1", LOSS)) == []
    with pytest.raises(ImpossibleEvent, match="after the client had gone"):
        session.core.handle(events.Requested(9, requests.DestructArray((Handle(1),))))
    session.open_requests.clear()


def test_the_impossible_is_told_with_its_story(session: SessionDriver, client: Client) -> None:
    client.array()
    with pytest.raises(ImpossibleEvent, match=r"(?s)host 3 reports on wait 4.*MakeArrayFromHostBuffer.*ArraysReady"):
        session.core.handle(events.ArraysReady(4, HostIndex(3), None))
    with pytest.raises(ImpossibleEvent, match="operation 9 failed, but there were only 1"):
        session.core.handle(events.OperationFailed(9, (), LOSS))
    with pytest.raises(ImpossibleEvent, match="host 8 changed"):
        session.core.handle(events.HostChanged(HostIndex(8), False, "x", LOSS))


def test_every_answer_is_an_answer(session: SessionDriver, client: Client) -> None:
    """RequestRefused by the shell poisons what the client has named."""
    refusal = Status(Code.UNIMPLEMENTED, "PluginProgram")
    result = client.mint()
    session.open_requests.add(100)
    assert session.feed(events.RequestRefused(100, (result,), refusal)) == [RespondError(100, refusal)]
    assert client.refused(requests.CheckValueReady((result,))) == refusal
    shard = client.mint()
    told = requests.FullyReplicatedShard(result, requests.ArrayCopySemantics.REUSE_INPUT, shard)
    assert session.ask(told) == responses.ArrayHandle(shard)
    assert isinstance(client.last()[0], Respond)
    assert client.refused(requests.CheckValueReady((shard,))) == refusal


ON_HOSTS_0 = Sharding(SLICE_0, REPLICATED, "pinned_host")


def test_an_array_in_host_memory_is_lost_until_its_host_is_back_with_it(session: SessionDriver, client: Client) -> None:
    array, on_devices = client.array(ON_HOSTS_0), client.array()
    session.run_workers()
    session.lose_executor(HOST_1, LOSS)
    (delete,) = client.last()
    assert isinstance(delete, SubmitOperation) and isinstance(delete.operation, Delete)
    assert (delete.operation.handles, delete.hosts) == ((on_devices,), (0,))
    # While nobody serves for the host, what reads it fails, and stays so.
    assert client.refused(requests.CheckValueReady((array,))) == LOSS
    copied = client.mint()
    session.ask(requests.CopyArrays((array,), SLICE_0, "device", ArrayCopySemantics.ALWAYS_COPY, (copied,)))
    assert client.refused(requests.CheckValueReady((copied,))) == LOSS

    session.return_host(HOST_1, (array,))
    ready = session.request(requests.CheckValueReady((array,)))
    fetched = session.request(requests.CopyToHostBuffer(array, buffer := client.mint()))
    session.run_workers()
    assert session.answers[ready] == responses.EMPTY
    assert isinstance(session.answers[fetched], responses.Response)
    assert session.stored[buffer].tolist() == VALUES.tolist()
    assert client.refused(requests.CheckValueReady((copied,))) == LOSS
    assert client.refused(requests.CheckValueReady((on_devices,))) == LOSS


def test_an_array_that_its_host_does_not_bring_back_is_lost_for_good(session: SessionDriver, client: Client) -> None:
    array = client.array(ON_HOSTS_0)
    session.run_workers()
    session.lose_executor(HOST_1, LOSS)
    session.return_host(HOST_1, ())
    (delete,) = submitted(client.last())
    # Also to the host that does not have it: it then does nothing.
    assert (delete.operation, delete.hosts) == (Delete(delete.operation.op_id, (array,)), (0, 1))
    assert client.refused(requests.CheckValueReady((array,))) == LOSS
    session.ask(requests.DestructArray((array,)))
    assert client.last()[1:] == [], "nothing is left to free"
    session.run_workers()
    assert not session.workers.held()


def test_an_array_on_two_hosts_waits_for_both(session: SessionDriver, client: Client) -> None:
    array = client.array(ON_HOSTS_0)
    session.run_workers()
    session.lose_executor(HOST_1, LOSS)
    session.lose_executor(HostIndex(0), Status(Code.DATA_LOSS, "host-0 went, too"))
    session.return_host(HOST_1, (array,))
    assert client.refused(requests.CheckValueReady((array,))) == LOSS
    session.return_host(HostIndex(0), (array,))
    ready = session.request(requests.CheckValueReady((array,)))
    session.run_workers()
    assert session.answers[ready] == responses.EMPTY


def test_a_second_loss_without_the_memory_ends_the_wait(session: SessionDriver, client: Client) -> None:
    array = client.array(ON_HOSTS_0)
    session.run_workers()
    session.lose_executor(HOST_1, LOSS)
    session.lose_host(HostIndex(0), Status(Code.DATA_LOSS, "host-0 went, too"))
    session.bind_host(HostIndex(0))
    session.return_host(HOST_1, (array,))
    (delete,) = submitted(client.last())
    assert (delete.operation, delete.hosts) == (Delete(delete.operation.op_id, (array,)), (HOST_1,))
    assert client.refused(requests.CheckValueReady((array,))) == LOSS


def test_what_was_deleted_meanwhile_is_freed_when_the_host_is_back(session: SessionDriver, client: Client) -> None:
    array = client.array(ON_HOSTS_0)
    session.run_workers()
    session.lose_executor(HOST_1, LOSS)
    session.ask(requests.DestructArray((array,)))
    (delete,) = submitted(client.last())
    assert (delete.operation, delete.hosts) == (Delete(delete.operation.op_id, (array,)), (0,))
    session.run_workers()
    assert session.workers.held() == {array}
    session.return_host(HOST_1, (array,))
    (delete,) = submitted(client.last())
    assert (delete.operation, delete.hosts) == (Delete(delete.operation.op_id, (array,)), (HOST_1,))
    session.run_workers()
    assert not session.workers.held()


def test_an_array_that_failed_on_another_host_does_not_come_back(session: SessionDriver, client: Client) -> None:
    array = client.array(ON_HOSTS_0)
    session.run_workers()
    session.lose_executor(HOST_1, LOSS)
    session.feed(events.OperationFailed(OpId(1), (array,), Status(Code.INTERNAL, "it went wrong")))
    session.return_host(HOST_1, (array,))
    assert client.refused(requests.CheckValueReady((array,))) == LOSS
    session.run_workers()
    assert not session.workers.held()
