"""What hosts write and read for pathwaysutils and ``jax.profiler``."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from running import RunChecks

pytestmark = pytest.mark.timeout(300)

HOSTS = ("host-0", "host-1", "host-2", "host-3")


@pytest.fixture(scope="module")
def pathways_utils(checks_here: RunChecks) -> dict[str, Any]:
    """What pathwaysutils' checks gave."""
    return checks_here("pathways_utils")["pathways_utils"]


def values_of(outcomes: dict[str, Any], check: str) -> Any:
    """What a check gave; fails if it did not."""
    assert "values" in outcomes[check], outcomes[check]["failed"]
    return outcomes[check]["values"]


def test_arrays_go_to_files_and_come_back(pathways_utils: dict[str, Any]) -> None:
    values = values_of(pathways_utils, "arrays_go_to_files_and_come_back")
    assert values == dict.fromkeys(("(4, 2)", "(2, 2)", "(8,)", "(3,)", "(1,)"), [True] * 5)


def test_what_cannot_be_read_says_why(pathways_utils: dict[str, Any], gs_directory: Path) -> None:
    arrays = gs_directory / "bucket" / "arrays"
    assert values_of(pathways_utils, "what_cannot_be_read_says_why") == [
        f"FAILED_PRECONDITION: there is no Zarr array in {arrays / 'missing'}",
        f"INVALID_ARGUMENT: {arrays / 'small'} holds int32[4], not float32[4], which was asked for",
        f"INVALID_ARGUMENT: {arrays / 'small'} holds int32[4], not int32[5], which was asked for",
        "INVALID_ARGUMENT: gs://bucket/../arrays/small does not name a bucket, or leads out of it",
        "INVALID_ARGUMENT: 'arrays/small': a folder must be an absolute path, or gs://bucket/path",
    ]


def test_what_has_failed_is_not_written(pathways_utils: dict[str, Any], gs_directory: Path) -> None:
    assert values_of(pathways_utils, "a_failed_array_is_not_written") is True
    assert not (gs_directory / "bucket" / "arrays" / "bad" / "0").exists()


def test_resharding_by_a_plan(pathways_utils: dict[str, Any]) -> None:
    assert values_of(pathways_utils, "resharding_by_a_plan") == [True] * 5


def test_traces_under_pathwaysutils(pathways_utils: dict[str, Any], gs_directory: Path) -> None:
    assert values_of(pathways_utils, "traces") == "done"
    run = the_run(gs_directory / "bucket" / "all")
    assert hosts_in(run) == HOSTS
    assert all(shows_a_program(run, host) for host in HOSTS)
    # The program's own is beside them, under the machine's name.
    assert len(list(run.glob("*.xplane.pb"))) == len(HOSTS) + 1
    assert hosts_in(the_run(gs_directory / "bucket" / "two")) == HOSTS[:2]


@pytest.mark.parametrize(("asked", "hosts"), [("0", ()), ("2", HOSTS[:2])])
def test_traces_of_some_hosts(checks_here: RunChecks, tmp_path: Path, asked: str, hosts: tuple[str, ...]) -> None:
    outcomes = checks_here("profiler", CHECKS_TRACE_FOLDER=str(tmp_path), SLURM_PATHWAYS_TRACE_HOSTS=asked)
    assert values_of(outcomes["profiler"], "traces") == "done"
    run = the_run(tmp_path)
    assert hosts_in(run) == hosts
    assert len(list(run.glob("*.xplane.pb"))) == len(hosts) + 1


def test_traces_of_jax(checks_here: RunChecks, tmp_path: Path) -> None:
    values = values_of(checks_here("profiler", CHECKS_TRACE_FOLDER=str(tmp_path))["profiler"], "traces")
    assert values == "done"
    run = the_run(tmp_path)
    assert hosts_in(run) == HOSTS
    # Device 3 is on host 1, and nobody else had anything to do.
    assert [shows_a_program(run, host) for host in HOSTS] == [False, True, False, False]
    assert (run / "perfetto_trace.json.gz").exists()


def the_run(folder: Path) -> Path:
    """The folder of the one trace in a folder that TensorBoard is given."""
    (run,) = (folder / "plugins" / "profile").iterdir()
    return run


def hosts_in(run: Path) -> tuple[str, ...]:
    """Whose traces Perfetto can open."""
    return tuple(sorted(path.name.removesuffix(".perfetto.json.gz") for path in run.glob("*.perfetto.json.gz")))


def shows_a_program(run: Path, host: str) -> bool:
    """Whether a host's trace, in both forms, has an execution."""
    with gzip.open(run / f"{host}.perfetto.json.gz", "rt") as file:
        content = json.load(file)
    assert "metadata" not in content
    in_perfetto = any("Execute" in event.get("name", "") for event in content["traceEvents"])
    in_xplane = b"Execute" in (run / f"{host}.xplane.pb").read_bytes()
    assert in_perfetto == in_xplane
    return in_perfetto
