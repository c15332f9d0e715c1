"""What the environment says about the connection, and what the user is told when it fails."""

from pathlib import Path

import pytest

from slurm_pathways.client.connection import (
    CREDENTIALS_VARIABLE,
    DEFAULT_TIMEOUT_S,
    PATHWAYSUTILS_TIMEOUT_VARIABLE,
    TIMEOUT_VARIABLE,
    ConnectionSettings,
    ConnectionSettingsError,
    allow_plaintext,
    explain_failure,
    read_settings,
)

PLAINTEXT = {CREDENTIALS_VARIABLE: "true"}
TARGET = "grpc://unix:/run/proxy.sock"


def test_a_missing_target_says_how_to_get_one() -> None:
    with pytest.raises(ConnectionSettingsError, match=r"JAX_BACKEND_TARGET is not set.*slurm-pathways run"):
        read_settings(None, dict(PLAINTEXT))


def test_defaults() -> None:
    assert read_settings(TARGET, dict(PLAINTEXT)) == ConnectionSettings(TARGET, DEFAULT_TIMEOUT_S, None)


@pytest.mark.parametrize(
    ("variables", "timeout_s"),
    [
        ({TIMEOUT_VARIABLE: "5"}, 5),
        ({TIMEOUT_VARIABLE: "0.2"}, 1),
        ({PATHWAYSUTILS_TIMEOUT_VARIABLE: "7"}, 7),
        ({TIMEOUT_VARIABLE: "5", PATHWAYSUTILS_TIMEOUT_VARIABLE: "7"}, 5),
        ({TIMEOUT_VARIABLE: ""}, DEFAULT_TIMEOUT_S),
    ],
)
def test_timeout(variables: dict[str, str], timeout_s: int) -> None:
    assert read_settings(TARGET, PLAINTEXT | variables).timeout_s == timeout_s


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "1e9"])
def test_a_wrong_timeout_names_its_variable(text: str) -> None:
    with pytest.raises(ConnectionSettingsError, match=rf"{TIMEOUT_VARIABLE}={text}: must be a number of seconds"):
        read_settings(TARGET, PLAINTEXT | {TIMEOUT_VARIABLE: text})


def test_plaintext_is_allowed_unless_the_user_has_said_something() -> None:
    environ: dict[str, str] = {}
    allow_plaintext(environ)
    assert environ == PLAINTEXT
    environ = {CREDENTIALS_VARIABLE: "1"}
    allow_plaintext(environ)
    assert environ == {CREDENTIALS_VARIABLE: "1"}
    with pytest.raises(ConnectionSettingsError, match=rf"{CREDENTIALS_VARIABLE}='1'.*exactly 'true'"):
        read_settings(TARGET, environ)


def test_a_failure_names_the_address_and_the_logs(tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    settings = ConnectionSettings(f"grpc://unix:{socket_path}", 3, "/runs/17")
    text = explain_failure(settings, "UNAVAILABLE: nobody")
    assert f"answered at grpc://unix:{socket_path} within 3 s" in text
    assert f"no socket at {socket_path}" in text
    assert "slurm-pathways status --run /runs/17" in text
    assert "/runs/17/logs" in text
    assert "UNAVAILABLE: nobody" in text
    socket_path.touch()
    assert "no socket" not in explain_failure(settings, "")


def test_a_failure_outside_a_run_says_how_to_start_one() -> None:
    text = explain_failure(ConnectionSettings("grpc://localhost:29000", 30, None), "x")
    assert "slurm-pathways run ... -- python program.py" in text
    assert "no socket" not in text
