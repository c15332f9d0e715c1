"""Arrays move from worker to worker: the counters say that nothing went by way of the client."""

from collections.abc import Iterator

import pytest
from client_programs import answer_of

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime
from tests.runtimes import shared_by_tests

SIZE_BYTES = 4 << 20
#: From 8 devices on 4 hosts in rows of 512 KiB: what must cross between hosts, in bytes.
MUST_CROSS = {
    # Each device needs an eighth of every row, and its host has a quarter of the rows.
    "columns": SIZE_BYTES * 3 // 4,
    # Each host lacks three quarters; devices of one host may share what crossed, or not.
    "everywhere": (4 * SIZE_BYTES * 3 // 4, 8 * SIZE_BYTES * 3 // 4),
    # Four devices hold a quarter each afterwards; device 0 of host 0 has both its eighths on its host, as no other has.
    "first_slice": SIZE_BYTES * 3 // 4,
    "second_slice": SIZE_BYTES * 3 // 4,
    "reversed": SIZE_BYTES,
    "one_device": SIZE_BYTES * 3 // 4,
    "pinned_host": SIZE_BYTES * 3 // 4,
}


@pytest.fixture(scope="module", params=[False, True], ids=["shared_memory", "sockets"])
def runtime_of_kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalRuntime, bool]]:
    spec = RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2, force_sockets=request.param)
    for runtime in shared_by_tests(tmp_path_factory, spec):
        yield runtime, request.param


def test_bytes_go_from_worker_to_worker(runtime_of_kind: tuple[LocalRuntime, bool]) -> None:
    runtime, force_sockets = runtime_of_kind
    answer = answer_of(runtime.environment(), "transfers")
    assert all(answer["right"].values()), answer["right"]
    used, unused = ("socket", "shared_memory") if force_sockets else ("shared_memory", "socket")
    for name, moved in answer["moved"].items():
        assert moved["host_buffers"] == 0, f"{name} went by way of the client: {moved}"
        assert moved[unused] == 0, f"{name}: {moved}"
        limits = MUST_CROSS[name]
        low, high = limits if isinstance(limits, tuple) else (limits, limits)
        assert low <= moved[used] <= high, f"{name}: {moved[used]} bytes between hosts, expected {low} to {high}"
    # Each of the seven arrays was fetched; of a replicated one, one replica is enough.
    assert answer["fetched_bytes"] >= len(MUST_CROSS) * SIZE_BYTES
