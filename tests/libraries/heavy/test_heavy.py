"""Libraries that are large, or whose checks take long: a process each, on the runtime and on plain JAX."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from client_programs import plain_environment
from running import RunChecks, assert_same

from slurm_pathways.launch.local import LocalRuntime

GPT = Path(__file__).parents[3] / "examples" / "gpt" / "train.py"

pytestmark = pytest.mark.timeout(1800)


#: ``torchax`` and ``tunix`` come with ``[libraries-heavy]``, the others with ``[libraries]``.
@pytest.mark.parametrize("library", ["orbax_colocated", "haiku", "numpyro", "diffrax", "torchax", "tunix"])
def test_library(checks_here: RunChecks, checks_on_plain_jax: RunChecks, library: str) -> None:
    plain = checks_on_plain_jax(library, timeout_s=800)
    assert_same(checks_here(library, timeout_s=800)[library], plain[library])


def test_a_gpt_over_both_slices(library_runtime: LocalRuntime, tmp_path: Path) -> None:
    def losses(environ: Mapping[str, str], name: str) -> list[float]:
        found = tmp_path / name
        subprocess.run(
            [sys.executable, GPT, "--steps", "6", "--losses", found], env=dict(environ), check=True, timeout=800
        )
        return json.loads(found.read_text())

    here = losses(library_runtime.environment(), "here")
    assert here == pytest.approx(losses(plain_environment(), "plain"), rel=1e-5)
    assert here[-1] < here[0] - 1


#: What TensorBoard's profile plugin does when a trace is opened: of one file, and of all together.
XPROF = """
import json, sys
from xprof.convert import raw_to_tool_data as convert
events, _ = convert.xspace_to_tool_data([sys.argv[1]], "trace_viewer", {})
overview, _ = convert.xspace_to_tool_data(sys.argv[1:], "overview_page", {})
names = [event.get("name", "") for event in json.loads(events)["traceEvents"]]
print(json.dumps([any("Execute" in name for name in names), bool(overview)]))
"""


def test_tensorboards_profile_plugin_opens_a_trace(checks_here: RunChecks, tmp_path: Path) -> None:
    checks_here("profiler", CHECKS_TRACE_FOLDER=str(tmp_path))
    files = sorted(tmp_path.rglob("*.xplane.pb"), key=lambda path: path.name != "host-1.xplane.pb")
    assert len(files) == 5
    command = [sys.executable, "-c", XPROF, *files]
    opened = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert opened.returncode == 0, opened.stderr
    assert json.loads(opened.stdout.splitlines()[-1]) == [True, True]
