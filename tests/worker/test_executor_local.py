"""One executor process: programs, values, failures."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.wire import links as wire_links
from pathways_runtime.wire import messages as wire


def test_a_program_runs_on_one_device(lab: Any, sharded: Callable[..., Any]) -> None:
    add = lab.jit(lambda x: x + 1, sharded((3,), np.float32, 1), devices=[1])
    x = lab.make_array([np.arange(3, dtype=np.float32)], [1])
    y = add(add(x))
    assert lab.wait_ready([y]) == [None]
    np.testing.assert_array_equal(lab.fetch(y, 1, np.float32, (3,)), [2, 3, 4])
    lab.hosts[0].wait_completed(2)
