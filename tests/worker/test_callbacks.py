"""The executor's side of callbacks: calls over a session link, and gates."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pathways_runtime.core.status import Code, Status
from pathways_runtime.wire.callbacks import (
    CallbackCall,
    CallbackResult,
    CallbacksDropped,
    CallbacksUnused,
    pack,
    unpack,
)
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.callbacks import SESSION_IS_OVER, CallbackFailed, forwarders, nobody
from pathways_runtime.worker.gates import DTYPE, SHAPE, Gate

from . import link_ends
from .link_ends import DEADLINE_S


class Ends(link_ends.Ends):
    """With threads that call."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = ThreadPoolExecutor(4)

    def close(self) -> None:
        super().close()
        self.threads.shutdown()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_operands_go_out_and_results_come_back(ends: Ends) -> None:
    (forward,) = forwarders(ends.link.calls.call, "me", [7])
    operands = (None, np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(2))
    called = ends.threads.submit(forward, *operands)
    frame = ends.receive()
    assert (frame.message.client, frame.message.number) == ("me", 7)
    token, *arrays = unpack(frame.message.operands, frame.payload)
    assert token is None
    assert [(str(a.dtype), a.tolist()) for a in arrays if a is not None] == [
        ("int16", [[0, 1, 2], [3, 4, 5]]),
        ("float32", 2.0),
    ]
    specs, payload = pack([None, np.array([True, False])])
    ends.proxy.send(CallbackResult(frame.message.call, None, specs), payload)
    nothing, result = called.result(DEADLINE_S)
    assert nothing is None
    assert result is not None
    assert (str(result.dtype), result.tolist()) == ("bool", [True, False])


def test_answers_may_come_in_any_order(ends: Ends) -> None:
    calls = [ends.threads.submit(ends.link.calls.call, "me", number, []) for number in range(3)]
    messages = [ends.receive().message for _ in calls]
    for message in reversed(messages):
        specs, payload = pack([np.int32(10 * message.number)])
        ends.proxy.send(CallbackResult(message.call, None, specs), payload)
    answers = [call.result(DEADLINE_S)[0] for call in calls]
    assert [int(answer) for answer in answers if answer is not None] == [0, 10, 20]


def test_it_is_told_when_the_last_forwarder_is_gone(ends: Ends) -> None:
    call = ends.link.calls.call
    held = [*forwarders(call, "me", [50, 51]), *forwarders(call, "me", [51]), *forwarders(call, "you", [52])]
    # Of functions that nothing here calls it is said at once, so all before is done by then.
    ends.proxy.send(CallbacksDropped("me", (50, 51)))
    ends.proxy.send(CallbacksDropped("me", (52, 53)))
    assert ends.receive().message == CallbacksUnused("me", (52, 53))
    del held[:2]
    ends.proxy.send(CallbacksDropped("me", (53,)))
    assert ends.receive().message == CallbacksUnused("me", (53,))
    del held[0]
    assert ends.receive().message == CallbacksUnused("me", (50, 51))


def test_failures_and_damaged_answers_are_raised(ends: Ends) -> None:
    for answer, code in (
        (CallbackResult(0, Status(Code.INTERNAL, "boom"), ()), "INTERNAL: boom"),
        (CallbackResult(0, None, ((11, (5,)),)), "INVALID_ARGUMENT: a callback's results cannot be read"),
    ):
        called = ends.threads.submit(ends.link.calls.call, "me", 0, [])
        message = ends.receive().message
        assert isinstance(message, CallbackCall)
        ends.proxy.send(CallbackResult(message.call, answer.failure, answer.results))
        with pytest.raises(CallbackFailed, match=code):
            called.result(DEADLINE_S)


def test_nobody_waits_on_a_link_that_is_closed(ends: Ends) -> None:
    called = ends.threads.submit(ends.link.calls.call, "me", 0, [])
    ends.receive()
    ends.proxy.close()
    for call in (called, ends.threads.submit(ends.link.calls.call, "me", 0, [])):
        with pytest.raises(CallbackFailed, match=f"CANCELLED: {SESSION_IS_OVER.message}"):
            call.result(DEADLINE_S)
    with pytest.raises(CallbackFailed, match="CANCELLED"):
        nobody("me", 0, [])


def test_what_is_behind_a_gate_waits_until_it_is_opened() -> None:
    client, _ = pjrt.make_cpu_client(1, None)
    (device,) = client.local_devices()
    gate = Gate(client, device, pjrt.single(device, None))
    for _ in range(3):
        held, open_gate = gate.shut()
        assert not pjrt.is_ready(held)
        assert (held.shape, held.dtype) == (SHAPE, DTYPE)
        threading.Thread(target=open_gate).start()
        pjrt.wait([held])
