"""Plugin programs: traces, files, resharding; exact operations and outcomes."""

from typing import Any

import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle, HostIndex, OpId, WaitId
from pathways_runtime.core.operations import Await, ReadArrays, StartTrace, StopTrace, Transfer, WriteArrays
from pathways_runtime.core.session import events, plugin_programs, requests, responses
from pathways_runtime.core.session.instructions import SubmitOperation
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.stored import StoredArray
from pathways_runtime.testing.session_client import ON_SLICE_0, ON_SLICE_1, ROWS_0, SHAPE, SLICE_0, Client
from pathways_runtime.testing.session_driver import SessionDriver

EVERY_HOST = tuple(map(HostIndex, range(4)))
TRACE = plugin_programs.Trace("/traces", "run", 0, 2, 0, gives_array=False)
STORED = StoredArray("/ck/a", DType.S32, SHAPE, ROWS_0)
LOST = Status(Code.DATA_LOSS, "host 0 was lost")


@pytest.fixture
def plugins(session: SessionDriver) -> "Plugins":
    return Plugins(session)


class Plugins:
    """Compiles and executes."""

    def __init__(self, session: SessionDriver) -> None:
        self.session = session

    def compiled(self, plugin: plugin_programs.Plugin) -> Handle:
        answer = self.session.ask(plugin_programs.CompilePlugin(plugin, "name", SLICE_0, "text", None))
        assert isinstance(answer, responses.Compiled) and answer.devices == SLICE_0
        return answer.loaded_executable_handle

    def execute(self, executable: Handle, *arguments: Handle) -> tuple[responses.Executed, list[Any]]:
        """The answer, and the operations that were submitted."""
        answer = self.session.ask(requests.LoadedExecutableExecute(executable, arguments, fill_status=True))
        assert isinstance(answer, responses.Executed), answer
        told = self.session.log[-1][1]
        return answer, [each for each in told if isinstance(each, SubmitOperation)]

    def outcome(self, answer: responses.Executed, *hosts: HostIndex, failure: Status | None = None) -> Any:
        """What the execution is said to have come to when the hosts have told; ``failure`` is the last one's."""
        request_id = self.session.request(requests.LoadedExecutableFetchExecuteResult(answer.status_handle))
        for host in hosts:
            assert request_id not in self.session.answers
            (wait_id,) = self.session.core._state.waits.open
            self.session.feed(events.ArraysReady(wait_id, host, failure if host == hosts[-1] else None))
        return self.session.answers[request_id]


def test_a_trace_begins_and_ends_with_the_same_executable(plugins: Plugins) -> None:
    executable = plugins.compiled(TRACE)
    begun, submitted = plugins.execute(executable)
    assert submitted == [SubmitOperation(StartTrace(OpId(1), WaitId(1), 2, 0), EVERY_HOST)]
    assert begun.outputs == () and plugins.outcome(begun, *EVERY_HOST) == responses.EMPTY
    ended, submitted = plugins.execute(executable)
    assert submitted == [SubmitOperation(StopTrace(OpId(2), WaitId(2), "/traces", "run"), EVERY_HOST)]
    refused = Status(Code.FAILED_PRECONDITION, "the disk is full")
    assert plugins.outcome(ended, *EVERY_HOST, failure=refused) == refused


def test_a_trace_of_some_hosts_that_is_answered_with_an_array(plugins: Plugins) -> None:
    executable = plugins.compiled(plugin_programs.Trace("/traces", "run", 2, 1, 1, gives_array=True))
    answer, submitted = plugins.execute(executable)
    assert submitted == [SubmitOperation(StartTrace(OpId(1), WaitId(1), 1, 1), (HostIndex(0), HostIndex(1)))]
    (output,) = answer.outputs
    assert (output.shape, output.sharding.devices) == ((1,), (0,))
    assert plugins.outcome(answer, HostIndex(0), HostIndex(1)) == responses.EMPTY


def test_a_trace_ends_on_the_hosts_where_it_began(plugins: Plugins, session: SessionDriver) -> None:
    executable = plugins.compiled(plugin_programs.Trace("/traces", "run", 2, 2, 0, gives_array=False))
    plugins.execute(executable)
    session.lose_host(HostIndex(0), LOST)
    _, (ended,) = plugins.execute(executable)
    assert ended.hosts == (1,)
    plugins.execute(executable)
    session.lose_host(HostIndex(1), LOST)
    session.lose_host(HostIndex(2), LOST)
    refused = session.ask(requests.LoadedExecutableExecute(executable, ()))
    assert refused == Status(Code.DATA_LOSS, "of the hosts that are to be traced none is left")


