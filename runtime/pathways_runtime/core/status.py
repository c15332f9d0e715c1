"""Failures as values: the status that poisons what depends on a failed operation."""

import enum

import msgspec


class Code(enum.IntEnum):
    """absl's canonical status codes, which IFRT and gRPC share."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Status(msgspec.Struct, frozen=True, array_like=True):
    """A failure and its first cause. The client sees ``<CODE NAME>: <message>``.

    Attributes:
        code: never ``Code.OK``; success is the absence of a status.
        message: what failed, on which host, and why, ready to be read by the user.
    """

    code: Code
    message: str

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class StatusError(Exception):
    """A status on its way up a call stack; whoever owns the request turns it into an error response or a poison."""

    def __init__(self, status: Status) -> None:
        super().__init__(str(status))
        self.status = status


def error(code: Code, message: str) -> StatusError:
    """Shorthand for raising: ``raise error(Code.INVALID_ARGUMENT, "...")``."""
    return StatusError(Status(code, message))
