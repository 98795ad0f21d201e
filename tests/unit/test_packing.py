from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.core.packing import pack

lengths_of_samples = st.lists(st.integers(1, 100), min_size=4, max_size=200)


@given(lengths=lengths_of_samples, cap=st.integers(100, 400), ranks=st.integers(1, 4))
def test_every_sample_is_packed_once_under_the_cap_in_equally_many_micro_batches(
    lengths: list[int], cap: int, ranks: int
) -> None:
    packed = pack(lengths, cap, ranks)
    assert sorted(chain.from_iterable(chain.from_iterable(packed))) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= cap for bins in packed for bin_ in bins)
    assert len(packed) == ranks
    assert len({len(bins) for bins in packed}) == 1


@given(lengths=lengths_of_samples)
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int]) -> None:
    [bins] = pack(lengths, 100)
    tokens = [sum(lengths[i] for i in bin_) for bin_ in bins]
    assert all(one + other > 100 for one, other in combinations(tokens, 2))


def test_long_samples_are_placed_first_and_short_ones_fill_the_gaps() -> None:
    assert pack([4, 8, 1, 4, 2, 1], 10) == [[[1, 4], [0, 2, 3, 5]]]


def test_ranks_carry_about_the_same_tokens() -> None:
    packed = pack([50] * 10 + [10] * 50, 100, 2)
    tokens = [sum([50, 10][i >= 10] for bin_ in bins for i in bin_) for bins in packed]
    assert tokens == [500, 500]


def test_a_sample_above_the_cap_is_named_with_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens.*max_tokens_per_gpu"):
        pack([3, 11], 10)


def test_empty_micro_batches_make_up_the_number_where_no_bin_can_be_split() -> None:
    assert pack([6, 5, 7], 10, 2) == [[[2], []], [[0], [1]]]


def test_a_bin_is_split_before_a_rank_goes_empty() -> None:
    assert pack([1, 1, 1, 1], 10, 2) == [[[0, 2]], [[1, 3]]]
