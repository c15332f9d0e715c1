"""``slurm-pathways doctor`` in an allocation of a real cluster."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox

COMMAND = Path(sys.executable).with_name("slurm-pathways")
TIMEOUT_S = 60.0

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]


def doctor(sandbox: Sandbox, folder: Path) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code and the findings by subject, of one that is started in ``folder``."""
    salloc = ["salloc", "--quiet", "--nodes=2", str(COMMAND), "doctor", "--json"]
    script = f"mkdir -p {shlex.quote(str(folder))} && cd {shlex.quote(str(folder))} && exec {shlex.join(salloc)}"
    done = sandbox.run(["sh", "-c", script], TIMEOUT_S)
    assert done.stdout, done.stderr
    return done.returncode, {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_an_allocation_that_is_well(sandbox: Sandbox, tmp_path: Path) -> None:
    code, found = doctor(sandbox, tmp_path)
    assert code == 0
    assert found["Slurm"]["found"].startswith("22.05.")
    assert found["allocation"]["found"].endswith("on 2 nodes, node[0-1]")
    # Under the name by which the command was installed.
    python = re.escape(str(Path(sys.executable).parent))
    assert re.fullmatch(rf"all 2 start steps, and see {python}/python\S* and {tmp_path}", found["nodes"]["found"])
    assert found["SPANK plugin"]["found"].startswith("not here;")


def test_a_folder_that_only_the_login_has(sandbox: Sandbox) -> None:
    folder = sandbox.local_dir / "the login's"
    code, found = doctor(sandbox, folder)
    assert code == 1
    assert found["nodes"]["level"] == "error"
    assert found["nodes"]["found"] == f"no folder {folder} on node[0-1]"
