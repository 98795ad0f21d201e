"""The storage of per-token data: to its users a list of Python's numbers, in memory an array of NumPy."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray


class TokenValues(MutableSequence[Any]):
    """One entry per token, in an array that the object owns.

    Code that was written for a list of numbers reads, compares, appends, replaces and adds entries as before: an entry
    is a Python number, and a slice is a list. `array`, and `np.asarray`, give the entries without a copy.
    """

    __slots__ = ("_length", "_memory")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, entries: Iterable[Any], dtype: DTypeLike) -> None:
        """Copy the entries. Raises ValueError or TypeError if `dtype` cannot represent an entry."""
        self._memory: NDArray[Any] = _converted(entries, np.dtype(dtype))
        self._length = len(self._memory)

    @classmethod
    def of(cls, array: NDArray[Any]) -> TokenValues:
        """Take over an array of one entry per token, without a copy. A read-only array is copied before a change."""
        values = cls.__new__(cls)
        values._memory, values._length = array, len(array)
        return values

    @property
    def array(self) -> NDArray[Any]:
        """[n, ...] the entries. Treat the array as a constant."""
        return self._memory[: self._length]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an entry."""
        return self._memory.dtype

    def tolist(self) -> list[Any]:
        """The entries as Python's numbers."""
        return self.array.tolist()  # type: ignore[no-any-return]

    def copy(self) -> TokenValues:
        """Values that change independently of these."""
        return TokenValues.of(self.array.copy())

    __copy__ = copy

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype, copy=copy)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, value: object) -> bool:
        # A float32 equals the number that it was made of.
        return bool(np.any(self.array == value)) if self._memory.ndim == 1 else value in self.tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.array[index].tolist()

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            entries = self.tolist()
            entries[index] = list(value)
            self._memory = _converted(entries, self.dtype)
            self._length = len(self._memory)
            return
        [entry] = _converted([value], self.dtype)
        if not self._memory.flags.writeable:
            self._memory = self._memory.copy()
        self.array[index] = entry

    def __delitem__(self, index: int | slice) -> None:
        self._memory = np.delete(self.array, index, axis=0)
        self._length = len(self._memory)

    def clear(self) -> None:
        self._memory, self._length = self._memory[:0].copy(), 0

    def insert(self, index: int, value: Any) -> None:
        entry = _converted([value], self.dtype)
        if not self._length:
            self._memory, self._length = entry, 1
            return
        if index < self._length:
            self._memory = np.insert(self.array, max(index, -self._length), entry[0], axis=0)
            self._length = len(self._memory)
            return
        if self._length == len(self._memory) or not self._memory.flags.writeable:
            # Room for more entries, so that appending n entries one by one takes time in proportion to n.
            memory = np.empty((max(8, 2 * self._length), *self._memory.shape[1:]), self.dtype)
            memory[: self._length] = self.array
            self._memory = memory
        self._memory[self._length] = entry[0]
        self._length += 1

    def extend(self, values: Iterable[Any]) -> None:
        added = TokenValues(values, self.dtype).array
        if len(added):
            self._memory = np.concatenate([self.array, added]) if self._length else added
            self._length = len(self._memory)

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self.tolist(), *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self.tolist()]

    def __eq__(self, other: object) -> bool:
        """Compare with other numbers. A float column compares its own precision: 0.1 equals its nearest float32."""
        if not isinstance(other, TokenValues | Sequence | np.ndarray) or len(other) != self._length:
            return False
        try:
            numbers = np.asarray(other, self.dtype if self.dtype.kind == "f" else None)
        except (TypeError, ValueError, OverflowError):
            return False
        return bool(np.array_equal(self.array, numbers))

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __reduce__(self) -> Any:
        # NumPy pickles an array without a copy if the transport accepts buffers.
        return TokenValues.of, (self.array,)


def array_of(numbers: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """[n] numbers of a list that are known to be valid, as a read-only array. For lists of a few hundred numbers,
    `struct` takes a third of the time that NumPy takes.
    """
    return np.frombuffer(struct.pack(f"{len(numbers)}{dtype.char}", *numbers), dtype)


def _converted(entries: Iterable[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A new array of the entries. Raises ValueError or TypeError if the type cannot represent one of them."""
    array = entries.array if isinstance(entries, TokenValues) else entries
    if not isinstance(array, np.ndarray):
        array = np.asarray(array if isinstance(array, list) else list(array))
    if not array.size:
        return np.empty((0, *array.shape[1:]), dtype)
    if array.dtype.kind not in "iufb":
        raise TypeError("an entry is not a number")
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind != "f" and (converted != array).any():
        raise ValueError(f"the type {dtype} cannot represent an entry")
    return converted
