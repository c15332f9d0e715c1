"""``sandbox.json``: what a sandbox is made of, for every later command."""

from pathlib import Path

import msgspec

from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.spec import Addressing, SandboxSpec

SCHEMA_VERSION = 1


class Process(msgspec.Struct, frozen=True):
    """A process; ``start_ticks`` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    start_ticks: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What ``sandbox.json`` says. It is there before the first process is started.

    Attributes:
        mark: see ``layout.Layout``.
        is_up: whether ``up`` has finished.
        inits: of the login and of every node that has been started and not been killed by a command.
        cut: the nodes that are partitioned off, in order.
    """

    schema_version: int = SCHEMA_VERSION
    mark: str
    spec: SandboxSpec
    addressing: Addressing
    is_up: bool = False
    inits: dict[str, Process] = {}
    cut: tuple[str, ...] = ()


def encode(record: Record) -> bytes:
    """The file's content."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2)


def decode(content: bytes, path: Path) -> Record:
    """The record in a file's content.

    Raises:
        SandboxError: it is none of this version.
    """
    try:
        record = msgspec.json.decode(content, type=Record)
    except msgspec.DecodeError as failure:
        raise SandboxError(f"{path} is not the record of a sandbox: {failure}") from failure
    if record.schema_version != SCHEMA_VERSION:
        raise SandboxError(
            f"{path} was written by another version (schema {record.schema_version}, not {SCHEMA_VERSION}): take that "
            "sandbox down with the slurm-pathways that made it"
        )
    return record
