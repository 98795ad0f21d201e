from __future__ import annotations

import math
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.batching.packing import pack, pack_fixed_size, packing_report, sequence_cost

lengths_of_samples = st.lists(st.integers(1, 100), min_size=4, max_size=200)


@given(
    lengths=st.lists(st.integers(1, 100), max_size=200),
    cap=st.integers(100, 400),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 4),
    crossover=st.sampled_from([math.inf, 30.0]),
)
def test_every_sample_is_packed_once_under_the_cap_in_equally_many_micro_batches(
    lengths: list[int], cap: int, ranks: int, multiple: int, crossover: float
) -> None:
    packed = pack(lengths, cap, ranks, multiple=multiple, crossover=crossover)
    assert sorted(chain.from_iterable(chain.from_iterable(packed))) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= cap for bins in packed for bin_ in bins)
    assert len(packed) == ranks
    [count] = {len(bins) for bins in packed}
    assert count > 0
    assert count % multiple == 0
    assert packing_report(packed, lengths, cap, multiple=multiple, crossover=crossover).lower_bound <= count


@given(lengths=lengths_of_samples)
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int]) -> None:
    [bins] = pack(lengths, 100)
    tokens = [sum(lengths[i] for i in bin_) for bin_ in bins]
    assert all(one + other > 100 for one, other in combinations(tokens, 2))


def test_long_samples_are_placed_first_and_short_ones_fill_the_gaps() -> None:
    [bins] = pack([4, 8, 1, 4, 2, 1], 10)
    assert sorted(bins) == [[0, 2, 3, 5], [1, 4]]


def test_ranks_are_balanced_by_work_instead_of_tokens() -> None:
    lengths = [800] + [100] * 24
    by_tokens, by_work = pack(lengths, 4000, 2), pack(lengths, 4000, 2, crossover=800)
    tokens = [sum(lengths[i] for bin_ in bins for i in bin_) for bins in by_tokens]
    assert tokens == [1600, 1600]
    loads = [sum(sequence_cost(lengths[i], 800) for bin_ in bins for i in bin_) for bins in by_work]
    assert loads == pytest.approx([2162.5, 2137.5])
    assert packing_report(by_tokens, lengths, 4000, crossover=800).imbalance > 0.15
    assert packing_report(by_work, lengths, 4000, crossover=800).imbalance < 0.01


def test_a_plan_reports_how_many_micro_batches_it_has_above_the_minimum() -> None:
    lengths = [6, 6, 6, 2]
    report = packing_report(pack(lengths, 10), lengths, 10)
    assert (report.micro_batches, report.lower_bound, report.padding) == (3, 2, 1.0)


def test_micro_batches_do_not_come_in_the_order_of_their_lengths() -> None:
    lengths = list(range(1, 201))
    [bins] = pack(lengths, 200)
    heads = [max(lengths[i] for i in bin_) for bin_ in bins]
    assert heads != sorted(heads, reverse=True)
    half = len(heads) // 2
    assert abs(sum(heads[:half]) - sum(heads[half:])) < 0.2 * sum(heads)


def test_packing_is_deterministic() -> None:
    lengths = [7, 3, 9, 3, 3, 8, 1] * 30
    assert pack(lengths, 20, 3, crossover=50) == pack(lengths, 20, 3, crossover=50)


def test_ranks_without_samples_get_empty_micro_batches() -> None:
    assert pack([], 10, 2) == [[[]], [[]]]
    one, other = pack([4], 10, 2, multiple=2)
    assert (sorted(one), other) == ([[], [0]], [[], []])


def test_micro_batches_of_fixed_size_are_equally_many_on_all_ranks() -> None:
    assert pack_fixed_size(7, 2, 2) == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    assert pack_fixed_size(5, 2, 2) == [[[0, 2], [4]], [[1, 3], []]]
    assert pack_fixed_size(0, 2, 2) == [[[]], [[]]]
    assert pack_fixed_size(5, 2, 1, multiple=2) == [[[0, 1], [2, 3], [4], []]]


def test_bins_are_split_as_often_as_the_pipeline_needs() -> None:
    [bins] = pack([1, 1, 1, 1], 10, multiple=4)
    assert sorted(bins) == [[0], [1], [2], [3]]


def test_a_sample_above_the_cap_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens.*max_tokens_per_gpu"):
        pack([3, 11], 10)


def test_empty_micro_batches_are_added_if_no_bin_can_be_split() -> None:
    one, other = pack([6, 5, 7], 10, 2)
    assert (sorted(one), sorted(other)) == ([[], [2]], [[0], [1]])


def test_a_bin_is_split_rather_than_leaving_a_rank_without_samples() -> None:
    assert pack([1, 1, 1, 1], 10, 2) == [[[0, 2]], [[1, 3]]]
