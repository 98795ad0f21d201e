from __future__ import annotations

from statistics import fmean

import pytest

from miles_async.batching.batch import (
    NO_VERSION,
    TrainStep,
    policy_steps,
    repack_for_forward,
    supervised_step,
)
from miles_async.errors import TrajectoryError
from miles_async.types import Group, Sample, VersionSpan
from tests.configuration import run_config


def sample(index: int, reward: float | None = 1.0, response: int = 3, mask: list[int] | None = None) -> Sample:
    return Sample(
        index=index,
        tokens=[100 + index, 1, *range(response)],
        response_length=response,
        rollout_log_probs=[-0.1 * (i + 1) for i in range(response)],
        loss_mask=mask,
        reward=reward,
    )


def steps_of(*groups: Group, steps: int = 1, ranks: int = 1) -> list[list[TrainStep]]:
    config = run_config(num_steps_per_rollout=steps, max_tokens_per_gpu=100, grpo_std_normalization=False)
    return policy_steps(groups, config, ranks=ranks)


def test_each_trained_token_has_its_position_its_engine_logprob_and_the_advantage_of_its_sample() -> None:
    [[step]] = steps_of(Group([sample(0, 1.0, mask=[1, 0, 1]), sample(1, 0.0)]))
    [batch] = step.micro_batches
    assert batch.tokens.tolist() == [100, 1, 0, 1, 2, 101, 1, 0, 1, 2]
    assert batch.lengths.tolist() == [5, 5]
    assert batch.targets.tolist() == [2, 4, 7, 8, 9]
    assert batch.rollout_log_probs.tolist() == pytest.approx([-0.1, -0.3, -0.1, -0.2, -0.3])
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert step.total_tokens == 5


def test_each_trained_token_has_the_version_that_sampled_it_and_its_sequence() -> None:
    continued = sample(0, 1.0, response=4, mask=[1, 1, 0, 1])
    continued.spans = [VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)]
    [[step]] = steps_of(Group([continued, sample(1, 0.0, response=1)]))
    [batch] = step.micro_batches
    assert batch.versions.tolist() == [3, 5, NO_VERSION, NO_VERSION]
    assert batch.sequences.tolist() == [0, 0, 0, 1]


def test_padding_follows_each_sequence_and_does_not_shift_targets() -> None:
    config = run_config(use_dynamic_batching_in_train=True, sequence_length_round_in_train=4)
    [[step]] = policy_steps([Group([sample(0, 1.0, response=3), sample(1, 0.0, response=1)])], config, ranks=1)
    [batch] = step.micro_batches
    assert batch.tokens.tolist() == [101, 1, 0, 0, 0, 0, 0, 0, 100, 1, 0, 1, 2, 0, 0, 0]
    assert (batch.lengths.tolist(), batch.padding) == ([8, 8], 8)
    assert batch.targets.tolist() == [2, 10, 11, 12]


def test_repacked_sequences_keep_the_index_of_each_target() -> None:
    config = run_config(max_tokens_per_gpu=9)
    groups = Group([sample(i, float(i), response=1 + i % 3) for i in range(6)])
    [[step]] = policy_steps([groups], config, ranks=1)
    rows = config.learner.model_copy(
        update={"use_dynamic_batching_in_infer": True, "sequence_length_round_in_infer": 3}
    )
    tokens = [0] * sum(len(batch.targets) for batch in step.micro_batches)
    for part in repack_for_forward(step.micro_batches, rows):
        for index, target in zip(part.target_indices, part.batch.targets, strict=True):
            tokens[index] = int(part.batch.tokens[target])
    assert tokens == [int(token) for batch in step.micro_batches for token in batch.tokens[batch.targets]]


def test_all_steps_of_a_batch_have_about_the_same_mean_length() -> None:
    groups = [Group([sample(2 * g, response=1 + g), sample(2 * g + 1, 0.0, response=20 - g)]) for g in range(20)]
    [steps] = steps_of(*groups, steps=4)
    means = [fmean(length for batch in step.micro_batches for length in batch.lengths) for step in steps]
    assert max(means) - min(means) < 0.1 * fmean(means)


def test_ranks_share_the_samples_and_divide_by_the_tokens_of_all_of_them() -> None:
    [[one], [other]] = steps_of(Group([sample(i, float(i)) for i in range(5)]), ranks=2)
    firsts = sorted(int(b.tokens[0]) for step in (one, other) for b in step.micro_batches)
    assert sum(len(b.lengths) for step in (one, other) for b in step.micro_batches) == 5
    assert one.total_tokens == other.total_tokens == 15
    assert len(firsts) == 2


def test_samples_go_to_the_steps_in_the_order_of_their_index() -> None:
    groups = Group([sample(2), sample(3)]), Group([sample(0), sample(1)])
    [[first, second]] = steps_of(*groups, steps=2)
    assert {100, 101} <= set(first.micro_batches[0].tokens.tolist())
    assert {102, 103} <= set(second.micro_batches[0].tokens.tolist())


def test_samples_that_do_not_divide_into_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps_per_rollout=2"):
        steps_of(Group([sample(0), sample(1), sample(2)]), steps=2)


def test_a_sample_without_a_numeric_reward_is_reported() -> None:
    with pytest.raises(TrajectoryError, match="sample 7 has the reward None"):
        steps_of(Group([sample(7, None)]))


def test_a_sample_with_a_mask_of_the_wrong_length_is_reported() -> None:
    with pytest.raises(TrajectoryError, match=r"sample 4 has .* 2 mask entries"):
        steps_of(Group([sample(4, mask=[1, 1])]))


def test_a_supervised_step_trains_every_response_token_and_no_other() -> None:
    step = supervised_step([[1, 2], [3]], [[4], [5, 6]], run_config(max_tokens_per_gpu=10).learner)
    [batch] = step.micro_batches
    assert batch.tokens[batch.targets].tolist() == [4, 5, 6]
    assert step.total_tokens == 3