def test_the_clients_own_trace_keeps_out_of_another(plugins: Plugins, session: SessionDriver) -> None:
    start = plugins.compiled(plugin_programs.HostTrace(True, "", "", 0, 2, 0))
    pause = plugins.compiled(plugin_programs.HostTrace(False, "", "", 0, 2, 0))
    write = plugins.compiled(plugin_programs.HostTrace(False, "/traces", "run", 0, 2, 0))
    others = plugins.compiled(TRACE)

    def operations(executable: Handle) -> list[str]:
        return [type(each.operation).__name__ for each in plugins.execute(executable)[1]]

    assert [operations(each) for each in (write, start, start, pause, write, write)] == [
        [],
        ["StartTrace"],
        ["StartTrace"],
        ["StopTrace"],
        ["StopTrace"],
        [],
    ]
    assert [operations(each) for each in (others, start, pause, write, others)] == [
        ["StartTrace"],
        [],
        [],
        [],
        ["StopTrace"],
    ]
    # Whose executable is gone cannot end its trace: it is nobody's.
    assert operations(others) == ["StartTrace"]
    session.ask(requests.LoadedExecutableDestruct(others))
    assert operations(start) == ["StartTrace"]


def test_arrays_are_written_where_they_lie(plugins: Plugins, client: Client) -> None:
    rows, copies = client.array(ROWS_0), client.array(ON_SLICE_0)
    executable = plugins.compiled(plugin_programs.Write((STORED, STORED), 9.0))
    answer, submitted = plugins.execute(executable, rows, copies)
    targets = (STORED, StoredArray("/ck/a", DType.S32, SHAPE, ON_SLICE_0))
    operation = WriteArrays(OpId(3), WaitId(1), (rows, copies), targets, 9.0)
    hosts = (HostIndex(0), HostIndex(1))
    assert submitted == [SubmitOperation(operation, hosts, reads=(rows, copies))]
    assert plugins.outcome(answer, *hosts) == responses.EMPTY


def test_what_cannot_be_written(plugins: Plugins, client: Client, session: SessionDriver) -> None:
    array = client.array(ROWS_0)
    wrong = plugins.compiled(plugin_programs.Write((StoredArray("/ck/a", DType.S32, (4, 4), ROWS_0),), 9.0))
    request = requests.LoadedExecutableExecute(wrong, (array,))
    assert client.refused(request).message == f"array {array} (S32[4,3]) is to be written as one of shape (4, 4)"
    right = plugins.compiled(plugin_programs.Write((STORED,), 9.0))
    assert client.refused(requests.LoadedExecutableExecute(right, ())).code is Code.INVALID_ARGUMENT
    session.lose_host(HostIndex(0), LOST)
    answer, submitted = plugins.execute(right, array)
    assert submitted == [] and plugins.outcome(answer) == LOST


def test_a_host_that_is_lost_while_it_writes(plugins: Plugins, client: Client, session: SessionDriver) -> None:
    array = client.array(ROWS_0)
    answer, _ = plugins.execute(plugins.compiled(plugin_programs.Write((STORED,), 9.0)), array)
    session.lose_host(HostIndex(0), LOST)
    assert plugins.outcome(answer) == LOST


def test_arrays_are_read_where_they_are_to_lie(plugins: Plugins, session: SessionDriver) -> None:
    executable = plugins.compiled(plugin_programs.Read((STORED,), 9.0))
    answer, submitted = plugins.execute(executable)
    (output,) = answer.outputs
    assert (output.dtype, output.shape, output.sharding) == (DType.S32, SHAPE, ROWS_0)
    read, wait = submitted
    assert isinstance(read.operation, ReadArrays) and isinstance(wait.operation, Await)
    assert read.operation.sources == (STORED,) and read.operation.results[0].shape == (1, 3)
    assert (read.hosts, read.writes) == ((0, 1), (output.array_handle,))
    assert plugins.outcome(answer, HostIndex(0), HostIndex(1)) == responses.EMPTY
    session.lose_host(HostIndex(1), LOST)
    later, submitted = plugins.execute(executable)
    assert submitted == [] and plugins.outcome(later) == LOST
    assert session.ask(requests.CheckValueReady((later.outputs[0].array_handle,))) == LOST


def test_arrays_are_laid_out_anew(plugins: Plugins, client: Client, session: SessionDriver) -> None:
    array = client.array(ROWS_0)
    executable = plugins.compiled(plugin_programs.Reshard((ROWS_0,), (ON_SLICE_1,), donates=True))
    answer, submitted = plugins.execute(executable, array)
    (output,) = answer.outputs
    assert output.sharding == ON_SLICE_1
    assert isinstance(submitted[0].operation, Transfer)
    assert session.ask(requests.IsArrayDeleted(array)) == responses.Deleted(True)
    session.run_workers()
    assert plugins.outcome(answer) == responses.EMPTY


def test_an_executable_is_deleted_without_a_word_to_workers(plugins: Plugins, session: SessionDriver) -> None:
    executable = plugins.compiled(TRACE)
    session.lose_host(HostIndex(1), LOST)
    session.bind_host(HostIndex(1))
    assert session.compiling == []
    assert session.ask(requests.LoadedExecutableMetadata(executable)) == responses.ExecutableMetadata(None)
    session.ask(requests.LoadedExecutableDestruct(executable))
    assert not [each for each in session.log[-1][1] if isinstance(each, SubmitOperation)]
