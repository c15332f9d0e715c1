"""Readiness and contents."""

import numpy as np
import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import HostIndex, OpId, WaitId
from pathways_runtime.core.operations import Await, Fetch
from pathways_runtime.core.session import events, requests, responses
from pathways_runtime.core.session.core import ImpossibleEvent
from pathways_runtime.core.session.instructions import StoreFetched, SubmitOperation
from pathways_runtime.core.status import Code, Status
from pathways_runtime.testing.session_client import ON_SLICE_1, ROWS_0, SHAPE, VALUES, Client
from pathways_runtime.testing.session_driver import SessionDriver

OOM = Status(Code.RESOURCE_EXHAUSTED, "host 0: out of memory")


def test_many_values_are_one_wait(session: SessionDriver, client: Client) -> None:
    first, second = client.array(), client.array(ON_SLICE_1)
    request_id = session.request(requests.CheckValueReady((first, second, first)))
    assert client.last() == [
        SubmitOperation(Await(OpId(3), WaitId(1), (first, second)), (0, 1, 2, 3), reads=(first, second))
    ]
    for host in (2, 0, 1):
        assert session.feed(events.ArraysReady(WaitId(1), HostIndex(host), None)) == []
    session.feed(events.ArraysReady(WaitId(1), HostIndex(3), None))
    assert session.answers[request_id] == responses.EMPTY
    assert session.ask(requests.CheckValueReady((second, first))) == responses.EMPTY, "known by now"


def test_the_first_failure_is_the_answer_and_the_rest_is_waited_out(session: SessionDriver, client: Client) -> None:
    array = client.array()
    request_id = session.request(requests.CheckValueReady((array,)))
    session.feed(events.ArraysReady(WaitId(1), HostIndex(1), OOM))
    assert session.answers[request_id] == OOM
    assert session.core.figures()["waits"][0]["missing_hosts"] == [0]
    assert session.feed(events.ArraysReady(WaitId(1), HostIndex(0), Status(Code.INTERNAL, "later"))) == []
    assert client.refused(requests.CheckValueReady((array,))) == OOM
    with pytest.raises(ImpossibleEvent):
        session.core.handle(events.ArraysReady(WaitId(1), HostIndex(0), None))


def test_several_hosts_may_be_told_of_at_once(session: SessionDriver, client: Client) -> None:
    array = client.array(ON_SLICE_1)
    request_id = session.request(requests.CheckValueReady((client.array(), array)))
    assert session.feed(events.ReadyOnHosts(WaitId(1), ())) == []
    assert session.feed(events.ReadyOnHosts(WaitId(1), (HostIndex(0), HostIndex(3)))) == []
    assert session.core.figures()["waits"][0]["missing_hosts"] == [1, 2]
    session.feed(events.ReadyOnHosts(WaitId(1), (HostIndex(1), HostIndex(2))))
    assert session.answers[request_id] == responses.EMPTY
    with pytest.raises(ImpossibleEvent):
        session.core.handle(events.ReadyOnHosts(WaitId(1), (HostIndex(1),)))


def test_word_of_hosts_that_are_lost_meanwhile_is_no_surprise(session: SessionDriver, client: Client) -> None:
    array = client.array(ON_SLICE_1)
    loss = Status(Code.DATA_LOSS, "host 3 was lost")
    request_id = session.request(requests.CheckValueReady((array,)))
    session.lose_host(HostIndex(3), loss)
    assert session.answers[request_id] == loss
    # One of the two was lost before its word came.
    assert session.feed(events.ReadyOnHosts(WaitId(1), (HostIndex(2), HostIndex(3)))) == []
    assert session.core.figures()["waits"] == []


def test_contents_come_from_one_shard(session: SessionDriver, client: Client) -> None:
    array, buffer = client.array(), client.mint()
    request_id = session.request(requests.CopyToHostBuffer(array, buffer, (4, 16)))
    assert client.last() == [SubmitOperation(Fetch(OpId(2), WaitId(1), array, 0), (0,), reads=(array,))]
    session.run_workers()
    assert client.last()[0] == StoreFetched(WaitId(1), buffer, DType.S32, SHAPE, (4, 16))
    assert session.answers[request_id] == responses.EMPTY
    np.testing.assert_array_equal(session.stored[buffer], VALUES)


def test_contents_of_what_failed(session: SessionDriver, client: Client) -> None:
    array = client.array()
    session.workers.to_fail[OpId(1)] = OOM
    request_id = session.request(requests.CopyToHostBuffer(array, client.mint()))
    session.run_workers()
    assert session.answers[request_id] == OOM
    assert client.refused(requests.CopyToHostBuffer(array, client.mint())) == OOM


def test_contents_that_no_device_has_whole_are_refused(session: SessionDriver, client: Client) -> None:
    refusal = client.refused(requests.CopyToHostBuffer(client.array(ROWS_0), client.mint()))
    assert refusal == Status(Code.INVALID_ARGUMENT, "no device holds all of array 1 (S32[4,3]): take it apart first")
    wrong = client.refused(requests.CopyToHostBuffer(client.array(), client.mint(), (4,)))
    assert wrong.code is Code.INVALID_ARGUMENT


def test_a_value_is_no_readiness(session: SessionDriver, client: Client) -> None:
    array = client.array()
    session.request(requests.CheckValueReady((array,)))
    with pytest.raises(ImpossibleEvent, match="only waits for readiness"):
        session.core.handle(events.ShardFetched(WaitId(1), HostIndex(0), None))
    session.open_requests.clear()


def test_figures_say_what_is_held_and_waited_for(session: SessionDriver, client: Client) -> None:
    client.array()
    rows = client.array(ROWS_0)
    alias = client.mint()
    session.ask(requests.CopyArrays((rows,), (), None, requests.ArrayCopySemantics.REUSE_INPUT, (alias,)))
    session.ask(
        requests.CopyArrays((rows,), (), "pinned_host", requests.ArrayCopySemantics.REUSE_INPUT, (client.mint(),))
    )
    request_id = session.request(requests.CheckValueReady((rows,)))
    figures = session.core.figures()
    assert figures["held_bytes"] == {
        "device": {"total": 4 * 48 + 48, "most_on_one_device": 48 + 12},
        "pinned_host": {"total": 48, "most_on_one_device": 12},
    }
    assert (figures["arrays"], figures["arrays_on_workers"], figures["operations"]) == (4, 4, 5)
    assert figures["waits"] == [
        {
            "wait_id": 1,
            "op_id": 5,
            "request_id": request_id,
            "for": "readiness",
            "arrays": [rows],
            "num_arrays": 1,
            "missing_hosts": [0, 1],
            "is_answered": False,
        }
    ]
    session.run_workers()
    assert session.answers[request_id] == responses.EMPTY
    assert session.core.figures()["waits"] == []
