import configparser
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Import name to folder, for the packages whose folder is not their name.
MOVED = {"pathways_runtime": "runtime/pathways_runtime", "slurm_pathways.sbatch_templates": "sbatch_templates"}


def packages_of_tree() -> set[str]:
    """The import names of all folders that are packages."""
    found = set()
    for name in ("pathways_runtime", "slurm_pathways", "slurm_pathways.sbatch_templates"):
        folder = ROOT / MOVED.get(name, name)
        for init in folder.rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(folder).parts]))
    return found


def test_setup_cfg_lists_the_packages_of_the_tree() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    assert listed == sorted(set(listed))
    assert set(listed) == packages_of_tree()


def test_every_folder_of_modules_is_a_package() -> None:
    for top in ("runtime/pathways_runtime", "slurm_pathways", "sbatch_templates"):
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has modules and no __init__.py"


def test_the_license_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n                           Version 2.0, January 2004")
    assert "9. Accepting Warranty or Additional Liability." in text
    assert "END OF TERMS AND CONDITIONS" in text
