"""A shuffled order that stores nothing visits every row exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.adapters.datasets.permutation import Permutation


@given(size=st.integers(1, 700), key=st.text(max_size=5))
@settings(max_examples=60)
def test_every_row_occurs_once(size: int, key: str) -> None:
    assert sorted(Permutation(size, key)) == list(range(size))


def test_the_key_decides_the_order() -> None:
    assert list(Permutation(50, "42 0")) == list(Permutation(50, "42 0"))
    assert list(Permutation(50, "42 0")) != list(Permutation(50, "42 1"))


def test_a_position_of_a_huge_order_is_computed_directly() -> None:
    order = Permutation(10**12, "k")
    assert len({order[position] for position in range(1000)}) == 1000


def test_every_row_occurs_about_equally_often_at_each_position() -> None:
    """Over many keys each row is about as often in each place: 6 rows, 3000 orders, 500 expected each."""
    firsts = [Permutation(6, str(key))[0] for key in range(3000)]
    assert all(400 < firsts.count(row) < 600 for row in range(6))


def test_a_position_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError, match="position 5 is outside"):
        _ = Permutation(5, "k")[5]
