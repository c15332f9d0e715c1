"""Gates: how a program with callbacks is launched on one CPU device without running inside the launch.

XLA on CPU runs a program with callbacks in the call that launches it, if all arguments are there and it has one device
here. The launch would return when the client's Python has, and no other program could be launched meanwhile: not those
either that the Python function waits for. So such a program has one more parameter, and its argument is computed when
the launch has returned: by a callback of our own, which waits for that.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from pathways_runtime.worker import mlir, pjrt

SHAPE: tuple[int, ...] = ()
DTYPE = np.dtype(np.float32)
_KEY = np.dtype(np.int32)

#: So expensive that XLA computes it on another thread, which takes longer than to launch what reads it.
_SLOW = b"""
module @slow {
  func.func public @main(%x: tensor<192x192xf32>) -> tensor<f32> {
    %a = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
      : (tensor<192x192xf32>, tensor<192x192xf32>) -> tensor<192x192xf32>
    %b = stablehlo.dot_general %a, %x, contracting_dims = [1] x [0]
      : (tensor<192x192xf32>, tensor<192x192xf32>) -> tensor<192x192xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %sum = stablehlo.reduce(%b init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<192x192xf32>, tensor<f32>) -> tensor<f32>
    return %sum : tensor<f32>
  }
}
"""
#: Hands ``x`` on when the callback, which is told the key, returns.
_HELD = b"""
module @held {
  func.func public @main(%x: tensor<f32>, %key: tensor<i32>) -> tensor<f32> {
    %y = stablehlo.custom_call @xla_ffi_python_cpu_callback(%x, %key) {
      api_version = 4 : i32, backend_config = {index = 0 : ui64}, has_side_effect = true
    } : (tensor<f32>, tensor<i32>) -> tensor<f32>
    return %y : tensor<f32>
  }
}
"""
_SLOW_SHAPE = (192, 192)
#: On a machine so busy that the argument is always there before its reader is launched, programs run in the launch.
_MAX_ATTEMPTS = 100


class Gate:
    """Gates of one device. One thread at a time shuts them.

    Args:
        client, device: of a CPU world.
        sharding: of arrays on the device.
    """

    def __init__(self, client: pjrt.Client, device: pjrt.Device, sharding: pjrt.Sharding) -> None:
        devices, options = pjrt.device_list([device]), pjrt.single_device_options(device)
        self._place = (sharding, [device])
        self._slow = pjrt.compile_program(client, mlir.as_bytecode(_SLOW), devices, options)
        self._held = pjrt.compile_program(client, mlir.as_bytecode(_HELD), devices, options, [self._hold])
        self._handlers = [pjrt.result_handler(SHAPE, DTYPE, sharding)]
        self._zeros = pjrt.put([np.zeros(_SLOW_SHAPE, DTYPE)], *self._place)
        self._keys = itertools.count()
        self._shut: dict[int, threading.Event] = {}
        self._launching_thread = 0

    def shut(self) -> tuple[pjrt.Array, Callable[[], None]]:
        """An argument that is not there before the function that comes with it is called, which must be."""
        for _ in range(_MAX_ATTEMPTS):
            key = next(self._keys)
            opened = self._shut[key] = threading.Event()
            (slow,), _ = pjrt.execute(self._slow, [self._zeros], self._handlers, 0)
            self._launching_thread = threading.get_ident()
            (held,), _ = pjrt.execute(
                self._held, [slow, pjrt.put([np.array(key, _KEY)], *self._place)], self._handlers, 0
            )
            self._launching_thread = 0
            if not opened.is_set():
                break
        return held, opened.set

    def _hold(self, x: Any, key: Any) -> tuple[Any]:
        opened = self._shut.pop(int(key))
        if threading.get_ident() == self._launching_thread:
            # It runs in the launch, and who would open it waits for that.
            opened.set()
        opened.wait()
        return (x,)
