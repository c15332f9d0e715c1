"""Compiled programs on disk, shared by the executors of a run and by later runs.

One file per program. Writers make a temporary file and rename it, so a reader sees all of an entry or none, and of
several writers the last wins. Each entry carries a checksum; one that does not match is ignored and replaced.
"""

import hashlib
import logging
import tempfile
from pathlib import Path

import msgspec

from pathways_runtime.core.sharding import Shape
from pathways_runtime.wire.messages import ProgramMetadata

logger = logging.getLogger(__name__)

_MAGIC = b"pathways-program-1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


class CompiledProgram(msgspec.Struct, frozen=True, array_like=True):
    """What a compilation gives, for every host of the program.

    Attributes:
        executable: as PJRT serializes it.
        metadata: for the client.
        parameters, outputs: (shape, dtype kind) of one device's shards.
        donated: parameters whose memory the executable takes over.
    """

    executable: bytes
    metadata: ProgramMetadata
    parameters: tuple[tuple[Shape, int], ...]
    outputs: tuple[tuple[Shape, int], ...]
    donated: tuple[int, ...]


class CompileCache:
    """A folder of compiled programs. Any number of processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._decoder = msgspec.msgpack.Decoder(CompiledProgram)

    def load(self, key: str) -> CompiledProgram | None:
        """The entry, or None when there is none that can be read."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as failure:
            logger.warning("compile cache: %s cannot be read: %s", path, failure)
            return None
        body = content[len(_MAGIC) + _DIGEST_BYTES :]
        head = _MAGIC + hashlib.sha256(body).digest()
        if not content.startswith(head):
            logger.warning("compile cache: %s is damaged and will be replaced", path)
            return None
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as failure:
            logger.warning("compile cache: %s is of another version and will be replaced: %s", path, failure)
            return None

    def store(self, key: str, program: CompiledProgram) -> None:
        """Write an entry. A full or read-only disk costs a warning, not the compilation."""
        body = msgspec.msgpack.encode(program)
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".writing-", delete=False) as file:
                try:
                    file.write(_MAGIC + hashlib.sha256(body).digest())
                    file.write(body)
                    file.close()
                    Path(file.name).replace(self._path(key))
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as failure:
            logger.warning("compile cache: no entry for %s: %s", key, failure)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.program"


def cache_key(*parts: bytes | str) -> str:
    """A name for what ``parts`` say: all that a compilation depends on."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def cpu_features() -> str:
    """What this machine's processor can do; compiled code for CPU depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip() in wanted}))
