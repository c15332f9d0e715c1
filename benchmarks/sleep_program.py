"""Programs of a known duration that do not use the processor (see sleeping/sitecustomize.py)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent / "sleeping"
_STATUS_RETURNING_UNIFIED = 3


def with_sleep(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which processes know the program's target."""
    paths = [str(_FOLDER), *filter(None, [environ.get("PYTHONPATH")])]
    return dict(environ) | {"PYTHONPATH": os.pathsep.join(paths)}


def sleep(duration_s: Any) -> Any:
    """Inside a jitted function: a scalar float32 that is ``duration_s`` and is there after as many seconds."""
    import jax
    import jax.numpy as jnp

    call = jax.ffi.ffi_call(
        "benchmark_sleep",
        jax.ShapeDtypeStruct((), jnp.float32),
        custom_call_api_version=_STATUS_RETURNING_UNIFIED,
        legacy_backend_config="",
    )
    return call(jnp.asarray(duration_s, jnp.float32))
