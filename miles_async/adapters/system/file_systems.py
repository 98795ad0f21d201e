"""Which file system a path is on.

SQLite's write-ahead log and `fsync` behave differently on network file systems, so a store needs to recognize them.
"""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""The mounted file systems as Linux lists them (proc_pid_mountinfo(5))."""
_NETWORK = re.compile(
    r"nfs\d*|cifs|smb\w*|lustre|gpfs|beegfs|ceph|glusterfs|9p|afs|orangefs|panfs|pvfs2|wekafs|virtiofs|fuse(\..+)?"
)
"""Types of file systems that other machines may share. FUSE carries many of them, such as `fuse.sshfs`."""


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that holds `path`, such as `ext4`; empty if it is unknown.

    `mounts` is a file in the format of `/proc/self/mountinfo`. Returns an empty text if that file cannot be read.
    """
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found, depth = "", -1
    path = path.resolve()
    for line in lines:
        # The type follows a hyphen; the number of optional fields before the hyphen varies.
        before, _, after = line.partition(" - ")
        mount_point, kind = before.split()[4:5], after.split()[:1]
        if not (mount_point and kind):
            continue
        mounted_at = Path(_unescape(mount_point[0]))
        # A later mount hides an earlier one at the same place.
        if path.is_relative_to(mounted_at) and len(mounted_at.parts) >= depth:
            found, depth = kind[0], len(mounted_at.parts)
    return found


def is_network_file_system(kind: str) -> bool:
    """Whether other machines may share a file system of this type (see `file_system`)."""
    return _NETWORK.fullmatch(kind) is not None


def _unescape(text: str) -> str:
    """Replace the octal escapes that stand for spaces, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
