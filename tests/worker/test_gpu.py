"""Which GPUs a worker has, how memory is taken, and NCCL's interface: all that needs no GPU."""

from pathlib import Path

import pytest

from pathways_runtime.worker import gpu, pjrt
from pathways_runtime.worker.gpu import DevicesMissing, allowed_devices, client_options, device_names, missing
from pathways_runtime.worker.supervisor import executor_environment, parse_options


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """As the driver describes three GPUs."""
    for place, model in (
        ("0000:9b:00.0", "NVIDIA H200"),
        ("0000:17:00.0", "NVIDIA A100-SXM4-80GB"),
        ("0000:c0:00.0", ""),
    ):
        (tmp_path / place).mkdir()
        line = f"Model: \t\t {model}\n" if model else ""
        (tmp_path / place / "information").write_text(f"{line}IRQ:   \t\t 42\nGPU UUID: \t GPU-1\nBus Type: \t PCIe\n")
    return tmp_path


def test_the_driver_names_them_in_the_order_of_the_bus(driver: Path, tmp_path: Path) -> None:
    assert device_names(driver) == ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "cuda"]
    assert device_names(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("2,0", ["2", "0"]),
        (" 1 , 2 ", ["1", "2"]),
        ("GPU-8932f937,MIG-1b2", ["GPU-8932f937", "MIG-1b2"]),
        ("0,-1,2", ["0"]),
        ("NoDevFiles", []),
    ],
)
def test_what_slurm_or_the_user_allows(driver: Path, given: str | None, allowed: list[str]) -> None:
    environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert allowed_devices(environ, driver) == allowed


def test_workers_of_one_machine_share_them_out(driver: Path) -> None:
    first = gpu.executor_environment({"PATH": "/bin"}, 0, 2, None, driver)
    assert first == {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpu.executor_environment({}, 2, 1, None, driver)["CUDA_VISIBLE_DEVICES"] == "2"
    environ = {"CUDA_VISIBLE_DEVICES": "7,5,3,1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert gpu.executor_environment(environ, 2, 2, None, driver) == {
        "CUDA_VISIBLE_DEVICES": "3,1",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    }


def test_too_few_are_said_with_who_says_so(driver: Path, tmp_path: Path) -> None:
    with pytest.raises(DevicesMissing, match=r"^GPUs 2 to 3 are this host's, and this machine has 3$"):
        gpu.executor_environment({}, 2, 2, None, driver)
    assert missing({}, 3, driver) is None
    assert missing({}, 4, driver) == "4 GPUs are needed, and this machine has 3"
    limited = {"CUDA_VISIBLE_DEVICES": "1"}
    expected = "2 GPUs are needed, and this machine has 3, and CUDA_VISIBLE_DEVICES=1 allows 1"
    assert missing(limited, 2, driver) == expected
    nowhere = tmp_path / "none"
    assert missing({}, 1, nowhere) == f"1 GPU is needed, and this machine has no NVIDIA driver (no {nowhere})"
    # A container may hide the driver's files and give devices all the same.
    assert missing(limited, 1, nowhere) is None


def test_memory_is_for_the_user_to_say_and_else_left_to_other_clients() -> None:
    made = {"platform_name": "cuda", "allocator": "default"}
    assert client_options(made, {}, 1) == made
    assert client_options(made, {}, 2) == {**made, "preallocate": False}
    said = {**made, "preallocate": True}
    assert client_options(said, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, 2) == said


def test_what_an_executor_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's flags for XLA are for the program's; what is about the devices' memory is for the workers'."""
    options = parse_options(
        [
            *("--controller", "unix:/c", "--worker-id", "1", "--name", "n", "--devices-per-host", "2"),
            *("--platform", "cuda", "--first-device", "2", "--advertise", "127.0.0.1", "--credentials", "/no"),
            *("--compile-cache", "/c", "--run-dir", "/r", "--log-dir", "/l"),
        ]
    )
    environ = {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "XLA_CLIENT_MEM_FRACTION": "0.4",
        "XLA_FLAGS": "--xla_dump_to=/home",
    }
    made = executor_environment(environ, options)
    assert made["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (made["XLA_PYTHON_CLIENT_MEM_FRACTION"], made["XLA_CLIENT_MEM_FRACTION"]) == ("0.5", "0.4")
    assert "XLA_FLAGS" not in made
    # NCCL speaks over the interface of the job, if the user has not chosen another.
    assert made["NCCL_SOCKET_IFNAME"] == "=lo"
    assert executor_environment({**environ, "NCCL_SOCKET_IFNAME": "ib0"}, options)["NCCL_SOCKET_IFNAME"] == "ib0"
    with pytest.raises(DevicesMissing):
        executor_environment({"CUDA_VISIBLE_DEVICES": "0,1,2"}, options)


def test_without_jaxs_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pjrt, "_CUDA_PLUGINS", ("nobody_has_this.xla_cuda",))
    with pytest.raises(
        pjrt.PjrtError, match="FAILED_PRECONDITION: JAX's plugin for CUDA is not installed: pip install"
    ):
        pjrt.make_plugin_client("cuda", None, 1)
    with pytest.raises(pjrt.PjrtError, match="UNIMPLEMENTED: there are no workers for tpu"):
        pjrt.make_plugin_client("tpu", None, 1)
