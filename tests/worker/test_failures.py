"""Failures in place of a move's bytes."""

import numpy as np
import pytest

from pathways_runtime.core import strings
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.worker.instructions import ANY_SIZE
from pathways_runtime.worker import failures

LOST = Status(Code.DATA_LOSS, "host-1 was lost")


@pytest.mark.parametrize("num_bytes", [0, 1, 16, 1 << 20])
def test_a_failure_comes_across(num_bytes: int) -> None:
    assert failures.decode(failures.encode(LOST, num_bytes), num_bytes) == LOST


def test_a_failure_never_has_the_size_of_the_bytes() -> None:
    size = failures.encode(LOST, 0).nbytes
    assert failures.encode(LOST, size).nbytes != size
    assert failures.decode(failures.encode(LOST, size), size) == LOST


def test_bytes_are_bytes_even_if_they_look_like_a_failure() -> None:
    looks_like_one = failures.encode(LOST, 0)
    assert failures.decode(looks_like_one, looks_like_one.nbytes) is None


def test_neither_is_loud() -> None:
    with pytest.raises(ValueError, match="a move of 8 bytes came as 4 bytes"):
        failures.decode(np.zeros(4, np.uint8), 8)


def test_strings_come_in_any_size_and_are_no_failures() -> None:
    for content in (b"", strings.encode([b"a", b"bc"]), strings.encode([b"pathways-move-failed\n"])):
        assert failures.decode(np.frombuffer(content, np.uint8), ANY_SIZE) is None
    failure = Status(Code.DATA_LOSS, "gone")
    assert failures.decode(failures.encode(failure, ANY_SIZE), ANY_SIZE) == failure
