"""Functions on CPUs beside accelerators, and what goes between the two. Prints JSON."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python as cp

DEVICES = jax.devices()
BESIDE = cp.colocated_cpu_devices(DEVICES)


@cp.colocated_python
def double(x: Any) -> Any:
    return x * 2


def failure_of_a_program_over_hosts(sharding: jax.NamedSharding) -> str:
    x = jax.device_put(np.arange(8.0), sharding)
    try:
        return str(jax.jit(lambda a: a.sum())(x))
    except jax.errors.JaxRuntimeError as failure:
        return str(failure)


def main() -> None:
    on_cpus = jax.NamedSharding(jax.sharding.Mesh(np.array(BESIDE), ("x",)), jax.P("x"))
    on_devices = jax.NamedSharding(jax.sharding.Mesh(np.array(DEVICES), ("x",)), jax.P("x"))
    values = np.arange(16, dtype=np.float32)
    x = jax.jit(lambda a: a + 1)(jax.device_put(values, on_devices))
    doubled = double(jax.device_put(x, on_cpus))
    back = jax.device_put(doubled, on_devices)
    alone = jax.device_put(np.float32(3), BESIDE[5])
    strings = jax.device_put(np.array(["a", "bc"], np.dtypes.StringDType()), BESIDE[0])
    answer = {
        "kinds": [DEVICES[0].platform, DEVICES[0].device_kind, BESIDE[0].device_kind],
        "ids": [device.id for device in BESIDE],
        "doubled": [jax.device_get(doubled).tolist(), doubled.sharding == on_cpus],
        "back": float(jax.jit(lambda a: a.sum())(back)),
        "program on a CPU": float(jax.jit(lambda a: a * a)(double(alone))),
        "strings": jax.device_get(cp.colocated_python(lambda s: s)(strings)).tolist(),
        "program over hosts": failure_of_a_program_over_hosts(on_cpus),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
