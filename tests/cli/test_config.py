import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from slurm_pathways.config import (
    OTHER_VARIABLES,
    SETTINGS,
    TEST_VARIABLE_PREFIX,
    ConfigurationError,
    Kind,
    RuntimeSpec,
    gather,
    resolve,
    settings_table,
)

ROOT = Path(__file__).parents[2]


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_every_field_has_one_setting() -> None:
    assert sorted(setting.field for setting in SETTINGS) == sorted(f.name for f in dataclasses.fields(RuntimeSpec))


def test_defaults() -> None:
    assert resolve({}, {}) == RuntimeSpec()


def test_option_before_environment_before_file_before_default(tmp_path: Path) -> None:
    path = _file(tmp_path, "slices: 2\nhosts_per_slice: 2\ndevices_per_host: 2\n")
    environ = {"SLURM_PATHWAYS_SLICES": "3", "SLURM_PATHWAYS_HOSTS_PER_SLICE": "3"}
    spec = resolve({"slices": "4", "hosts_per_slice": None}, environ, path)
    assert (spec.num_slices, spec.hosts_per_slice, spec.devices_per_host, spec.num_spares) == (4, 3, 2, 0)


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "keep_logs: true\nfailure_grace_s: 2.5\ncompile_cache: ~/cache\n")
    spec = resolve({}, {"SLURM_PATHWAYS_CONFIG": str(path)})
    assert spec == RuntimeSpec(keep_logs=True, failure_grace_s=2.5, compile_cache_dir=Path("~/cache").expanduser())
    assert resolve({"keep_logs": False}, {"SLURM_PATHWAYS_CONFIG": str(path)}).keep_logs is False


@pytest.mark.parametrize(
    ("options", "environ", "text", "words"),
    [
        ({"slices": "0"}, {}, "", "--slices 0: slices must be a whole number from 1 to 4096"),
        ({"slices": "two"}, {}, "", "--slices two: slices must be a whole number from 1 to 4096"),
        (
            {},
            {"SLURM_PATHWAYS_SPARES": "-1"},
            "",
            "SLURM_PATHWAYS_SPARES=-1: spares must be a whole number from 0 to 4096",
        ),
        ({}, {}, "devices_per_host: 1000", "devices_per_host must be a whole number from 1 to 128"),
        ({}, {}, "slices: true", "slices: True in .*settings.yaml: slices must be a whole number"),
        ({}, {}, "slices: 1.5", "slices must be a whole number"),
        ({"startup_timeout_s": "nan"}, {}, "", "must be a number of seconds from 1 to 3600"),
        ({"platform": "tpu"}, {}, "", "--platform tpu: platform must be one of cpu, cuda in this version"),
        ({"platform": ["cpu"]}, {}, "", "platform must be one of cpu, cuda"),
        ({}, {"SLURM_PATHWAYS_KEEP_LOGS": "maybe"}, "", "keep_logs must be true or false"),
        ({"run_dir": ""}, {}, "", "run_dir must be the path of a folder"),
        ({}, {}, "slice: 2", r"unknown key 'slice' in .*\(did you mean slices\?\); valid are: slices, hosts_per_slice"),
        ({}, {}, "7: 2", "unknown key 7 in "),
        (
            {},
            {"SLURM_PATHWAYS_SLICE": "2"},
            "",
            r"unknown variable SLURM_PATHWAYS_SLICE .*mean SLURM_PATHWAYS_SLICES\?",
        ),
        ({}, {}, "- a list", "must hold lines like 'slices: 2'"),
        ({}, {}, "slices: [", "is not YAML"),
        ({"slices": 9, "hosts_per_slice": 8}, {}, "", "are 72 hosts; at most 64 run on one machine"),
        ({"slices": 64, "hosts_per_slice": 65}, {}, "", "are 4160 hosts; at most 4096 are allowed: ask for fewer"),
        ({"slice_by": "rack"}, {}, "", "slice_by must be one of order, topology, feature, gres"),
        ({"data_plane_encryption": "ssl"}, {}, "", "data_plane_encryption must be one of tls, none"),
        ({}, {}, "interface: 10", "interface: 10 in .*: interface must be an interface's name, like ib0, or a network"),
        ({"interface": "10.0.0.0/33"}, {}, "", "--interface 10.0.0.0/33: interface must be"),
        ({"interface": "ib 0"}, {}, "", "--interface ib 0: interface must be"),
        ({"interface": "a-name-of-16-byt"}, {}, "", "interface must be"),
    ],
)
def test_what_is_wrong_is_said(
    options: dict[str, object], environ: dict[str, str], text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve(options, environ, _file(tmp_path, text))


def test_an_allocation_may_have_more_hosts_than_one_machine_carries() -> None:
    assert RuntimeSpec(**gather({"slices": "512", "hosts_per_slice": "4"}, {})).num_hosts == 2048


@pytest.mark.parametrize("interface", ["ib0", "eth0.100", "10.0.0.0/8", "10.1.2.3/8", "fd00::/8"])
def test_interfaces_and_networks(interface: str) -> None:
    assert resolve({"interface": interface}, {}).interface == interface


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no-such\.yaml cannot be read: No such file or directory"):
        resolve({}, {}, tmp_path / "no-such.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="it is not UTF-8 text"):
        resolve({}, {}, tmp_path / "binary")


def test_a_spec_checks_itself() -> None:
    with pytest.raises(ConfigurationError, match="num_slices=0: slices must be"):
        RuntimeSpec(num_slices=0)


def test_the_docs_show_the_settings_as_they_are() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert settings_table() in text, "put slurm_pathways.config.settings_table() into docs/configuration.md"
    for name in OTHER_VARIABLES:
        assert f"`{name}`" in text


def test_every_variable_that_the_code_reads_is_known() -> None:
    """A variable with our prefix that is no setting stops a run as misspelt, so each must be registered."""
    known = {setting.variable for setting in SETTINGS} | set(OTHER_VARIABLES)
    named = subprocess.run(
        ["git", "grep", "-hoE", r"SLURM_PATHWAYS_[A-Z_]*[A-Z]", "--", "runtime", "slurm_pathways"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    variables = {name for name in named.stdout.split() if not name.startswith(TEST_VARIABLE_PREFIX)}
    assert variables - {TEST_VARIABLE_PREFIX.rstrip("_")} <= known


def test_keys_options_and_variables_are_one_name() -> None:
    for setting in SETTINGS:
        assert re.fullmatch(r"[a-z_]+", setting.key)
        assert setting.option == "--" + setting.key.replace("_", "-")
        assert setting.kind is not Kind.CHOICE or setting.choices
