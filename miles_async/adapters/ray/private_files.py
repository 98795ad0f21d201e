"""Keeps the token and the sockets of a Ray that this run starts from the other users of the machine.

Everyone who reads the token, or replaces one of the sockets, can run code as the user. Ray itself writes the token with
the file mode 0644, and its folder and the folders of its sockets with the mode 0777.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import structlog

from miles_async.errors import UserError

LONGEST_ADDRESS = 107
"""Bytes of the path of a Unix socket on Linux, without the zero at its end."""
_SOCKET_OF_RAY = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Ray's longest path below the private folder: the session has a time and the process id of the driver."""
_PREFIX = "ray-"
_RANDOM_CHARACTERS = 8
"""Characters that `tempfile.mkdtemp` appends to the prefix."""

log = structlog.get_logger(__name__)


def make_private_folder() -> Path:
    """Make a folder that only this user can enter; Ray opens its own folder, `ray` in it, to everyone.

    It is in `RAY_TMPDIR` if that is set, or else in the temporary folder of the user, or in `/tmp` if the paths of the
    sockets would become too long there. Raises UserError if they are too long in `RAY_TMPDIR`.
    """
    chosen = os.environ.get("RAY_TMPDIR")
    longest = LONGEST_ADDRESS - len(_SOCKET_OF_RAY) - len(f"/{_PREFIX}") - _RANDOM_CHARACTERS
    parent = os.path.abspath(chosen or tempfile.gettempdir())
    if len(os.fsencode(parent)) > longest:
        if chosen:
            raise UserError(
                f"RAY_TMPDIR is {chosen}, and Ray cannot open sockets there because their paths would have more than "
                f"{LONGEST_ADDRESS} bytes: choose a folder whose path has at most {longest} bytes"
            )
        parent = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise UserError(f"cannot make a folder for Ray: {error}. Set RAY_TMPDIR to a folder that exists") from error


def keep_logs(private_folder: Path, link: Path) -> None:
    """Move Ray's logs to the place of `link`, which points to them, and remove the folder. All of Ray has ended.

    If the logs cannot be moved, for example because the disk is full, the folder stays.
    """
    with suppress(OSError):
        logs = link.resolve(strict=True)
        moved = link.with_name(f"{link.name}.tmp")
        shutil.copytree(logs, moved, symlinks=True)
        link.unlink()
        moved.rename(link)
        shutil.rmtree(private_folder)


def protect_token() -> None:
    """Make sure that Ray finds a token, and that no other user of the machine can read it.

    Does nothing if the user's environment names another token, or turns tokens off. Raises UserError if the file is not
    an ordinary file of this user.
    """
    chosen = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}.intersection(os.environ)
    if chosen or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_others(path.parent, path.parent.stat())
        path.parent.chmod(0o700)
        # The file is never open to others, not even before its mode is set.
        token = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(token)
            _refuse_others(path, status)
            if status.st_mode & 0o077:
                os.fchmod(token, 0o600)
                log.warning(
                    "other users of this machine could read the token of Ray until now: delete the file while none of "
                    "your Ray clusters is running, and the next run makes another token",
                    file=str(path),
                )
            if not status.st_size:
                os.write(token, secrets.token_hex(32).encode())
        finally:
            os.close(token)
    except OSError as error:
        sentence = f"cannot keep the token of Ray in {path}: {error}. Make it an ordinary file of yours"
        raise UserError(sentence) from error


def _refuse_others(path: Path, status: os.stat_result) -> None:
    """Raises UserError if the file or folder belongs to another user, or is something else."""
    ordinary = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    if status.st_uid != os.geteuid() or not ordinary:
        raise UserError(f"{path} belongs to another user or is not an ordinary file: remove it")
