import pytest

from slurm_pathways.slurm.job_comment import at_end, busy_words, device_time, merge, while_running

RUNNING = "pathways: 8 devices in 2 slices, running python train.py"


def test_while_it_runs_and_at_its_end() -> None:
    assert while_running(8, 2, ("python", "train.py")) == RUNNING
    busy = busy_words(0.87 * 11160, 11160, 0)
    assert busy == "busy 87 % of 3.1 device-h, 0 failures"
    assert while_running(1, 1, ("a", "b c"), busy) == f"pathways: 1 device in 1 slice, {busy}, running a 'b c'"
    assert while_running(8, 2, ()) == "pathways: 8 devices in 2 slices, ready for programs"
    assert at_end(0, busy, has_started=True) == f"pathways: exit 0, {busy}"
    assert at_end(137, None, has_started=True) == "pathways: exit 137"
    assert at_end(125, None, has_started=False) == "pathways: did not start, exit 125"
    assert at_end(0, busy, has_started=True, is_runtime=True) == f"pathways: runtime ended, exit 0, {busy}"
    assert busy_words(0.0, 0.0, 1) == "busy 0 % of 0.0 device-s, 1 failure"


@pytest.mark.parametrize(
    ("device_s", "text"),
    [(0.0, "0.0 device-s"), (59.94, "59.9 device-s"), (90, "1.5 device-min"), (7200, "2.0 device-h")],
)
def test_device_time(device_s: float, text: str) -> None:
    assert device_time(device_s) == text


def test_a_command_is_one_short_line() -> None:
    text = while_running(1, 1, ("python", "-c", "a\nb\x1fc" + "x" * 100))
    assert "\n" not in text and "\x1f" not in text
    assert text.endswith("...") and len(text) < 110


@pytest.mark.parametrize("theirs", ["", "mine", "a | b", "pathways: my favourite", "see pathways: 8 devices"])
@pytest.mark.parametrize(
    "ours",
    [
        RUNNING,
        while_running(1, 1, ("x",), "busy 3 % of 1.0 device-s, 0 failures"),
        while_running(1, 1, ("echo", "| pathways: exit 0")),
        at_end(0, None, has_started=True),
        at_end(125, None, has_started=False),
        at_end(1, None, has_started=True, is_runtime=True),
    ],
)
def test_the_users_words_stay_in_front_and_ours_are_replaced(theirs: str, ours: str) -> None:
    first = merge(theirs, ours)
    assert first == (f"{theirs} | {ours}" if theirs else ours)
    assert merge(first, "pathways: exit 3") == (f"{theirs} | pathways: exit 3" if theirs else "pathways: exit 3")
