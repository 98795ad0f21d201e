from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.batching.dynamic_batching import dynamic_batches, partition, sort_and_shard, split_to_multiple

LENGTHS = [7, 6, 8, 5, 1, 3, 8, 6]


def lengths_of(shards: list[list[int | None]]) -> list[list[int]]:
    return [[LENGTHS[i] for i in shard if i is not None] for shard in shards]


def widths(max_tokens: int, multiple: int = 1) -> list[int]:
    return dynamic_batches(LENGTHS, 2, max_tokens=max_tokens, round_to=2, multiple=multiple).padded


def computed(max_tokens: int, multiple: int = 1) -> int:
    plan = dynamic_batches(LENGTHS, 2, max_tokens=max_tokens, round_to=2, multiple=multiple)
    return sum(len(bin_) * width for bins in plan.bins for bin_, width in zip(bins, plan.padded, strict=True))


def test_the_example_of_roll_is_sorted_and_sharded_as_documented() -> None:
    assert lengths_of(sort_and_shard(LENGTHS, 2)) == [[1, 5, 6, 8], [3, 6, 7, 8]]


@pytest.mark.parametrize("max_tokens", [12, 13, 14, 15])
def test_the_three_micro_batches_of_56_tokens_in_roll_need_a_budget_of_12_to_15(max_tokens: int) -> None:
    assert widths(max_tokens) == [6, 8, 8]
    assert computed(max_tokens) == 56


def test_the_rule_of_roll_makes_four_micro_batches_of_52_tokens_at_a_budget_of_10() -> None:
    assert widths(10) == [4, 6, 8, 8]
    assert computed(10) == 52


def test_at_16_two_rows_of_8_fit_and_two_micro_batches_remain() -> None:
    assert len(widths(16)) == 2


def test_halves_of_a_split_keep_the_padded_length_of_their_parent() -> None:
    plan = dynamic_batches(LENGTHS, 2, max_tokens=12, round_to=2, multiple=2)
    assert plan.padded == [6, 6, 8, 8]
    assert [[[LENGTHS[i] for i in bin_] for bin_ in bins] for bins in plan.bins] == [
        [[1], [5], [6], [8]],
        [[3], [6], [7], [8]],
    ]
    assert computed(12, 2) == 56


def test_a_micro_batch_is_split_as_often_as_needed() -> None:
    [rows] = partition([3, 3, 3, 3], max_tokens=100, round_to=1)
    assert [(half.start, half.end) for half in split_to_multiple([rows], 4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_if_no_micro_batch_can_be_split_empty_ones_are_added() -> None:
    one_row = partition([3], max_tokens=4, round_to=2)
    assert [(rows.start, rows.end, rows.padded) for rows in split_to_multiple(one_row, 3, round_to=2)] == [
        (0, 1, 4),
        (1, 1, 2),
        (1, 1, 2),
    ]
    plan = dynamic_batches([], 2, max_tokens=8, round_to=4, multiple=2)
    assert (plan.bins, plan.padded) == ([[[], []], [[], []]], [4, 4])


def test_a_sample_whose_rounded_length_exceeds_the_limit_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ValueError, match=r"9 tokens, rounded up to 12.*raise max_tokens_per_microbatch_in_train"):
        dynamic_batches([9], 1, max_tokens=10, round_to=4)


@given(
    lengths=st.lists(st.integers(1, 60), max_size=60),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(64, 300),
    round_to=st.sampled_from([1, 2, 8, 64]),
)
def test_every_sample_is_a_row_once_and_no_micro_batch_exceeds_the_limit(
    lengths: list[int], ranks: int, max_tokens: int, round_to: int
) -> None:
    plan = dynamic_batches(lengths, ranks, max_tokens=max_tokens, round_to=round_to)
    assert sorted(chain.from_iterable(chain.from_iterable(plan.bins))) == list(range(len(lengths)))
    assert {len(bins) for bins in plan.bins} == {len(plan.padded)}
    for bins in plan.bins:
        for bin_, width in zip(bins, plan.padded, strict=True):
            assert width % round_to == 0
            assert len(bin_) * width <= max_tokens
            assert all(lengths[i] <= width for i in bin_)
