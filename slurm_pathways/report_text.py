"""A report (``report.gather``) as text for people. Pure: plain values in."""

import time
from collections.abc import Mapping
from typing import Any

from slurm_pathways.slurm import hostlist
from slurm_pathways.slurm.job_comment import command_words, device_time
from slurm_pathways.tables import table

Values = Mapping[str, Any]

#: Programs of one run; JSON has all.
_PROGRAMS_SHOWN = 10
#: Lines of why a run did not start; its log's end is among them.
_PROBLEM_LINES_SHOWN = 6
_MAX_COMMAND = 100
#: What would be shown as 0.0.
_LEAST_SHOWN_S = 0.05


def as_text(report: Values) -> str:
    """The whole report."""
    parts = [part for job in report["jobs"] for part in _job(job)]
    return "\n\n".join([*parts, *(f"note: {note}" for note in report["notes"])])


def _job(job: Values) -> list[str]:
    parts = []
    if "state" in job:
        parts.append("\n".join([_headline(job), *_allocated(job)]))
    elif job["job"] is not None:
        parts.append(f"job {job['job']}")
    for run in job["runs"]:
        parts += _run(run)
    # sacct takes 128 off exit codes from there on, so that 137 looks like 9. But when Slurm gives up a node, srun ends
    # with 0, whatever the worker there did.
    ends = {
        (run["id"], component["name"]): _exit(component["exit_code"], component["signal"])
        for run in job["runs"]
        for component in run["components"]
        if component["ended_at_unix_s"] is not None and component["exit_code"] != 0
    }
    if job["steps"]:
        parts.append(table("steps", [_step_row(step, ends) for step in job["steps"]], _STEP_COLUMNS))
    if len(job["runs"]) > 1:
        totals = job["totals"]
        parts.append(
            "\n".join(["all runs", *_device_seconds(totals["device_seconds"]), *_moved(totals["bytes_moved"])])
        )
    return parts


def _headline(job: Values) -> str:
    words = [f"job {job['job']} {job['name']}: {job['state']}"]
    if job["state_detail"]:
        words[0] += f" {job['state_detail']}"
    if job["exit_status"] is not None:
        words.append(_exit(job["exit_status"]["code"], job["exit_status"]["signal"]))
    if job["nodes"]:
        words.append(f"on {hostlist.compress(job['nodes'])}")
    words.append(f"{job['elapsed_s']} s")
    return ", ".join(words)


def _allocated(job: Values) -> list[str]:
    found = job["totals"]["allocated_by_slurm"]
    # A type's count is in that of all types.
    shown = [f"{name} {_hours(value)}" for name, value in found.items() if ":" not in name and value]
    return [f"  allocated by Slurm: {', '.join(shown)}"] if shown else []


def _hours(value_s: float) -> str:
    return f"{value_s / 3600:.1f} h" if value_s >= 3600 else f"{value_s:.0f} s"


def _run(run: Values) -> list[str]:
    return [
        "\n".join(
            [
                _run_headline(run),
                *_times(run),
                *_device_seconds(run["device_seconds"]),
                *_usage_words(run),
                *_moved(run["usage"]["bytes_moved"]),
                *_failures(run),
            ]
        ),
        *_tables(run),
    ]


def _run_headline(run: Values) -> str:
    what = command_words(run["argv"], _MAX_COMMAND) if run["argv"] else "warm runtime"
    if run["state"] == "running":
        how = f"running, as of {_clock(run['written_at_unix_s'])}"
    elif run["state"] == "lost":
        how = f"its launcher is gone, and was last heard of at {_clock(run['written_at_unix_s'])}"
    else:
        how = _exit(run["exit_code"], None)
    words = f"run {run['id']}: {what}: {how}"
    if run["is_warm"]:
        words += f" (on the warm runtime {run['runtime_id']})"
    if run["problem"]:
        words += "".join(f"\n  | {line}" for line in run["problem"].splitlines()[:_PROBLEM_LINES_SHOWN])
    return words


def _exit(code: int | None, signal: int | None) -> str:
    if signal:
        return f"killed by signal {signal}"
    return "not known how it ended" if code is None else f"exit {code}"


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def _times(run: Values) -> list[str]:
    words = f"  started {_clock(run['started_at_unix_s'])}"
    if run["startup_s"] is None:
        return [f"{words}, was never ready" if run["state"] != "running" else f"{words}, not ready yet"]
    until_s = run["program_ended_at_unix_s"] or run["written_at_unix_s"]
    return [f"{words}, ready after {run['startup_s']:.1f} s, served for {until_s - run['ready_at_unix_s']:.1f} s"]


