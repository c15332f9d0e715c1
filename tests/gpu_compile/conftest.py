"""Tests for which JAX's plugin for CUDA must be installed: ``make test-gpu-compile``. Elsewhere there are none."""

from importlib.util import find_spec

collect_ignore_glob = ["test_*.py"] if find_spec("jax_cuda12_plugin") is None else []
