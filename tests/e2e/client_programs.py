"""Runs programs as a user's: in a process of their own, with the environment of a run or of plain JAX."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent

#: What chooses a backend; a test says itself what it wants.
_CHOOSING = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS")


def plain_environment(num_devices: int = 8) -> dict[str, str]:
    """Plain JAX on CPU devices of one process: what the runtime is compared to."""
    environ = {name: value for name, value in os.environ.items() if name not in _CHOOSING}
    return environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        # In flight together on a small machine, programs over several devices can wait in plain JAX for one another for
        # ever: each keeps threads that the others need of the one pool, whose size this is.
        "NPROC": "64",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    }


def run_program(
    environ: Mapping[str, str], *arguments: object, timeout_s: float = 120, cwd: Path = HERE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments``, in this folder unless another is given.

    Raises:
        AssertionError: it failed, or took longer; with what it printed.
    """
    command = [sys.executable, *map(str, arguments)]
    try:
        result = subprocess.run(
            command,
            env={**environ, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{command} took more than {timeout_s} s: {late.stdout!r} {late.stderr!r}") from late
    assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return result


def answer_of(environ: Mapping[str, str], program: str, *arguments: object, timeout_s: float = 120) -> Any:
    """The JSON value in the last line that ``programs/<program>.py`` prints."""
    result = run_program(environ, "-m", f"programs.{program}", *arguments, timeout_s=timeout_s)
    return json.loads(result.stdout.splitlines()[-1])


def answers_of_both(environ: Mapping[str, str], program: str, *, timeout_s: float = 120) -> tuple[Any, Any]:
    """What ``programs/<program>.py`` answers in plain JAX, and in ``environ``."""
    plain = answer_of(plain_environment(), program, timeout_s=timeout_s)
    return plain, answer_of(environ, program, timeout_s=timeout_s)
