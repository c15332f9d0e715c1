"""By which names JAX finds the proxy's backend. In a process of its own, with a stand-in for the backend."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import jax
from jax._src import xla_bridge
from slurm_pathways.client.jax_platforms import know_by_platform

know_by_platform()
know_by_platform()
platform, raw = sys.argv[1:]
proxy = type("Proxy", (), {"platform": platform, "runtime_type": "proxy/pathways", "_raw_platform": raw})()
found = {"proxy": proxy, "cpu": xla_bridge.backends()["cpu"]}
xla_bridge.backends = lambda: found

def ask(function, name):
    try:
        answer = function(name)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return answer if isinstance(answer, str) else [key for key, value in found.items() if value is answer]

names = ("gpu", "cuda", "rocm", "tpu", "cpu")
print(json.dumps({
    "canonical": {name: ask(xla_bridge.canonicalize_platform, name) for name in names},
    "backend": {name: ask(xla_bridge.get_backend, name) for name in names},
    "itself": ask(xla_bridge.get_backend, proxy),
}))
"""
NO_GPU = "Unknown backend: 'gpu' requested, but no platforms that are instances of gpu are present"


@pytest.mark.parametrize(
    ("platform", "raw", "canonical_gpu", "backends"),
    [
        ("gpu", "cuda", "cuda", {"gpu": ["proxy"], "cuda": ["proxy"]}),
        ("tpu", "tpu", NO_GPU, {"tpu": ["proxy"]}),
        # The program's own CPU devices keep the name that is theirs.
        ("cpu", "cpu", NO_GPU, {}),
    ],
)
def test_by_what_the_devices_are(platform: str, raw: str, canonical_gpu: str, backends: dict[str, list[str]]) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, platform, raw],
        env={**environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    others = {"cuda": "cuda", "rocm": "rocm", "tpu": "tpu", "cpu": "cpu"}
    assert seen["canonical"] == {"gpu": canonical_gpu, **others}
    unknown = {name: f"Unknown backend {name}" for name in ("cuda", "rocm", "tpu")}
    assert seen["backend"] == {"gpu": NO_GPU, **unknown, "cpu": ["cpu"], **backends}
    assert seen["itself"] == ["proxy"]
