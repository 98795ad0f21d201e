"""A shuffled order that stores nothing: any place of it can be asked for, and only seed and length make it.

A balanced Feistel network permutes the next power of four; places that land outside `range(size)` walk on until they
land inside, which keeps it a permutation (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

_ROUNDS = 8
_WORD = (1 << 64) - 1


class Permutation:
    """`order[place]` is the row at `place` of a shuffled `range(size)`; the same key gives the same order anywhere."""

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = (1 << self._bits) - 1
        digest = blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        """Raises IndexError outside `range(size)`."""
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} of {self._size}")
        row = self._step(place)
        while row >= self._size:
            row = self._step(row)
        return row

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._size))

    def _step(self, value: int) -> int:
        left, right = value >> self._bits, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & self._mask)
        return left << self._bits | right


def _mixed(value: int) -> int:
    """The finisher of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31
