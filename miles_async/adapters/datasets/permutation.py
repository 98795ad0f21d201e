"""A shuffled order that needs no memory: each position is computed from the seed and the length.

A balanced Feistel network permutes the numbers below the next power of four. A result outside `range(size)` is permuted
again until it is inside (cycle walking), so the restriction to `range(size)` is a permutation as well (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002).

NumPy's `Generator.permutation` needs 8 bytes per row and may give another order in another version of NumPy (NEP 19). A
resumed run would then continue at other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

_ROUNDS = 8
_WORD = (1 << 64) - 1


class Permutation:
    """`order[position]` is an element of a shuffled `range(size)`; equal keys give equal orders on every machine."""

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        # Bits per half, so that four to the power of `bits` is at least `size`.
        self._bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = (1 << self._bits) - 1
        digest = blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        """Raises IndexError outside `range(size)`."""
        if not 0 <= position < self._size:
            raise IndexError(f"position {position} is outside of range({self._size})")
        row = self._step(position)
        while row >= self._size:
            row = self._step(row)
        return row

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._size))

    def _step(self, value: int) -> int:
        """Permute the numbers of `2 * self._bits` bits: each round swaps the halves and mixes one into the other."""
        left, right = value >> self._bits, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return left << self._bits | right


def _mix(value: int) -> int:
    """Mix 64 bits with the finalizer of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31
