"""What was compiled, from what the compiler's process says; as text and as plain values. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from slurm_pathways.tables import table

SCHEMA_VERSION = 1
#: The code of a program that does not fit into the memory of a device.
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"

Values = dict[str, Any]
_COLUMNS = (
    "program",
    "devices",
    "arguments",
    "outputs",
    "aliased",
    "temporary",
    "code",
    "GFLOP",
    "compiled_s",
    "launches",
)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class CompileReport:
    """Takes the compiler's events in; one row per program, also when it is compiled more than once.

    Args:
        topology: as the user wrote it.
        cache: the folder, None if it goes with the run.
    """

    def __init__(self, topology: str, num_slices: int, num_devices: int, cache: str | None) -> None:
        self._topology = topology
        self._num_slices = num_slices
        self._num_devices = num_devices
        self._cache = cache
        self._programs: dict[str, Values] = {}
        self._failed: list[Values] = []
        #: Whether the program was ended because it compiled nothing new any more.
        self.was_idle = False

    def note(self, name: str, fields: Mapping[str, Any]) -> None:
        """An event of the compiler; others say nothing here."""
        if name == "compiled":
            self._compiled(fields)
        elif name == "idle":
            self.was_idle = True
        elif name == "launched":
            for key, launches in fields["launches"].items():
                if key in self._programs:
                    self._programs[key]["launches"] = launches

    def _compiled(self, fields: Mapping[str, Any]) -> None:
        row = {
            "name": fields["name"],
            "key": fields["key"],
            "devices": fields["devices"],
            "slices": fields["slices"],
            "took_s": fields["took_s"],
        }
        if "failure" in fields:
            self._failed.append({**row, **fields["failure"]})
            return
        memory = fields["memory"]
        row |= {
            "is_from_cache": fields["is_from_cache"],
            "argument_bytes": memory.get("argument_size_in_bytes"),
            "output_bytes": memory.get("output_size_in_bytes"),
            "alias_bytes": memory.get("alias_size_in_bytes"),
            "temp_bytes": memory.get("temp_size_in_bytes"),
            "generated_code_bytes": fields["generated_code_bytes"],
            "flops": fields["flops"],
            "bytes_accessed": fields["bytes_accessed"],
            "estimated_s": fields["estimated_s"],
            "launches": 0,
        }
        self._programs.setdefault(str(fields["key"]), row)

    @property
    def has_failures(self) -> bool:
        """Whether some program did not compile."""
        return bool(self._failed)

    def values(self) -> Values:
        """As plain values; docs/compile.md has the schema."""
        return {
            "schema_version": SCHEMA_VERSION,
            "topology": self._topology,
            "slices": self._num_slices,
            "devices": self._num_devices,
            "compile_cache": self._cache,
            "programs": list(self._programs.values()),
            "failed": self._failed,
            "ended_when_idle": self.was_idle,
        }

    def as_text(self) -> str:
        """For people."""
        programs = list(self._programs.values())
        slices = "" if self._num_slices == 1 else f"{self._num_slices} slices of "
        place = f"{_count(self._num_devices, 'device')} of {slices}{self._topology}"
        lines = [f"{_count(len(programs), 'program')} compiled for {place}"]
        if programs:
            title = "memory of one device, and what one execution of it costs there:"
            lines.append(table(title, [_row(program) for program in programs], _COLUMNS))
        lines += [_failure(failed) for failed in self._failed]
        lines.append("nothing was executed: what the program computed on devices read as zeros")
        if self.was_idle:
            lines.append("the program was ended because it compiled nothing new any more")
        if self._cache is None:
            lines.append("nothing of it is kept: --compile-cache DIR would keep it for later runs")
        else:
            num_found = sum(program["is_from_cache"] for program in programs)
            lines.append(f"the compile cache is {self._cache}; {num_found} of {len(programs)} were there already")
        return "\n".join(lines)


def _row(program: Values) -> Values:
    flops = program["flops"]
    return {
        "program": program["name"],
        "devices": program["devices"],
        "arguments": _bytes(program["argument_bytes"]),
        "outputs": _bytes(program["output_bytes"]),
        "aliased": _bytes(program["alias_bytes"]),
        "temporary": _bytes(program["temp_bytes"]),
        "code": _bytes(program["generated_code_bytes"]),
        "GFLOP": None if flops is None else f"{flops / 1e9:.3g}",
        "compiled_s": "cached" if program["is_from_cache"] else f"{program['took_s']:.2f}",
        "launches": program["launches"],
    }


def _failure(failed: Values) -> str:
    what = "does not fit into the memory of a device" if failed["code"] == OUT_OF_MEMORY else "did not compile"
    first, *rest = str(failed["message"]).splitlines() or [""]
    return "\n".join(
        [f"{failed['name']} on {_count(failed['devices'], 'device')} {what}: {failed['code']}: {first}", *_indent(rest)]
    )


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _bytes(count: int | None) -> str | None:
    if count is None:
        return None
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
