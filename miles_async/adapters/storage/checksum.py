"""One checksum for all files that this project verifies: checkpoints, recordings, rollout files and the run store.

BLAKE2b of the standard library hashes 0.5 GB/s per thread (measured), and checkpoints are read by several threads, so
that most disks are slower. `hashlib.file_digest` is not used, because it calls no function for each chunk, by which a
long comparison shows that it makes progress.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_SAMPLED_CHUNKS = 64


def checksum(chunks: Iterable[bytes]) -> str:
    """Return the BLAKE2b checksum of the concatenated chunks: 16 bytes as 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def sampled_chunks(path: Path) -> Iterator[bytes]:
    """Read the size of a file and its chunks of 1 MiB: all, or 64 at equal distances. Raises OSError."""
    size = path.stat().st_size
    yield str(size).encode()
    step = max(_CHUNK_BYTES, size // _SAMPLED_CHUNKS)
    with path.open("rb") as file:
        for position in range(0, size, step):
            file.seek(position)
            yield file.read(_CHUNK_BYTES)


def file_chunks(path: Path) -> Iterator[bytes]:
    """Read a file in chunks of 1 MiB. Raises OSError."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
