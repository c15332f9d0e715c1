"""``jax.profiler`` without pathwaysutils. The test looks at what was written."""

import os
from typing import Any

import jax
import jax.numpy as jnp

FOLDER = os.environ.get("CHECKS_TRACE_FOLDER", "")


def traces() -> Any:
    x = jax.device_put(jnp.ones((64, 64)), jax.devices()[3])
    step = jax.jit(lambda x: x @ x / 64)
    with jax.profiler.trace(FOLDER, create_perfetto_trace=True):
        step(x).block_until_ready()
    # A second one, which is dropped, does not keep a third from being made.
    jax.profiler.start_trace(FOLDER)
    return "done"


CHECKS = (traces,)
