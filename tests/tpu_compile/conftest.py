"""Tests for which libtpu must be installed: ``make test-tpu-compile``. Elsewhere there are none of them."""

from importlib.util import find_spec

collect_ignore_glob = ["test_*.py"] if find_spec("libtpu") is None else []
