"""Job states and exit statuses in the forms in which Slurm's commands write them."""

from dataclasses import dataclass

#: A job or step in one of these will not run again under this id, unless it is requeued.
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)
#: States of the base state's own kind, of which a job has one; others (COMPLETING, RESIZING, ...) come beside it.
BASE = ENDED - {"LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"} | {"PENDING", "RUNNING", "SUSPENDED"}


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a job or step ended, as Slurm says it: ``code`` 0..255, and the signal that ended it, or 0."""

    code: int
    signal: int

    @classmethod
    def parse(cls, text: str) -> "ExitStatus":
        """From ``code:signal``, as in ``0:9``.

        Raises:
            ValueError: it is not of this form.
        """
        code, colon, signal = text.partition(":")
        if not colon or not (code.isdigit() and signal.isdigit()):
            raise ValueError(f"{text!r} is no exit status like 0:9")
        return cls(int(code), int(signal))

    @classmethod
    def from_wait_status(cls, status: int) -> "ExitStatus":
        """From the number that ``wait`` gives: squeue's JSON has it until 23.02."""
        return cls(status >> 8 & 0xFF, status & 0x7F)

    @property
    def shell_code(self) -> int:
        """The code that a shell would show: 128 + the signal for one that was killed."""
        return 128 + self.signal if self.signal else self.code


def split_state(text: str) -> tuple[str, str]:
    """``CANCELLED by 1000`` as state and what follows; also ``CANCELLED+``, which sacct writes where a column ends."""
    state, _, detail = text.partition(" ")
    return state.rstrip("+"), detail
