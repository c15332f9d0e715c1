"""Compiled programs on disk."""

import subprocess
import sys
from pathlib import Path

import pytest

from pathways_runtime.wire.messages import ProgramMetadata
from pathways_runtime.worker.compile_cache import CompileCache, CompiledProgram, cache_key

METADATA = ProgramMetadata(
    name="jit_f",
    fingerprint=b"1",
    parameter_shardings=None,
    output_shardings=(b"s",),
    parameter_layouts=((1, 0),),
    output_layouts=((0,),),
    output_memory_kinds=("device",),
    output_dtypes=(11,),
    output_shapes=((4,),),
    donated_inputs=(0,),
    memory_stats={"temp_size_in_bytes": 3},
    generated_code_bytes=5,
    cost_analysis={"flops": 2.0},
    text="HloModule",
)


def program(executable: bytes) -> CompiledProgram:
    return CompiledProgram(executable, METADATA, (((2, 2), 11),), (((4,), 11),), (0,))


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "new" / "cache")


def entry(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "new" / "cache").iterdir()
    return found


def test_what_is_stored_is_loaded(cache: CompileCache, tmp_path: Path) -> None:
    assert cache.load("k") is None
    cache.store("k", program(b"code"))
    assert cache.load("k") == program(b"code")
    assert cache.load("other") is None
    assert entry(tmp_path).name == "k.program"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "old version"])
def test_a_damaged_entry_is_ignored_and_replaced(
    cache: CompileCache, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store("k", program(b"code"))
    path = entry(tmp_path)
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[:-1])
        case "flipped":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "empty":
            path.write_bytes(b"")
        case "old version":
            path.write_bytes(b"pathways-program-0\n" + content[19:])
    assert cache.load("k") is None
    assert "damaged" in caplog.text
    cache.store("k", program(b"again"))
    assert cache.load("k") == program(b"again")


def test_a_folder_that_cannot_be_written_costs_a_warning(
    cache: CompileCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "new" / "cache"
    folder.rmdir()
    folder.write_text("in the way")
    cache.store("k", program(b"code"))
    assert "no entry for k" in caplog.text
    assert cache.load("k") is None


def _write(folder: Path, number: int) -> None:
    cache = CompileCache(folder)
    for _ in range(50):
        cache.store("k", program(bytes([number]) * 100_000))
        loaded = cache.load("k")
        assert loaded is not None
        assert loaded.executable == loaded.executable[:1] * 100_000


def test_concurrent_writers_leave_a_whole_entry(cache: CompileCache, tmp_path: Path) -> None:
    # This file itself as a program: tests are no package that another process could import.
    writers = [
        subprocess.Popen([sys.executable, __file__, tmp_path / "new" / "cache", str(number)]) for number in range(2)
    ]
    for writer in writers:
        assert writer.wait(60) == 0
    assert cache.load("k") in (program(b"\0" * 100_000), program(b"\1" * 100_000))
    assert entry(tmp_path).name == "k.program"


def test_keys_tell_parts_apart() -> None:
    assert cache_key(b"ab", "c") == cache_key("ab", b"c")
    assert len({cache_key("ab", "c"), cache_key("a", "bc"), cache_key("abc"), cache_key("abc", "")}) == 4


if __name__ == "__main__":
    _write(Path(sys.argv[1]), int(sys.argv[2]))
