"""What a failed collective is put down to."""

import threading

from pathways_runtime.core.status import Code, Status
from pathways_runtime.worker import endings
from pathways_runtime.worker.endings import Endings

RESET = Status(Code.UNKNOWN, "Gloo all-reduce failed: Connection reset by peer")
LOSS = Status(Code.DATA_LOSS, "host 3 (node-3) was lost")


def test_a_failed_collective_is_put_down_to_the_loss_that_is_known():
    known = Endings()
    known.note(LOSS)
    assert known.explain(RESET) == LOSS


def test_it_waits_for_the_word_of_a_loss():
    known = Endings()
    explained = []
    waits = threading.Thread(target=lambda: explained.append(known.explain(RESET)))
    waits.start()
    known.note(LOSS)
    waits.join(10)
    assert explained == [LOSS]


def test_without_one_the_failure_stays_what_it_is(monkeypatch):
    monkeypatch.setattr(endings, "VERDICT_TIMEOUT_S", 0.01)
    assert Endings().explain(RESET) == RESET


def test_other_failures_are_nobodys_loss():
    known = Endings()
    known.note(LOSS)
    out_of_memory = Status(Code.RESOURCE_EXHAUSTED, "Out of memory allocating 1 GiB")
    assert not known.may_explain(out_of_memory)
    assert known.explain(out_of_memory) == out_of_memory


def test_a_loss_of_long_ago_explains_nothing(monkeypatch):
    monkeypatch.setattr(endings, "VERDICT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(endings, "_AFTERMATH_S", 0.0)
    known = Endings()
    known.note(LOSS)
    assert known.explain(RESET) == RESET
