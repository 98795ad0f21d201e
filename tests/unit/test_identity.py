"""Samples and groups as keys: by identity, and never by a number that another object can get."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from miles_async.identity import IdentityMap, WeakIdentityMap, identity_set
from miles_async.types import Sample

PRODUCT = [path for folder in ("miles_async", "workers") for path in Path(folder).rglob("*.py")]


def test_equal_samples_are_different_keys() -> None:
    first, second = Sample(prompt="7"), Sample(prompt="7")
    numbers = IdentityMap([(first, 1), (second, 2)])
    assert first == second
    assert (numbers[first], numbers[second], len(numbers)) == (1, 2, 2)
    assert [key is sample for key, sample in zip(numbers, (first, second), strict=True)] == [True, True]


def test_no_other_sample_becomes_a_key_while_an_entry_exists() -> None:
    """CPython gives the identity of an object that is gone to the next object of its size."""
    aborted = IdentityMap([(Sample(), None)])
    assert not any(Sample() in aborted for _ in range(1000))
    assert len(aborted) == 1


def test_removed_entries_are_gone() -> None:
    sample = Sample()
    numbers = IdentityMap([(sample, 1)])
    assert numbers.pop(sample) == 1
    assert sample not in numbers
    with pytest.raises(KeyError):
        numbers[sample]


def test_a_set_by_identity_has_each_object_once_and_in_order() -> None:
    first, second = Sample(), Sample()
    assert [entry is second for entry in identity_set([second, first, second])] == [True, False]


def test_a_weak_entry_ends_with_its_sample_and_no_other_sample_inherits_it() -> None:
    names: WeakIdentityMap[Sample, str] = WeakIdentityMap()
    for number in range(1000):
        sample = Sample()
        assert names.get(sample) is None
        names[sample] = str(number)
        assert names.get(sample) == str(number)
        del sample
    assert len(names) == 0


def test_a_weak_entry_can_be_replaced_and_removed() -> None:
    names: WeakIdentityMap[Sample, str] = WeakIdentityMap()
    sample = Sample()
    names[sample] = "first"
    names[sample] = "second"
    assert (names.pop(sample), names.pop(sample)) == ("second", None)


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_only_one_file_asks_for_the_identity_of_objects(path: Path) -> None:
    """An identity is reused after its object: a map of identities that holds no objects finds the wrong one."""
    if path == Path("miles_async/identity.py"):
        return
    names = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name) and node.id == "id"]
    used = [name for name in names if isinstance(name.ctx, ast.Load)]  # a field may be called `id`
    assert not used, f"use miles_async/identity.py in line {used[0].lineno}"
