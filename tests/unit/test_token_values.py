"""The values of a column behave as a list of numbers for code that was written for lists, and are one array."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, MutableSequence
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.token_values import TokenValues

Values = MutableSequence[Any]
Operation = Callable[[Values], Any]

INTEGERS = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
POSITIONS = st.integers(-9, 9)
SLICES = st.slices(9)


def calls(method: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    """Calls of a method of lists."""
    return st.builds(methodcaller, st.just(method), *arguments)


def operations(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    some = st.lists(entries, max_size=4)
    return st.one_of(
        calls("append", entries),
        calls("extend", some),
        calls("insert", st.integers(0, 9), entries),
        calls("pop"),
        calls("pop", POSITIONS),
        calls("remove", entries),
        calls("reverse"),
        calls("clear"),
        calls("index", entries),
        calls("count", entries),
        calls("__contains__", entries),
        calls("__getitem__", POSITIONS),
        calls("__getitem__", SLICES),
        calls("__setitem__", POSITIONS, entries),
        calls("__setitem__", SLICES, some),
        calls("__delitem__", POSITIONS),
        calls("__delitem__", SLICES),
        calls("__iadd__", some),
        calls("__add__", some),
        calls("__eq__", some),
    )


def outcome(operation: Operation, target: Values) -> Any:
    """What an operation returns, or the class of the error that it raises."""
    try:
        return operation(target)
    except (IndexError, ValueError) as error:
        return type(error)


def check_operations(entries: list[Any], dtype: str, chosen: list[Operation]) -> None:
    """Apply the operations to a list and to values with the same entries. Fails at the first difference."""
    expected, values = list(entries), TokenValues(entries, dtype)
    for operation in chosen:
        assert outcome(operation, values) == outcome(operation, expected)
        assert list(values) == expected
        assert len(values) == len(expected)


@settings(max_examples=500)
@given(st.lists(INTEGERS, max_size=8), st.lists(operations(INTEGERS), min_size=1, max_size=12))
def test_integers_do_what_a_list_does(entries: list[int], chosen: list[Operation]) -> None:
    check_operations(entries, "int32", chosen)


@settings(max_examples=500)
@given(st.lists(FLOATS, max_size=8), st.lists(operations(FLOATS), min_size=1, max_size=12))
def test_floats_do_what_a_list_does(entries: list[float], chosen: list[Operation]) -> None:
    check_operations(entries, "float32", chosen)


@pytest.mark.parametrize("dtype, kind", [("int8", int), ("int32", int), ("float32", float), ("bool", bool)])
def test_an_entry_is_a_number_of_python(dtype: str, kind: type) -> None:
    values = TokenValues([1, 0], dtype)
    entries = [values[0], values[-1], *values[:1], *values, *reversed(values), values.pop()]
    assert {type(entry) for entry in entries} == {kind}


def test_bytes_are_appended_as_numbers() -> None:
    values = TokenValues([1], "int32")
    values.extend(b"ab")
    values += b"c"
    assert values == [1, 97, 98, 99]


def test_values_are_appended_to_themselves() -> None:
    values = TokenValues([1, 2], "int32")
    values += values
    assert values == [1, 2, 1, 2]


def test_a_list_and_values_are_added_in_both_orders_to_a_list() -> None:
    values, others = TokenValues([1, 2], "int32"), [3]
    sums = [values + others, others + values, values + values]
    assert sums == [[1, 2, 3], [3, 1, 2], [1, 2, 1, 2]]
    assert {type(one) for one in sums} == {list}


def test_a_float_equals_the_number_that_was_given_although_it_has_fewer_bits() -> None:
    values = TokenValues([0.1], "float32")
    assert values == [0.1]
    assert values == np.array([0.1])
    assert 0.1 in values
    assert values != [0.1 + 1e-6]


def test_values_differ_from_other_lengths_and_from_what_is_not_numbers() -> None:
    values = TokenValues([1, 2], "int32")
    assert values == TokenValues([1, 2], "int8")
    for other in ([1], [1, 2, 3], [1, 3], [1, "b"], [1, None], [1, 2**40], "12", None, 3, {1: 1, 2: 2}):
        assert values != other


def test_json_has_the_entries_of_a_list() -> None:
    assert json.dumps(list(TokenValues([1, 2], "int8"))) == "[1, 2]"
    assert json.dumps(TokenValues([0.5, -1.0], "float32").tolist()) == "[0.5, -1.0]"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, TokenValues.copy])
def test_a_copy_changes_independently(copied: Callable[[TokenValues], TokenValues]) -> None:
    values = TokenValues([1, 2], "int32")
    other = copied(values)
    assert (type(other), other.dtype) == (TokenValues, values.dtype)
    assert other == [1, 2]
    other[0] = 9
    other.append(3)
    assert values == [1, 2]
    assert other == [9, 2, 3]


def test_a_pickle_contains_the_array_or_leaves_it_to_the_transport_without_a_copy() -> None:
    values = TokenValues(range(10_000), "int32")
    values.append(1)
    assert pickle.loads(pickle.dumps(values)) == values
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(values, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    [buffer] = buffers
    assert np.shares_memory(np.frombuffer(buffer.raw(), np.int32), np.asarray(values))
    received = pickle.loads(stream, buffers=buffers)
    assert received == values
    assert np.shares_memory(np.asarray(received), np.asarray(values))


def test_numpy_gets_the_array_without_a_copy_unless_the_copy_or_another_type_is_asked_for() -> None:
    array = np.array([1, 2, 3], np.int32)
    values = TokenValues.of(array)
    assert np.shares_memory(np.asarray(values), array)
    assert np.shares_memory(values.array, array)
    assert np.asarray(values).tolist() == [1, 2, 3]
    assert not np.shares_memory(np.array(values), array)
    assert np.asarray(values, np.float64).dtype == np.float64


def test_values_do_not_change_with_the_array_or_the_list_from_which_they_were_made() -> None:
    array, numbers = np.array([1, 2], np.int32), [1, 2]
    of_array, of_list = TokenValues(array, "int32"), TokenValues(numbers, "int32")
    array[0], numbers[0] = 9, 9
    assert of_array == of_list == [1, 2]


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_an_array_that_was_taken_does_not_change_when_an_entry_is_appended(dtype: str) -> None:
    values = TokenValues([], dtype)
    for number in range(100):
        before = np.asarray(values)
        values.append(number)
        assert before.tolist() == list(range(number))
    values.extend([100, 101])
    assert before.tolist() == list(range(99))


def read_only(*numbers: int) -> TokenValues:
    """Values of an array that another process owns, as Ray's object store passes it."""
    array = np.array(numbers, np.int32)
    array.flags.writeable = False
    return TokenValues.of(array)


