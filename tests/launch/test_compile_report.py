"""What ``compile`` says of what it was told, and with which exit code it ends."""

from typing import Any

import pytest

from slurm_pathways.launch.compiling.command import final_exit_code
from slurm_pathways.launch.compiling.report import CompileReport

MIB = 1 << 20


def compiled(key: str, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "key": key,
        "devices": 4,
        "slices": [0],
        "took_s": 1.234,
        "is_from_cache": False,
        "memory": {
            "argument_size_in_bytes": 3 * MIB // 2,
            "output_size_in_bytes": 512,
            "alias_size_in_bytes": 0,
            "temp_size_in_bytes": 5 << 30,
        },
        "generated_code_bytes": 2048,
        "flops": 3.44e10,
        "bytes_accessed": 1e6,
        "estimated_s": 2e-3,
        **changes,
    }


def failed(key: str, name: str, code: str, message: str) -> dict[str, Any]:
    fields = compiled(key, name)
    kept = {field: fields[field] for field in ("name", "key", "devices", "slices", "took_s", "is_from_cache")}
    return {**kept, "failure": {"code": code, "message": message}}


def test_programs_with_memory_costs_and_launches() -> None:
    report = CompileReport("v5e:2x2", 2, 8, "/cache")
    report.note("listening", {})
    report.note("compiled", compiled("a", "jit_step"))
    report.note("compiled", compiled("b", "jit_init", is_from_cache=True, flops=None))
    # Again, as of a second function that is the same program.
    report.note("compiled", compiled("a", "jit_step", is_from_cache=True))
    report.note("launched", {"launches": {"a": 12, "b": 1, "of what did not compile": 0}})
    assert report.as_text().splitlines() == [
        "2 programs compiled for 8 devices of 2 slices of v5e:2x2",
        "memory of one device, and what one execution of it costs there:",
        "  program   devices  arguments  outputs  aliased  temporary  code     GFLOP  compiled_s  launches",
        "  jit_step  4        1.5 MiB    512 B    0 B      5.0 GiB    2.0 KiB  34.4   1.23        12",
        "  jit_init  4        1.5 MiB    512 B    0 B      5.0 GiB    2.0 KiB  -      cached      1",
        "nothing was executed: what the program computed on devices read as zeros",
        "the compile cache is /cache; 1 of 2 were there already",
    ]
    assert not report.has_failures
    values = report.values()
    assert (values["topology"], values["slices"], values["devices"]) == ("v5e:2x2", 2, 8)
    assert (values["compile_cache"], values["failed"], values["ended_when_idle"]) == ("/cache", [], False)
    assert values["programs"][0] == {
        "name": "jit_step",
        "key": "a",
        "devices": 4,
        "slices": [0],
        "took_s": 1.234,
        "is_from_cache": False,
        "argument_bytes": 3 * MIB // 2,
        "output_bytes": 512,
        "alias_bytes": 0,
        "temp_bytes": 5 << 30,
        "generated_code_bytes": 2048,
        "flops": 3.44e10,
        "bytes_accessed": 1e6,
        "estimated_s": 2e-3,
        "launches": 12,
    }


def test_what_does_not_compile_is_named() -> None:
    report = CompileReport("v5e:2x2", 1, 4, None)
    report.note("compiled", failed("a", "jit_huge", "RESOURCE_EXHAUSTED", "Ran out of memory\nSee elsewhere."))
    report.note("compiled", failed("b", "jit_odd", "NOT_FOUND", "No FFI handler"))
    report.note("idle", {"launches": 3})
    assert report.has_failures
    assert report.as_text().splitlines() == [
        "0 programs compiled for 4 devices of v5e:2x2",
        "jit_huge on 4 devices does not fit into the memory of a device: RESOURCE_EXHAUSTED: Ran out of memory",
        "    See elsewhere.",
        "jit_odd on 4 devices did not compile: NOT_FOUND: No FFI handler",
        "nothing was executed: what the program computed on devices read as zeros",
        "the program was ended because it compiled nothing new any more",
        "nothing of it is kept: --compile-cache DIR would keep it for later runs",
    ]
    assert [(each["name"], each["code"]) for each in report.values()["failed"]] == [
        ("jit_huge", "RESOURCE_EXHAUSTED"),
        ("jit_odd", "NOT_FOUND"),
    ]


@pytest.mark.parametrize(
    ("exit_code", "was_idle", "has_failures", "final"),
    [
        (0, False, False, 0),
        (0, False, True, 1),
        (3, False, True, 3),
        (143, False, False, 143),
        (143, True, False, 0),
        (143, True, True, 1),
        (7, True, False, 7),
    ],
)
def test_exit_codes(exit_code: int, was_idle: bool, has_failures: bool, final: int) -> None:
    assert final_exit_code(exit_code, was_idle, has_failures) == final
