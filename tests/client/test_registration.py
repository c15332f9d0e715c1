"""What importing JAX costs and does in an environment that has the plugin. Each case is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Variables that decide what the plugin does; a test starts without any.
_DECIDING = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", "XLA_FLAGS")


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in _DECIDING}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_program_that_does_not_ask_is_left_alone() -> None:
    result = run(
        "import sys, os, jax\n"
        "print(jax.devices()[0].platform, jax.jit(lambda x: x + 1)(1))\n"
        "print([m for m in sys.modules if m.startswith('slurm_pathways.client')])\n"
        "print('IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS' in os.environ)\n"
        "print(jax.config.jax_enable_compilation_cache)",
        JAX_PLATFORMS="cpu",
    )
    assert result.stdout.splitlines() == ["cpu 2", "[]", "False", "True"]
    assert result.stderr == ""


def test_the_plugin_module_itself_imports_nothing() -> None:
    result = run(
        "import sys\nimport slurm_pathways.jax_plugin as plugin\nplugin.initialize()\n"
        "print(any(m == 'jax' or m.startswith('jax.') for m in sys.modules))"
    )
    assert result.stdout.strip() == "False", result.stderr


def test_no_target() -> None:
    result = run("import jax; jax.devices()", JAX_PLATFORMS="proxy")
    assert result.returncode == 1
    assert "JAX_BACKEND_TARGET is not set" in result.stderr
    assert "slurm-pathways run" in result.stderr


@pytest.mark.parametrize("pathwaysutils", ["", "import pathwaysutils; pathwaysutils.initialize()\n"])
def test_nobody_answers(tmp_path: Path, pathwaysutils: str) -> None:
    socket_path = tmp_path / "Proxy.sock"
    result = run(
        f"import jax, time\n{pathwaysutils}start = time.monotonic()\n"
        "try:\n    jax.devices()\nfinally:\n    print(time.monotonic() - start)",
        JAX_PLATFORMS="proxy,cpu",
        JAX_BACKEND_TARGET=f"grpc://unix:{socket_path}",
        SLURM_PATHWAYS_CONNECT_TIMEOUT_S="1",
    )
    assert result.returncode == 1
    assert 0.9 < float(result.stdout) < 10
    assert f"No Slurm Pathways runtime answered at grpc://unix:{socket_path} within 1 s" in result.stderr


def test_later_registrations_of_an_initialized_backend_are_left_out() -> None:
    """What pathwaysutils.initialize() does when the program has looked at its devices before."""
    result = run(
        "import jax\n"
        "from jax.extend import backend\n"
        "from slurm_pathways.client import jax_adapter\n"
        "made = []\n"
        "def cpu():\n"
        "    made.append(1)\n"
        "    return __import__('jaxlib.xla_client').xla_client.make_cpu_client()\n"
        "jax_adapter.register_backend('mine', cpu)\n"
        "jax_adapter.register_backend('mine', cpu)\n"
        "jax.config.update('jax_platforms', 'mine')\n"
        "jax.devices()\n"
        "backend.register_backend_factory('mine', None, priority=-1)\n"
        "print(jax.devices()[0].platform, len(made))",
    )
    assert result.stdout.strip() == "cpu 1", result.stderr
