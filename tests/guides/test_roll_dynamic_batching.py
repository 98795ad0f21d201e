"""ROLL's page on dynamic batching, in its order: the worked example and the parameters.

`tests/unit/compat/test_translators.py` loads the full configuration at the end of the page.
"""

from __future__ import annotations

import pytest

from miles_async.batching.dynamic_batching import dynamic_batches, sort_and_shard
from tests.configuration import run_config

SEQ_LENS = [7, 6, 8, 5, 1, 3, 8, 6]
"""Eight sequences of the example, padded to 10 tokens, on two data-parallel ranks."""


def rows(max_tokens: int, multiple: int = 1) -> tuple[list[list[list[int]]], list[int]]:
    """The lengths of the sequences by rank and micro-batch, and the padded length of each micro-batch."""
    plan = dynamic_batches(SEQ_LENS, 2, max_tokens=max_tokens, round_to=2, multiple=multiple)
    return [[[SEQ_LENS[i] for i in bin_] for bin_ in bins] for bins in plan.bins], plan.padded


def computed_tokens(batches: list[list[list[int]]], padded: list[int]) -> int:
    return sum(len(bin_) * width for bins in batches for bin_, width in zip(bins, padded, strict=True))


# --- Example --------------------------------------------------------------------------------------------------------


def test_step_1_sorts_the_sequences_and_deals_them_to_the_ranks() -> None:
    shards = [[SEQ_LENS[i] for i in shard if i is not None] for shard in sort_and_shard(SEQ_LENS, 2)]
    assert shards == [[1, 5, 6, 8], [3, 6, 7, 8]]


def test_step_2_makes_three_micro_batches_and_removes_30_percent_of_the_tokens() -> None:
    # Micro-batches of 2 x 6 tokens exceed the 10 tokens that the page names: its figure needs a limit of 12.
    batches, padded = rows(max_tokens=12)
    assert batches == [[[1, 5], [6], [8]], [[3, 6], [7], [8]]]
    assert padded == [6, 8, 8]
    assert computed_tokens(batches, padded) == 56
    assert pytest.approx(0.3) == 1 - 56 / (8 * 10)


def test_with_the_limit_of_10_that_the_page_names_there_are_four_micro_batches() -> None:
    batches, padded = rows(max_tokens=10)
    assert padded == [4, 6, 8, 8]
    assert computed_tokens(batches, padded) == 52


def test_step_3_splits_micro_batches_until_their_number_is_a_multiple_of_the_pipeline_stages() -> None:
    batches, padded = rows(max_tokens=12, multiple=2)
    assert batches == [[[1], [5], [6], [8]], [[3], [6], [7], [8]]]
    assert padded == [6, 6, 8, 8]


# --- Configuration parameters ---------------------------------------------------------------------------------------


def test_the_parameters_of_the_page_are_settings() -> None:
    learner = run_config(
        use_dynamic_batching_in_train=True,
        max_tokens_per_microbatch_in_train=8192,
        sequence_length_round_in_train=128,
        use_dynamic_batching_in_infer=True,
        max_tokens_per_microbatch_in_infer=16384,
        sequence_length_round_in_infer=128,
    ).learner
    assert (learner.use_dynamic_batching_in_train, learner.max_tokens_per_microbatch_in_train) == (True, 8192)
    assert (learner.use_dynamic_batching_in_infer, learner.max_tokens_per_microbatch_in_infer) == (True, 16384)
    assert learner.sequence_length_round_in_train == learner.sequence_length_round_in_infer == 128