@pytest.mark.parametrize("change", [methodcaller("__setitem__", 0, 9), methodcaller("append", 9)])
def test_a_read_only_array_is_copied_before_a_change(change: Operation) -> None:
    values = read_only(1, 2)
    array, expected = np.asarray(values), [1, 2]
    change(values)
    change(expected)
    assert values == expected
    assert array.tolist() == [1, 2]
    assert not np.shares_memory(np.asarray(values), array)


def test_appending_many_entries_takes_less_than_three_times_their_memory() -> None:
    values = TokenValues([], "int32")
    for number in range(10_000):
        values.append(number)
    memory = np.asarray(values).base
    assert memory is not None
    assert 40_000 <= memory.nbytes < 3 * 40_000


@pytest.mark.parametrize(
    "entries, dtype", [(["a"], "int32"), ([None], "int8"), ([2**31], "int32"), ([[1], 2], "int32")]
)
def test_an_entry_that_is_not_of_the_type_is_refused(entries: list[Any], dtype: str) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        TokenValues(entries, dtype)


def test_an_entry_may_be_several_numbers() -> None:
    values = TokenValues([[1, 2], [3, 4]], "int32")
    values.append([5, 6])
    values.extend([[7, 8]])
    values[0] = [0, 0]
    del values[1]
    assert values == [[0, 0], [5, 6], [7, 8]]
    assert values[1:] == [[5, 6], [7, 8]]
    assert np.asarray(values).shape == (3, 2)


def test_values_cannot_be_a_key_of_a_dictionary_and_are_shown_as_a_list() -> None:
    values = TokenValues([1, 2], "int32")
    with pytest.raises(TypeError, match="unhashable"):
        hash(values)
    assert repr(values) == "[1, 2]"
