"""Maps and sets of objects by identity, for samples and groups, which compare by value and are not hashable.

A key that is only `id(object)` belongs to another object as soon as the first one is gone. The classes here hold what
the identity belongs to, or notice that it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Generic, TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")


class IdentityMap(MutableMapping[K, V]):
    """Maps objects to values, in the order of insertion, and keeps the objects alive."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[K, V]] = ()) -> None:
        self._entries: dict[int, tuple[K, V]] = {id(entry[0]): entry for entry in entries}

    def __getitem__(self, key: K) -> V:
        return self._entries[id(key)][1]

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[id(key)] = key, value

    def __delitem__(self, key: K) -> None:
        del self._entries[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


def identity_set(objects: Iterable[K]) -> IdentityMap[K, None]:
    """The objects as keys, each once, in order: a set by identity."""
    return IdentityMap((entry, None) for entry in objects)


class WeakIdentityMap(Generic[K, V]):
    """Maps objects to values without keeping the objects alive. An entry ends with its object."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[K], V]] = {}

    def __setitem__(self, key: K, value: V) -> None:
        identity, entries = id(key), self._entries

        def remove(gone: ref[K]) -> None:
            # Another object may have the identity by now.
            if (entry := entries.get(identity)) is not None and entry[0] is gone:
                entries.pop(identity, None)

        entries[identity] = ref(key, remove), value

    def get(self, key: K) -> V | None:
        """The value of the object; None if there is none."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def pop(self, key: K) -> V | None:
        """Remove the entry of the object and return its value; None if there is none."""
        entry = self._entries.pop(id(key), None)
        return None if entry is None else entry[1]

    def __len__(self) -> int:
        return len(self._entries)
