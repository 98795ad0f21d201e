"""Which prefixes of samples are computed once, and how samples with the same prompt are packed."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_async.batching.batch import policy_steps
from miles_async.batching.shared_prefixes import Pack, common_prefixes, prefix_units, visible_blocks
from miles_async.types import Group, Sample
from tests.configuration import run_config

PROMPT = [1, 2, 3, 4, 5, 6]


def sample(index: int, prompt: list[int], response: list[int]) -> Sample:
    return Sample(
        index=index,
        tokens=prompt + response,
        response_length=len(response),
        rollout_log_probs=[-1.0] * len(response),
        reward=float(index % 2),
    )


def group(*responses: list[int], prompt: list[int] = PROMPT, first: int = 0) -> Group:
    return Group(sample(first + i, prompt, response) for i, response in enumerate(responses))


def test_samples_of_a_group_are_one_unit_with_one_prompt() -> None:
    [unit] = prefix_units(group([10], [20, 21], [30]), [0] * 3, cap=100, at_most=8)
    assert unit.members == [0, 1, 2]
    assert unit.tokens == 6 + 1 + 2 + 1
    assert unit.square == 7**2 + (8**2 - 6**2) + (7**2 - 6**2)


def test_equal_responses_and_beginnings_are_computed_once_too() -> None:
    [unit] = prefix_units(group([7, 8, 9], [5], [7, 8, 9], [7, 8]), [0] * 4, cap=100, at_most=8)
    assert unit.members == [1, 3, 0, 2], "sorted, so that common beginnings are adjacent"
    assert unit.tokens == 6 + 1 + 3


def test_a_unit_has_at_most_as_many_tokens_as_a_micro_batch() -> None:
    units = prefix_units(group([10] * 4, [20] * 4, [30] * 4, [40] * 4), [0] * 4, cap=14, at_most=8)
    assert [unit.members for unit in units] == [[0, 1], [2, 3]]
    assert [unit.tokens for unit in units] == [14, 14]


def test_samples_with_other_prompts_and_samples_over_the_limit_are_units_by_themselves() -> None:
    samples = [sample(0, PROMPT, [10]), sample(1, [9, 9], [10]), sample(2, PROMPT, [10] * 30), sample(3, PROMPT, [11])]
    assert [unit.members for unit in prefix_units(samples, [0, 1, 2, 3], cap=20, at_most=8)] == [[0], [1], [2], [3]]


def test_several_ranks_get_several_units_of_a_group() -> None:
    config = run_config(max_tokens_per_gpu=1000, grpo_std_normalization=False)
    responses = [[10 + i] for i in range(16)]
    ranks = policy_steps([group(*responses)], config, ranks=2, share_prefixes=True)
    assert [sum(len(batch.lengths) for batch in step.micro_batches) for [step] in ranks] == [8, 8]


def test_a_batch_trains_the_same_tokens_with_and_without_shared_prefixes() -> None:
    config = run_config(max_tokens_per_gpu=40, grpo_std_normalization=False)
    groups = [group([10, 11], [12]), group([13], [13, 14], prompt=[5, 5, 5], first=2)]
    plain, shared = (
        [
            sorted(
                (int(token), float(advantage))
                for batch in step.micro_batches
                for token, advantage in zip(batch.tokens[batch.targets], batch.advantages, strict=True)
            )
            for [step] in policy_steps(groups, config, ranks=1, share_prefixes=share)
        ]
        for share in (False, True)
    )
    assert plain == shared
    [[step]] = policy_steps(groups, config, ranks=1, share_prefixes=True)
    assert sum(batch.computed_tokens for batch in step.micro_batches) == (6 + 2 + 1) + (3 + 1 + 1)


def test_context_parallelism_and_padded_rows_compute_every_sample_as_a_whole() -> None:
    rows = {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 4}
    for settings in ({"context_parallel_size": 2}, rows):
        config = run_config(max_tokens_per_gpu=40, grpo_std_normalization=False, **settings)
        [[step]] = policy_steps([group([10], [11])], config, ranks=1, share_prefixes=True)
        assert all(batch.computed_tokens == len(batch.tokens) for batch in step.micro_batches), settings


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def histories_of(sequences: list[list[int]], pack: Pack) -> list[tuple[int, ...]]:
    """The sequence of tokens that ends at each computed token."""
    histories = [tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))]
    return [histories[i] for i in pack.computed]


@given(SEQUENCES, st.integers(1, 4))
def test_a_token_attends_to_its_ancestors_in_the_tree_of_prefixes(sequences: list[list[int]], size: int) -> None:
    sequences.sort()
    pack = Pack.of(np.array([len(sequence) for sequence in sequences]), common_prefixes(sequences))
    ends, histories = pack.reader_ends(), histories_of(sequences, pack)
    visible = np.array([[query[: len(key)] == key for key in histories] for query in histories])
    tokens = np.arange(len(histories))
    assert (visible == ((tokens <= tokens[:, None]) & (tokens[:, None] < ends))).all()
    some, full = visible_blocks(ends, size)
    starts = range(0, len(tokens), size)
    for (i, query), (j, key) in product(enumerate(starts), repeat=2):
        block = visible[query : query + size, key : key + size]
        assert full[i, j] == (block.all() and i != j)
        assert some[i, j] == (block.any() and not full[i, j])


def test_sequences_without_a_marked_prefix_attend_only_to_themselves() -> None:
    assert Pack.of(np.array([3, 1, 2])).reader_ends().tolist() == [3, 3, 3, 4, 6, 6]


@given(SEQUENCES)
def test_every_token_is_represented_by_a_computed_token_with_the_same_history(sequences: list[list[int]]) -> None:
    sequences.sort()
    tokens = np.concatenate([np.array(sequence) for sequence in sequences])
    pack = Pack.of(np.array([len(sequence) for sequence in sequences]), common_prefixes(sequences))
    histories = [tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))]
    assert len(pack.computed) == len(set(histories)), "sorted sequences compute every prefix once"
    assert [histories[pack.computed[i]] for i in pack.index] == histories
    assert (tokens[pack.computed][pack.index] == tokens).all()
