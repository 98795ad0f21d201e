"""The token and the folder of a Ray that a run starts: for this user alone, and refused if somebody else made them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from miles_async.adapters.ray.private_files import (
    LONGEST_ADDRESS,
    keep_logs,
    make_private_folder,
    protect_token,
)
from miles_async.errors import UserError

LONGEST_SESSION = "ray/session_2026-11-24_10-03-33_123456_4194304/sockets/plasma_store"


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_token_is_readable_by_its_user_alone(token: Path) -> None:
    previous = os.umask(0)
    try:
        protect_token()
    finally:
        os.umask(previous)
    assert (mode_of(token), mode_of(token.parent)) == (0o600, 0o700)
    assert len(bytes.fromhex(token.read_text())) == 32


def test_a_token_that_exists_stays_what_it_is(token: Path) -> None:
    protect_token()
    before = token.read_text()
    protect_token()
    assert token.read_text() == before


def test_a_token_that_others_could_read_is_closed_to_them_with_a_warning(token: Path) -> None:
    token.parent.mkdir(mode=0o755)
    token.write_text("chosen")
    token.chmod(0o644)
    with capture_logs() as lines:
        protect_token()
    assert (mode_of(token), mode_of(token.parent), token.read_text()) == (0o600, 0o700, "chosen")
    assert [line["log_level"] for line in lines] == ["warning"]


def test_a_link_in_place_of_the_token_is_refused(token: Path, tmp_path: Path) -> None:
    token.parent.mkdir()
    (tmp_path / "elsewhere").write_text("known to others")
    token.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="ordinary file"):
        protect_token()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("given_away", ["folder", "file"])
def test_a_token_of_another_user_is_refused(token: Path, given_away: str) -> None:
    protect_token()
    os.chown(token if given_away == "file" else token.parent, 65534, 65534)
    with pytest.raises(UserError, match="another user"):
        protect_token()


@pytest.mark.parametrize(
    "name, value",
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "chosen"), ("RAY_AUTH_TOKEN_PATH", "/somewhere/else")],
)
def test_a_token_that_the_user_chose_elsewhere_is_left_alone(
    token: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    protect_token()
    assert not token.exists()


def test_the_folder_is_private_and_short_enough_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    folder = make_private_folder()
    try:
        assert mode_of(folder) == 0o700
        assert len(f"{folder}/{LONGEST_SESSION}") <= LONGEST_ADDRESS
    finally:
        folder.rmdir()


def test_the_folder_is_where_the_user_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path if len(str(tmp_path)) < 20 else Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    folder = make_private_folder()
    folder.rmdir()
    assert folder.parent == short


@pytest.mark.parametrize("chosen, sentence", [("/x" * 40, "at most 26 bytes"), ("/no/such/folder", "that exists")])
def test_a_folder_that_cannot_be_used_is_refused(chosen: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", chosen)
    with pytest.raises(UserError, match=sentence):
        make_private_folder()


def test_the_logs_of_ray_stay_in_the_run_folder(tmp_path: Path) -> None:
    ray, link = tmp_path / "ray-1", tmp_path / "logs" / "ray"
    (ray / "session" / "logs").mkdir(parents=True)
    (ray / "session" / "logs" / "raylet.out").write_text("started")
    link.parent.mkdir()
    link.symlink_to(ray / "session" / "logs")
    keep_logs(ray, link)
    assert (link / "raylet.out").read_text() == "started"
    assert not link.is_symlink()
    assert not ray.exists()
