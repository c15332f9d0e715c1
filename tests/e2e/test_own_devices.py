"""A program that also uses the CPU devices of its own process."""

from client_programs import answer_of

from slurm_pathways.launch.local import LocalRuntime


def test_arrays_go_to_the_programs_own_devices_and_back(shared_runtime: LocalRuntime) -> None:
    environ = shared_runtime.environment() | {
        "JAX_PLATFORMS": "proxy,cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    answer = answer_of(environ, "own_devices")
    assert answer["num_devices"] == [8, 2]
    assert [way for way, is_right in answer["right"].items() if not is_right] == []
    assert len(answer["right"]) == 4 * 4 * 2 + 4
