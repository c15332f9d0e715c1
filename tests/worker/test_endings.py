"""What a failed collective is put down to."""

import threading

from pathways_runtime.core.status import Code, Status
from pathways_runtime.worker import endings
from pathways_runtime.worker.endings import Endings, WorldEnd

RESET = Status(Code.UNKNOWN, "Gloo all-reduce failed: Connection reset by peer")
LOSS = Status(Code.DATA_LOSS, "host 3 (node-3) was lost")


def test_a_failed_collective_is_put_down_to_the_loss_that_is_known():
    known = Endings()
    known.note(LOSS)
    assert known.explain(RESET, 0.0) == LOSS


def test_it_waits_for_the_word_of_a_loss():
    known = Endings()
    explained = []
    waits = threading.Thread(target=lambda: explained.append(known.explain(RESET, 0.0)))
    waits.start()
    known.note(LOSS)
    waits.join(10)
    assert explained == [LOSS]


def test_without_one_the_failure_stays_what_it_is(monkeypatch):
    monkeypatch.setattr(endings, "VERDICT_TIMEOUT_S", 0.01)
    assert Endings().explain(RESET, 0.0) == RESET


def test_other_failures_are_nobodys_loss():
    known = Endings()
    known.note(LOSS)
    out_of_memory = Status(Code.RESOURCE_EXHAUSTED, "Out of memory allocating 1 GiB")
    assert not known.may_explain(out_of_memory)
    assert known.explain(out_of_memory, 0.0) == out_of_memory


def test_a_loss_of_long_ago_explains_nothing(monkeypatch):
    monkeypatch.setattr(endings, "VERDICT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(endings, "_AFTERMATH_S", 0.0)
    known = Endings()
    known.note(LOSS)
    assert known.explain(RESET, 0.0) == RESET


def test_what_fails_in_a_new_world_is_not_put_down_to_the_loss_before_it():
    known = Endings()
    known.note(LOSS)
    formed_s = WorldEnd().formed_s
    explained = []
    waits = threading.Thread(target=lambda: explained.append(known.explain(RESET, formed_s)))
    waits.start()
    second = Status(Code.DATA_LOSS, "host 3 (node-4) was lost")
    known.note(second)
    waits.join(10)
    assert explained == [second]


def test_what_an_earlier_world_has_left_is_put_down_to_its_loss(monkeypatch):
    monkeypatch.setattr(endings, "VERDICT_TIMEOUT_S", 0.01)
    known = Endings()
    known.note(LOSS)
    assert known.explain(RESET, WorldEnd().formed_s) == LOSS


def test_whoever_doubts_a_world_waits_for_the_verdict():
    end = WorldEnd()
    assert end.verdict() is None
    end.doubt()
    assert end.failure() is None
    verdicts = []
    waits = threading.Thread(target=lambda: verdicts.append(end.verdict()))
    waits.start()
    end.declare(LOSS)
    waits.join(10)
    assert verdicts == [LOSS] and end.failure() == LOSS


def test_a_doubt_does_not_last(monkeypatch):
    monkeypatch.setattr(endings, "VERDICT_TIMEOUT_S", 0.01)
    end = WorldEnd()
    end.doubt()
    assert end.verdict() is None
