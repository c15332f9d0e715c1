"""``JAX_PLATFORMS=proxy,cpu``: arrays go between the runtime's devices and the program's own CPU devices."""

import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P


def main() -> None:
    """Prints, for each way, whether values and places are right."""
    devices, own = jax.devices("proxy"), jax.devices("cpu")
    mesh = Mesh(np.array(devices), ("x",))
    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    sources = {
        "rows": jax.device_put(host, NamedSharding(mesh, P("x"))),
        "everywhere": jax.device_put(host, NamedSharding(mesh, P())),
        "one_device": jax.device_put(host, devices[5]),
        "computed": jax.jit(lambda x: x + 0)(jax.device_put(host, NamedSharding(mesh, P(None, "x")))),
    }
    targets = {
        "device": own[0],
        "other_device": own[1],
        "sharding": SingleDeviceSharding(own[1]),
        "sharded": NamedSharding(Mesh(np.array(own), ("x",)), P("x")),
    }
    right = {}
    for name, source in sources.items():
        for target_name, target in targets.items():
            for may_alias in (None, False):
                fetched = jax.device_put(source, target, may_alias=may_alias)
                back = jax.device_put(fetched, source.sharding)
                right[f"{name} to {target_name}, {may_alias}"] = bool(
                    np.array_equal(fetched, host)
                    and fetched.devices() <= set(own)
                    and fetched.committed
                    and np.array_equal(jax.jit(lambda x: x * 2)(fetched), host * 2)
                    and np.array_equal(back, host)
                    and back.sharding == source.sharding
                )
    key = jax.device_put(jax.random.key(3), devices[2])
    own_key = jax.device_put(key, own[1])
    right["key"] = bool(jax.random.bits(own_key) == int(jax.random.bits(key))) and own_key.devices() == {own[1]}
    number = jax.device_put(jax.device_put(np.int8(7), devices[1]), own[0])
    right["scalar"] = number.dtype == np.int8 and int(number) == 7
    own_default = jax.default_device(own[0])
    with own_default:
        right["computed on the program's own device"] = jax.numpy.ones(3).devices() == {own[0]}
    right["default"] = jax.numpy.ones(3).devices() <= set(devices) and jax.default_backend() == "cpu"
    print(json.dumps({"num_devices": [len(devices), len(own)], "right": right}))


if __name__ == "__main__":
    main()
