"""Several clients at once, overlapping groups of devices, workers that dawdle: every value is right."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from client_programs import HERE, plain_environment

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime
from tests.runtimes import shared_by_tests

#: Executors wait at random before launches: ``seed:most seconds``.
DELAY_VARIABLE = "SLURM_PATHWAYS_TEST_LAUNCH_DELAY_S"
NUM_CLIENTS = 3
NUM_LAUNCHES = 150


@pytest.fixture(scope="module")
def dawdling_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuntime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DELAY_VARIABLE, "7:0.004")
        yield from shared_by_tests(
            tmp_path_factory, RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2, startup_timeout_s=120)
        )


@pytest.mark.timeout(420)
def test_values_of_concurrent_clients(dawdling_runtime: LocalRuntime) -> None:
    proxies = [dawdling_runtime.new_proxy() for _ in range(NUM_CLIENTS - 1)]
    environments = [dawdling_runtime.environment(), *(dawdling_runtime.environment(proxy) for proxy in proxies)]
    programs = [["gang_client", str(seed), str(NUM_LAUNCHES)] for seed in range(NUM_CLIENTS)]
    for answer in run_together(programs, environments, timeout_s=360):
        assert answer["wrong"] == []
        assert answer["checked"] >= 2 * NUM_LAUNCHES


@pytest.mark.parametrize(("order", "is_right"), [("same", True), ("opposite", False)])
def test_values_tell_whether_there_is_an_order(order: str, is_right: bool) -> None:
    """The negative control: without one order the same programs give wrong values and no error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    programs = [["misordered", coordinator, str(rank), order] for rank in range(2)]
    values = run_together(programs, [plain_environment(2)] * 2, timeout_s=60)
    assert (values == [[6.0, 18.0]] * 2) is is_right, values


def run_together(
    programs: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout_s: float
) -> list[Any]:
    """Run programs of this folder at the same time; the JSON values in their last lines."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"programs.{name}", *arguments],
            env=dict(environ),
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for (name, *arguments), environ in zip(programs, environments, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]
