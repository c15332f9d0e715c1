"""Several clients at once, overlapping groups of devices, workers that dawdle: every value is right."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_programs import HERE
from conftest import run_for_module

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime

#: Executors wait at random before launches: ``seed:most seconds``.
DELAY_VARIABLE = "SLURM_PATHWAYS_TEST_LAUNCH_DELAY_S"
NUM_CLIENTS = 3
NUM_LAUNCHES = 150


@pytest.fixture(scope="module")
def dawdling_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuntime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DELAY_VARIABLE, "7:0.004")
        yield from run_for_module(
            tmp_path_factory, RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2, startup_timeout_s=120)
        )


@pytest.mark.timeout(420)
def test_values_of_concurrent_clients(dawdling_runtime: LocalRuntime, tmp_path: Path) -> None:
    proxies = [dawdling_runtime.new_proxy() for _ in range(NUM_CLIENTS - 1)]
    environments = [dawdling_runtime.environment(), *(dawdling_runtime.environment(proxy) for proxy in proxies)]
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "programs.gang_client", str(seed), str(NUM_LAUNCHES)],
            env=environ,
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed, environ in enumerate(environments)
    ]
    try:
        outputs = [client.communicate(timeout=360) for client in clients]
    finally:
        for client in clients:
            client.kill()
            client.wait()
    for client, (output, errors) in zip(clients, outputs, strict=True):
        assert client.returncode == 0, errors[-3000:]
        answer = json.loads(output.splitlines()[-1])
        assert answer["wrong"] == []
        assert answer["checked"] >= 2 * NUM_LAUNCHES