def _device_seconds(found: Values) -> list[str]:
    allocated = found["allocated"]
    if not allocated:
        return []

    def part(name: str) -> str:
        return f"{device_time(found[name])} ({100 * found[name] / allocated:.0f} %)"

    line = f"  {device_time(allocated)}: start-up {part('startup')}, busy {part('busy')}, idle {part('idle')}"
    waiting = f" of which waiting {device_time(found['waiting'])}" if found["waiting"] >= _LEAST_SHOWN_S else ""
    return [f"{line}{waiting}, other {part('other')}"]


def _usage_words(run: Values) -> list[str]:
    usage = run["usage"]
    words = []
    if usage["problem"] is not None:
        as_of = "no usage is known" if usage["as_of_unix_s"] is None else f"as of {_clock(usage['as_of_unix_s'])}"
        words.append(f"  usage: {as_of}: {usage['problem']}")
    for part in usage["slices"]:
        if part["without_usage"]:
            words.append(f"  usage of slice {part['index']} is without {', '.join(part['without_usage'])}")
    if usage["did_not_answer"]:
        words.append(f"  did not answer: {', '.join(usage['did_not_answer'])}")
    return words


def _moved(ways: Values) -> list[str]:
    shown = [f"{way.replace('_', ' ')} {_bytes(count)}" for way, count in ways.items() if count]
    return [f"  moved: {', '.join(shown)}"] if shown else []


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _failures(run: Values) -> list[str]:
    lines = []
    for failure in run["failures"]:
        again = failure["served_again_after_s"]
        served = "not served again"
        if again is not None:
            served = f"served again after {again:.1f} s by {failure['served_again_by']}"
        elif failure["host"] is None and failure["slice_index"] is None:
            served = "it served for no host"
        where = f"worker {failure['worker']} ({failure['node']})"
        found = (
            "" if failure["found_after_s"] is None else f", found {failure['found_after_s']:.1f} s after its last word"
        )
        lines.append(f"  failure at {_clock(failure['at_unix_s'])}: {where}: {failure['cause']}{found}; {served}")
    return lines


def _tables(run: Values) -> list[str]:
    parts = []
    usage = run["usage"]
    if usage["slices"]:
        parts.append(table("slices", [_slice_row(part) for part in usage["slices"]], _SLICE_COLUMNS))
    programs = usage["programs"]
    if programs:
        shown = programs[:_PROGRAMS_SHOWN]
        num_more = len(programs) - len(shown)
        more = f" ({num_more} more with --json)" if num_more else ""
        rows = [
            {**program, "busy": f"{program['busy_s']:.3f}", "waiting": f"{program['waiting_s']:.3f}"}
            for program in shown
        ]
        title = f"programs, in device-seconds, the busiest first{more}"
        parts.append(table(title, rows, ("name", "devices", "executions", "busy", "waiting")))
    bad = [component for component in run["components"] if _is_bad(component)]
    if bad:
        parts.append(table("ended by themselves", [_component_row(part) for part in bad], _COMPONENT_COLUMNS))
    return parts


def _is_bad(component: Values) -> bool:
    return component["cause"] is not None or component["was_asked"] is False


_SLICE_COLUMNS = ("slice", "nodes", "devices", "busy s", "busy %", "idle s", "waiting s")


def _slice_row(part: Values) -> dict[str, Any]:
    share = 100 * part["busy_s"] / part["device_s"] if part["device_s"] else 0.0
    return {
        "slice": part["index"],
        "nodes": hostlist.compress(part["nodes"]),
        "devices": part["num_devices"],
        "busy s": part["busy_s"],
        "busy %": f"{share:.0f}",
        "idle s": part["idle_s"],
        "waiting s": part["waiting_s"],
    }


_COMPONENT_COLUMNS = ("component", "node", "ended", "cause")


def _component_row(component: Values) -> dict[str, Any]:
    return {
        "component": component["name"],
        "node": component["node"],
        "ended": _exit(component["exit_code"], component["signal"]),
        "cause": component["cause"],
    }


_STEP_COLUMNS = ("step", "name", "node", "state", "ended", "elapsed s", "CPU s", "max RSS", "run")


def _step_row(step: Values, ends: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """``ends``: how components ended, by run and name."""
    status = step["exit_status"]
    accounted = None if status is None else _exit(status["code"], status["signal"])
    return {
        "step": step["step"],
        "name": step["name"],
        "node": hostlist.compress(step["nodes"]) if step["nodes"] else None,
        "state": step["state"],
        "ended": ends.get((step["run"], step["component"]), accounted),
        "elapsed s": step["elapsed_s"],
        "CPU s": step["cpu_s"],
        "max RSS": None if step["max_rss_bytes"] is None else _bytes(step["max_rss_bytes"]),
        "run": step["run"],
    }
