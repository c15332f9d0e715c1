"""What is shipped: run by ``make test``, which gives the folder of the wheel that it has installed (``--wheel``)."""

import importlib.metadata
import tarfile
import zipfile
from pathlib import Path

import pytest

import pathways_runtime
import slurm_pathways
from slurm_pathways.supported import TESTED_PYTHONS, numbers

ROOT = Path(__file__).parents[2]
#: Folders of the tree, and where the wheel has what is in them.
SHIPPED = {
    "runtime/pathways_runtime": "pathways_runtime",
    "slurm_pathways": "slurm_pathways",
    "sbatch_templates": "slurm_pathways/sbatch_templates",
}
#: Made from C; make test sees to a compiler.
LIBRARY = "pathways_runtime/worker/_private_sockets.abi3.so"


@pytest.fixture
def dist(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--wheel")
    if folder is None:
        pytest.skip("needs --wheel DIR: make test gives it")
    return Path(folder)


def files_of_tree() -> set[str]:
    found = set()
    for folder, name in SHIPPED.items():
        for path in (ROOT / folder).rglob("*"):
            # An editable installation puts the library into the tree.
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                found.add(f"{name}/{path.relative_to(ROOT / folder)}")
    return found


def test_the_wheel_has_every_file_of_the_packages(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped == files_of_tree() | {LIBRARY}
    assert {
        "pathways_runtime/py.typed",
        "slurm_pathways/py.typed",
        "slurm_pathways/sbatch_templates/__init__.py",
    } <= shipped
    assert any(name.startswith("pathways_runtime/wire/gen/") for name in shipped)


def test_the_wheel_names_the_command_the_plugin_and_the_license(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        by_name = {
            name.partition(".dist-info/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "slurm-pathways = slurm_pathways.cli.main:main" in by_name["entry_points.txt"]
    assert "slurm_pathways = slurm_pathways.jax_plugin" in by_name["entry_points.txt"]
    assert by_name["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0" in by_name["METADATA"]


def test_the_sdist_has_what_the_wheel_is_built_from(dist: Path) -> None:
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder, name in SHIPPED.items():
        for path in files_of_tree():
            if path.startswith(f"{name}/") and not path.startswith("slurm_pathways/sbatch_templates/"):
                assert f"{folder}/{path.removeprefix(f'{name}/')}" in names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py"} <= names
    assert {f"runtime/native/{path.name}" for path in (ROOT / "runtime/native").glob("*.[ch]")} <= names


def test_one_wheel_serves_all_pythons_that_are_supported(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]
    assert min(TESTED_PYTHONS, key=numbers) == "3.11"


def test_what_is_tested_is_what_was_installed(dist: Path) -> None:
    for package in (pathways_runtime, slurm_pathways):
        assert package.__file__ is not None
        assert not Path(package.__file__).is_relative_to(ROOT / "slurm_pathways"), "the tree is tested, not the wheel"
        assert not Path(package.__file__).is_relative_to(ROOT / "runtime"), "the tree is tested, not the wheel"
    assert slurm_pathways.__version__ == importlib.metadata.version("slurm-pathways")
