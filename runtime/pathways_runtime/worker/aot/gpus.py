"""GPUs as XLA's compiler wants them described where there are none: figures of their makers' data sheets."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """One model. Memory sizes are in bytes; what all of them have in common is in ``description``.

    Attributes:
        name: as the driver has it.
        capability: CUDA's compute capability.
        shared_bytes: shared memory of a multiprocessor. A block may have all but 1 KiB of it.
        bytes_per_s: of the device's memory.
    """

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    clock_ghz: float
    lanes_per_multiprocessor: int
    shared_bytes: int
    cache_bytes: int
    memory_bytes: int
    bytes_per_s: float


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 64, 164 << 10, 40 << 20, 80 << 30, 2.039e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 128, 228 << 10, 50 << 20, 80 << 30, 3.35e12),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 1.98, 128, 228 << 10, 50 << 20, 141 << 30, 4.8e12),
}


def description(gpu: Gpu) -> str:
    """XLA's ``GpuTargetConfigProto`` as text."""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.num_multiprocessors}
  fpus_per_core: {gpu.lanes_per_multiprocessor}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {int(gpu.bytes_per_s)}
  l2_cache_size: {gpu.cache_bytes}
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {gpu.shared_bytes - (1 << 10)}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.name}"
"""
