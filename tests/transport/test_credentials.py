"""Credentials: who can read them, what they survive, and what they never show."""

import stat
from pathlib import Path

import pytest

from pathways_runtime.transport.credentials import Credentials, CredentialsError


def test_only_the_user_can_read_them(tmp_path: Path) -> None:
    Credentials.create(tmp_path / "c")
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()] == [0o600]


def test_a_folder_and_a_text_carry_the_same(tmp_path: Path) -> None:
    made = Credentials.create(tmp_path / "c")
    assert Credentials.load(tmp_path / "c") == made
    assert Credentials.from_text(made.to_text()) == made
    assert made.to_text().isascii()


def test_two_jobs_share_nothing() -> None:
    one, other = Credentials.make(), Credentials.make()
    assert one.fingerprint() != other.fingerprint()
    assert one.derived_key("x") != other.derived_key("x")
    assert one.derived_key("x") != one.derived_key("y")
    assert one.derived_key("x") == Credentials.from_text(one.to_text()).derived_key("x")


def test_the_key_is_not_shown() -> None:
    made = Credentials.make()
    secret = made.key.splitlines()[1]
    assert secret not in repr(made) and secret not in f"{made}"
    broken = made.to_text().replace(secret, secret[::-1])
    with pytest.raises(CredentialsError) as raised:
        Credentials.from_text(broken)
    assert secret not in str(raised.value) and secret[::-1] not in str(raised.value)


def test_the_authoritys_key_is_dropped() -> None:
    assert Credentials.make().to_text().count("PRIVATE KEY-----") == 2


@pytest.mark.parametrize("text", ["", "hello", "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"])
def test_what_is_no_text_of_credentials_is_said(text: str) -> None:
    with pytest.raises(CredentialsError, match="two certificates and a private key"):
        Credentials.from_text(text)


def test_mixed_parts_are_refused() -> None:
    one, other = Credentials.make(), Credentials.make()
    with pytest.raises(CredentialsError, match="cannot be used"):
        Credentials.from_text(Credentials(one.authority, one.certificate, other.key).to_text())


def test_what_others_can_read_is_refused(tmp_path: Path) -> None:
    made = Credentials.create(tmp_path / "c")
    (tmp_path / "c" / "credentials.pem").chmod(0o640)
    with pytest.raises(CredentialsError, match=r"is open to others \(mode 640\)"):
        Credentials.load(tmp_path / "c")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(CredentialsError, match=r"folder .* is open to others"):
        made.save(tmp_path / "open")


def test_links_are_refused(tmp_path: Path) -> None:
    made = Credentials.create(tmp_path / "c")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    with pytest.raises(CredentialsError, match="is a link"):
        made.save(tmp_path / "link")


def test_a_jobs_credentials_are_written_once(tmp_path: Path) -> None:
    Credentials.create(tmp_path / "c")
    with pytest.raises(CredentialsError, match="written once"):
        Credentials.create(tmp_path / "c")


def test_missing_ones_are_said(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"no credentials in .*: No such file"):
        Credentials.load(tmp_path / "nowhere")
