"""One checksum for everything that this project verifies: recordings, rollout files and the identity of checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def checksum(chunks: Iterable[bytes]) -> str:
    """Return the BLAKE2b checksum of the concatenated chunks: 16 bytes as 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def file_chunks(path: Path) -> Iterator[bytes]:
    """Read a file in chunks of 1 MiB. Raises OSError."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
