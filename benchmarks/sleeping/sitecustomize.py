"""Gives XLA on CPU a program that takes a known time without using the processor: the custom call ``benchmark_sleep``.

Python imports this module when it starts, in every process that has this folder on PYTHONPATH: the workers of a runtime
and the processes of plain JAX alike. The target is registered when the process imports jaxlib, and never otherwise.
"""

import ctypes
import importlib.abc
import importlib.util
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TARGET = "benchmark_sleep"
#: ``(output, inputs, opaque, opaque length, status)``, XLA's "status returning, unified" calling convention.
_SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)
_WATCHED = "jaxlib.xla_client"


@_SIGNATURE
def _sleep(output: int, inputs: Any, opaque: int, opaque_length: int, status: int) -> None:
    """Sleeps for the input, a float32 in seconds, and returns it."""
    duration_s = ctypes.c_float.from_address(inputs[0]).value
    time.sleep(duration_s)
    ctypes.c_float.from_address(output).value = duration_s


class _RegisterAfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets jaxlib.xla_client be imported as ever and registers the target then."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        address = ctypes.cast(_sleep, ctypes.c_void_p)
        capsule = new_capsule(address, b"xla._CUSTOM_CALL_TARGET", None)
        register: Any = module.register_custom_call_target  # type: ignore[attr-defined]
        register(TARGET, capsule, platform="cpu", api_version=0)


sys.meta_path.insert(0, _RegisterAfterImport())
