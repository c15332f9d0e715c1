"""docker/: no daemon runs where the tests run, so the files are held against each other and against the renderer."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from slurm_pathways.cli.main import main
from slurm_pathways.sandbox.configuration import DATABASE, in_containers
from slurm_pathways.sandbox.spec import SandboxSpec

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
#: Services with an image of their own.
FOREIGN = {"database"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """compose.yaml, with its anchors resolved."""
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def test_every_service_has_a_role_that_the_entrypoint_knows(compose: dict[str, Any]) -> None:
    roles = set(re.findall(r"^(\w+)\)$", (DOCKER / "entrypoint").read_text(), re.MULTILINE))
    used = {service["command"] for name, service in compose["services"].items() if name not in FOREIGN}
    assert used == roles == {"key", "slurmdbd", "slurmctld", "node", "login"}


def test_services_are_called_what_the_configuration_calls_them(compose: dict[str, Any]) -> None:
    services = compose["services"]
    nodes = [name for name, service in services.items() if service["command"] == "node"]
    spec = SandboxSpec(num_nodes=len(nodes))
    cluster = in_containers(spec)
    assert tuple(nodes) == spec.nodes
    assert {cluster.controller, cluster.dbd_host, cluster.dbd_address, cluster.storage.host} <= set(services)
    for name in (*nodes, cluster.controller, cluster.dbd_host):
        # slurmd and slurmctld look themselves up by what their machine is called.
        assert services[name]["hostname"] == name
    count = str(len(nodes))
    assert services["node0"]["build"]["args"] == {"NODES": count}
    assert f"ARG NODES={count}\n" in DOCKERFILE


def test_the_database_is_the_one_that_slurmdbd_asks_for(compose: dict[str, Any]) -> None:
    environment = compose["services"]["database"]["environment"]
    storage = in_containers(SandboxSpec()).storage
    assert (environment["MARIADB_USER"], environment["MARIADB_PASSWORD"]) == (storage.user, storage.password)
    assert environment["MARIADB_DATABASE"] == DATABASE
    assert not any("ports" in service for service in compose["services"].values())


def test_what_services_wait_for_exists(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for name, wait in service.get("depends_on", {}).items():
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in services[name]
            else:
                assert (wait["condition"], services[name]["command"]) == ("service_completed_successfully", "key")
        named = {volume.split(":")[0] for volume in service["volumes"]} if "volumes" in service else set()
        assert named <= set(compose["volumes"])


def test_what_is_copied_into_the_image_is_in_the_tree_and_in_the_context() -> None:
    kept = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / path).exists() for path in kept)
    sources = [line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("COPY")]
    assert sources == ["slurm_pathways/sandbox/packages.py", ".", "docker/entrypoint"]
    assert all((ROOT / source).exists() for source in sources)
    packaged = {
        "slurm_pathways",
        "runtime",
        "sbatch_templates",
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
        "README.md",
        "LICENSE",
    }
    assert packaged <= kept


def test_the_list_of_packages_can_be_read_with_nothing_installed(tmp_path: Path) -> None:
    copied = (ROOT / "slurm_pathways" / "sandbox" / "packages.py").read_text()
    (tmp_path / "packages.py").write_text(copied)
    command = re.search(r"python3 -c '(.*)'", DOCKERFILE)
    assert command is not None
    done = subprocess.run(
        ["python3", "-S", "-c", command[1]],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"slurmctld", "slurmdbd", "munge"} <= set(done.stdout.split())


def test_the_entrypoint_is_a_script() -> None:
    entrypoint = DOCKER / "entrypoint"
    assert entrypoint.stat().st_mode & 0o111 == 0o111
    assert subprocess.run(["bash", "-n", entrypoint], capture_output=True, timeout=30).stderr == b""
    wrong = subprocess.run([entrypoint, "mayor"], capture_output=True, text=True, timeout=30)
    assert (wrong.returncode, wrong.stderr) == (2, "entrypoint: no such role: mayor\n")


def test_render_writes_what_an_image_needs(tmp_path: Path) -> None:
    target = tmp_path / "slurm"
    result = CliRunner().invoke(main, ["sandbox", "render", "--nodes", "2", str(target)], catch_exceptions=False)
    assert result.exit_code == 0
    assert sorted(path.name for path in target.iterdir()) == [
        *("gres.conf", "plugstack.conf", "plugstack.conf.d", "slurm.conf", "slurmdbd.conf", "topology.conf")
    ]
    assert (target / "slurmdbd.conf").stat().st_mode & 0o777 == 0o600
    assert "SlurmctldHost=slurmctld\n" in (target / "slurm.conf").read_text()
    assert "NodeName=node1 Port=6818 " in (target / "slurm.conf").read_text()
