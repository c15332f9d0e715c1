"""Computes on two slices, waits for a line on stdin, and goes on until the first slice fails."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def main() -> None:
    """Prints ``up``, then a JSON object: the error of the first slice, and a sum on the second."""
    halves = [[device for device in jax.devices() if device.slice_index == index] for index in range(2)]
    step = jax.jit(lambda x: x + x.sum())
    arrays = [
        jax.device_put(np.ones(8, np.float32), NamedSharding(Mesh(np.array(half), ("x",)), P("x"))) for half in halves
    ]
    arrays = [step(array) for array in arrays]
    jax.block_until_ready(arrays)
    print("up", flush=True)
    sys.stdin.readline()
    failure = ""
    try:
        while True:
            arrays[0] = step(arrays[0])
            arrays[0].block_until_ready()
    except jax.errors.JaxRuntimeError as raised:
        failure = str(raised)
    print(json.dumps({"failure": failure, "value": np.asarray(step(arrays[1])).tolist()}))


main()
