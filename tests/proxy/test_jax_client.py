"""What JAX's own client, in a process of its own, makes of the proxy. Only the devices are fake."""

import asyncio
import os
import sys

import numpy as np

from pathways_runtime.core.dtype import DType
from pathways_runtime.wire.messages import ProgramMetadata

from .conftest import RunWithRig
from .fake_cluster import FakeProgram
from .rig import Rig

DEADLINE_S = 60.0

PRELUDE = """
import sys

import jax
import numpy as np
"""


async def run_program(rig: Rig, program: str) -> str:
    """Run a JAX program against the proxy; its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PRELUDE + program),
        env={
            **os.environ,
            "JAX_PLATFORMS": "proxy",
            "JAX_BACKEND_TARGET": f"grpc://{rig.listen}",
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise
    assert process.returncode == 0, errors.decode()
    return output.decode()


def test_devices_and_values(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        output = await run_program(
            rig,
            """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
device = jax.devices()[3]
print(len(jax.devices()), jax.process_count(), jax.default_backend(), jax.devices()[0].client.runtime_type)
print(repr(device), device.slice_index, list(device.coords), device.virtual_task_index)
print([memory.kind for memory in device.addressable_memories()], device.default_memory().kind)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64", "uint8"):
    value = np.arange(16).reshape(4, 4).astype(jax.numpy.dtype(dtype))
    for each in (value, value.T, value[::2]):
        for sharding in (device, *(NamedSharding(mesh, spec) for spec in (P("a", "b"), P(None, "a"), P()))):
            back = np.asarray(jax.device_put(each, sharding))
            assert back.dtype == each.dtype and (back == each).all(), (dtype, sharding)
pinned = jax.device_put(np.arange(4), NamedSharding(mesh, P("a"), memory_kind="pinned_host"))
print(pinned.sharding.memory_kind, np.asarray(pinned).tolist())
print(np.asarray(jax.device_put(np.zeros((0, 3)), device)).shape)
moved = jax.device_put(jax.device_put(np.arange(3), jax.devices()[0]), device)
print(moved.devices() == {device}, np.asarray(moved).tolist())
""",
        )
        assert output.splitlines() == [
            "4 1 cpu proxy/pathways",
            "device(3,CPU_DEVICE,coords=[1,0,0,0],vtask=1,slice=1,default_mem=device,mem_spaces=3) 1 [1, 0, 0] 1",
            "['device', 'pinned_host', 'unpinned_host'] device",
            "pinned_host [0, 1, 2, 3]",
            "(0, 3)",
            "True [0, 1, 2]",
        ]
        await rig.cluster.until(lambda: len(rig.cluster.detached) == 1, "the session is detached")

    run(body)


INCREMENT = FakeProgram(
    ProgramMetadata(
        name="jit_increment",
        fingerprint=b"",
        parameter_shardings=None,
        output_shardings=None,
        parameter_layouts=((),),
        output_layouts=((),),
        output_memory_kinds=("device",),
        output_dtypes=(int(DType.F32),),
        output_shapes=((),),
        donated_inputs=(),
        memory_stats={"temp_size_in_bytes": 5},
        generated_code_bytes=1,
        cost_analysis={"flops": 1.0},
        text="HloModule jit_increment",
    ),
    lambda x: (x + np.float32(1),),
)


def test_calls_leave_nothing_in_the_client(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        rig.cluster.any_program = INCREMENT
        output = await run_program(
            rig,
            """
import gc
increment = jax.jit(lambda x: x + 1)
x = jax.device_put(np.float32(0))
def calls(count):
    global x
    for _ in range(count):
        x = increment(x)
    print(float(x))
calls(500)
gc.collect()
before = sys.getallocatedblocks()
calls(1000)
gc.collect()
print((sys.getallocatedblocks() - before) // 100)
compiled = increment.lower(x).compile()
print(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis())
""",
        )
        # A user context that is never freed keeps one block for each call: 10 hundreds.
        assert output.splitlines() == ["500.0", "1500.0", "0", "HloModule jit_increment 5 {'flops': 1.0}"]

    run(body)
