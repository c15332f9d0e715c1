"""The job's comment: one line on how a run goes, behind what the user has written there. Pure."""

import re
import shlex
from collections.abc import Sequence

#: Between the user's words and ours.
_SEPARATOR = " | "
_OURS = re.compile(r"(?:^| \| )pathways: (?:\d+ devices? in |exit |did not start|runtime ).*", re.DOTALL)
#: Of a command line.
_MAX_SHOWN = 60


def merge(current: str, summary: str) -> str:
    """The comment with ``summary`` in place of an earlier one; the user's own words stay in front."""
    theirs = _OURS.sub("", current, count=1).strip()
    return f"{theirs}{_SEPARATOR}{summary}" if theirs else summary


def while_running(num_devices: int, num_slices: int, argv: Sequence[str], busy: str | None = None) -> str:
    """How a run goes. ``busy``: see ``busy_words``; None where nothing is known yet."""
    devices = f"{_count(num_devices, 'device')} in {_count(num_slices, 'slice')}"
    running = f"running {command_words(argv, _MAX_SHOWN)}" if argv else "ready for programs"
    return f"pathways: {devices}, {running}" if busy is None else f"pathways: {devices}, {busy}, {running}"


def at_end(exit_code: int, busy: str | None, *, has_started: bool, is_runtime: bool = False) -> str:
    """How it went."""
    if not has_started:
        return f"pathways: did not start, exit {exit_code}"
    what = "runtime ended, exit" if is_runtime else "exit"
    return f"pathways: {what} {exit_code}" + (f", {busy}" if busy is not None else "")


def busy_words(busy_s: float, device_s: float, num_failures: int) -> str:
    """``busy 87 % of 3.1 device-h, 0 failures``."""
    share = 100 * busy_s / device_s if device_s > 0 else 0.0
    return f"busy {share:.0f} % of {device_time(device_s)}, {_count(num_failures, 'failure')}"


def device_time(device_s: float) -> str:
    """Device-seconds in a unit that suits them."""
    for unit, length_s in (("device-h", 3600.0), ("device-min", 60.0)):
        if device_s >= length_s:
            return f"{device_s / length_s:.1f} {unit}"
    return f"{device_s:.1f} device-s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def command_words(argv: Sequence[str], max_length: int) -> str:
    """A command line as one line of text: a line break would end the row in what squeue and sacct print."""
    words = re.sub(r"[\x00-\x1f\x7f]+", " ", shlex.join(argv))
    return words if len(words) <= max_length else words[: max_length - 3] + "..."
