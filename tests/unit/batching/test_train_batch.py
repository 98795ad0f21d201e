from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from miles_async.batching.batch import (
    TrainStep,
    policy_steps,
    repack_for_forward,
    supervised_step,
)
from miles_async.columns.spans import NO_VERSION
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
    assert batch.columns["rollout_log_probs"].tolist() == pytest.approx([-0.1, -0.3, -0.1, -0.2, -0.3])
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert step.total_tokens == 5


def test_each_trained_token_has_the_reward_of_its_sample_with_the_penalty_on_its_length() -> None:
    settings = {"rollout_max_response_len": 4, "overlong_buffer_len": 2, "grpo_std_normalization": False}
    [[step]] = policy_steps([Group([sample(0, 2.0, response=1), sample(1, -1.0)])], run_config(**settings), ranks=1)
    [batch] = step.micro_batches
    assert batch.rewards.tolist() == [2.0, -1.5, -1.5, -1.5]


def test_each_trained_token_has_the_version_that_sampled_it_and_its_sequence() -> None:
    continued = sample(0, 1.0, response=4, mask=[1, 1, 0, 1])
    continued.spans = [VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)]
    [[step]] = steps_of(Group([continued, sample(1, 0.0, response=1)]))
    [batch] = step.micro_batches
    assert batch.columns["spans"].of_tokens().tolist() == [3, 5, NO_VERSION, NO_VERSION]
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
    [[one], [other]] = steps_of(Group([sample(i, float(i**2)) for i in range(5)]), ranks=2)
    firsts = sorted(int(b.tokens[0]) for step in (one, other) for b in step.micro_batches)
    assert sum(len(b.lengths) for step in (one, other) for b in step.micro_batches) == 5
    assert one.total_tokens == other.total_tokens == 15
    assert len(firsts) == 2


def test_samples_go_to_the_steps_in_the_order_of_their_index() -> None:
    groups = Group([sample(2), sample(3, 0.0)]), Group([sample(0), sample(1, 0.0)])
    [[first, second]] = steps_of(*groups, steps=2)
    assert {100, 101} <= set(first.micro_batches[0].tokens.tolist())
    assert {102, 103} <= set(second.micro_batches[0].tokens.tolist())


def test_steps_of_samples_that_do_not_divide_differ_by_one_sample() -> None:
    [steps] = steps_of(Group([sample(0, 1.0), sample(1, 0.0), sample(2, 1.0)]), steps=2)
    assert sorted(len(batch.lengths) for step in steps for batch in step.micro_batches) == [1, 2]


def test_fewer_samples_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps_per_rollout=2"):
        steps_of(Group([sample(0)]), steps=2)


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


# --- samples without a gradient --------------------------------------------------------------------------------------


def packed_samples(steps: Sequence[TrainStep]) -> list[int]:
    """The indices of the samples in the micro-batches of all ranks; the first token of sample i is 100 + i."""
    batches = [batch for step in steps for batch in step.micro_batches if len(batch.targets)]
    firsts = [int(token) for batch in batches for token in batch.tokens[batch.lengths.cumsum() - batch.lengths]]
    return sorted(first - 100 for first in firsts)


def half_without_gradient() -> list[Group]:
    """Two groups whose rewards differ and two whose rewards are equal, of samples with 1 to 4 response tokens."""
    rewards = [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 1.0]]
    return [
        Group([sample(2 * g, first, response=1 + g), sample(2 * g + 1, second, response=1 + g)])
        for g, (first, second) in enumerate(rewards)
    ]


def test_samples_without_an_advantage_are_not_packed_but_count_in_the_mean() -> None:
    config = run_config()
    [[skipping]] = policy_steps(half_without_gradient(), config, ranks=1)
    [[complete]] = policy_steps(half_without_gradient(), config, ranks=1, computes_all=True)
    assert packed_samples([skipping]) == [0, 1, 4, 5]
    assert packed_samples([complete]) == list(range(8))
    assert skipping.total_tokens == complete.total_tokens == 20


def test_one_sample_of_a_group_may_be_without_an_advantage() -> None:
    [[step]] = steps_of(Group([sample(i, float(i)) for i in range(3)]))
    assert packed_samples([step]) == [0, 2]
    assert step.total_tokens == 9


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_the_weights_of_packed_samples_do_not_depend_on_the_others_being_packed(aggregation: str) -> None:
    config = run_config(loss_aggregation=aggregation)
    found: list[dict[int, float]] = []
    for computes_all in (False, True):
        [[step]] = policy_steps(half_without_gradient(), config, ranks=1, computes_all=computes_all)
        [batch] = step.micro_batches
        firsts = batch.tokens[batch.lengths.cumsum() - batch.lengths] - 100
        found.append(dict(zip(firsts[batch.sequences].tolist(), batch.loss_weights.tolist(), strict=True)))
    skipping, complete = found
    assert set(skipping) == {0, 1, 4, 5}
    assert skipping == {index: weight for index, weight in complete.items() if index in skipping}


def test_skipped_tokens_are_counted_by_the_version_that_sampled_them() -> None:
    spanned = sample(0, response=4, mask=[1, 1, 0, 1])
    spanned.spans = [VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)]
    other = sample(1)
    other.spans = [VersionSpan(5, 0, 3)]
    [[step]] = steps_of(Group([spanned, other]), Group([sample(2), sample(3, 0.0)]))
    assert step.skipped_tokens == {3: 1, 5: 4, NO_VERSION: 1}
    assert step.total_tokens == 12


def test_a_sample_without_trained_tokens_is_not_packed() -> None:
    removed = sample(1, 0.0)
    removed.remove_sample = True
    [[step]] = steps_of(Group([sample(0), removed, sample(2, 0.0, mask=[0, 0, 0])]))
    assert packed_samples([step]) == [0]
    assert (step.total_tokens, step.skipped_tokens) == (3, {})


@pytest.mark.parametrize(
    "aggregation, counted, weight",
    [
        # Two of three samples are trained, with 3 tokens each.
        ("sequence_mean", True, 6 / (3 * 3)),
        ("sequence_mean", False, 6 / (2 * 3)),
        ("sequence_sum", False, 6 / 2),
        ("constant", False, 6 / (2 * 10)),
        ("token_mean", False, 1),
    ],
)
def test_a_removed_sample_counts_in_the_mean_over_samples_unless_a_setting_says_otherwise(
    aggregation: str, counted: bool, weight: float
) -> None:
    removed = sample(1, 0.0)
    removed.remove_sample = True
    settings = {"loss_aggregation": aggregation, "count_removed_samples": counted, "rollout_max_response_len": 10}
    [[step]] = policy_steps([Group([sample(0), removed, sample(2, 0.0)])], run_config(**settings), ranks=1)
    [batch] = step.micro_batches
    assert batch.loss_weights.tolist() == pytest.approx([weight] * 6)


def test_a_sample_whose_advantage_is_not_a_number_is_packed() -> None:
    [[step]] = steps_of(Group([sample(0, float("nan")), sample(1)]))
    assert packed_samples([step]) == [0, 1]


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "virtual pipeline": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "fixed size": {"use_dynamic_batch_size": False},
    "rows": {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_equally_many_micro_batches_of_the_computed_samples(layout: str) -> None:
    config = run_config(max_tokens_per_gpu=12, **LAYOUTS[layout])
    steps = [step for [step] in policy_steps(half_without_gradient(), config, ranks=3)]
    assert packed_samples(steps) == [0, 1, 4, 5]
    assert len({len(step.micro_batches) for step in steps}) == 1
    assert {step.total_tokens for step in steps} == {20}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_a_step_without_any_gradient_every_rank_gets_empty_micro_batches(layout: str) -> None:
    groups = [Group([sample(0, 1.0), sample(1, 1.0)]), Group([sample(2, 0.0), sample(3, 0.0)])]
    steps = [step for [step] in policy_steps(groups, run_config(**LAYOUTS[layout]), ranks=2)]
    assert packed_samples(steps) == []
    assert len({len(step.micro_batches) for step in steps}) == 1
    assert [(step.total_tokens, step.skipped_tokens) for step in steps] == [(12, {NO_VERSION: 12})] * 2


@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_the_packing_report_is_that_of_a_batch_of_the_computed_samples_alone(layout: str) -> None:
    config = run_config(max_tokens_per_gpu=12, **LAYOUTS[layout])
    alone = [half_without_gradient()[0], half_without_gradient()[2]]
    reports = [policy_steps(groups, config, ranks=2)[0][0].packing for groups in (half_without_gradient(), alone)]
    assert reports[0] == reports[1]


def test_a_sample_without_an_advantage_may_be_longer_than_a_micro_batch() -> None:
    groups = [Group([sample(0, response=90), sample(1)]), Group([sample(2), sample(3, 0.0)])]
    [[step]] = policy_steps(groups, run_config(max_tokens_per_gpu=20), ranks=1)
    assert packed_samples([step]) == [2, 3]


def packed_share(**settings: Any) -> float:
    """Share of the samples of `half_without_gradient` that are packed."""
    [[step]] = policy_steps(half_without_gradient(), run_config(**settings), ranks=1)
    return len(packed_samples([step])) / 8


@pytest.mark.parametrize(
    "settings",
    [
        *({"advantage_estimator": name} for name in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")),
        *({"policy_objective": name} for name in ("ppo", "gspo", "cispo", "gmpo", "sapo", "reinforce", "topr")),
        *({"policy_objective": name, "off_policy_correction": "none"} for name in ("dppo", "m2po")),
        *({"off_policy_correction": name} for name in ("tis", "decoupled", "icepop", "sequence", "none")),
        {"grpo_std_normalization": False},
    ],
    ids=str,
)
def test_samples_without_an_advantage_are_skipped_if_every_term_of_the_loss_is_a_multiple_of_it(
    settings: dict[str, Any],
) -> None:
    assert packed_share(**settings) == 0.5


def test_reinforce_plus_plus_skips_samples_with_the_mean_reward_of_the_batch() -> None:
    rewards = [1.0, 0.5, 0.5, 0.0]
    config = run_config(advantage_estimator="reinforce_plus_plus")
    [[step]] = policy_steps([Group([sample(i, reward) for i, reward in enumerate(rewards)])], config, ranks=1)
    assert packed_samples([step]) == [0, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "sft_loss"},
        {"advantage_estimator": "ppo"},
        {"use_kl_loss": True},
        {"kl_coef": 0.1},
        {"entropy_coef": 0.01},
    ],
    ids=str,
)
def test_all_samples_are_packed_if_another_term_or_sample_depends_on_them(settings: dict[str, Any]) -> None:
    assert packed_share(**settings) == 1


@pytest.mark.parametrize(
    "shape, share",
    [({"num_experts": 8}, 0.5), ({"n_routed_experts": 8}, 1), ({"text_config": {"n_routed_experts": 8}}, 1)],
    ids=["without biases", "with biases", "with vision"],
)
def test_all_samples_are_packed_if_router_biases_depend_on_the_tokens_of_a_step(
    tmp_path: Path, shape: dict[str, Any], share: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert packed_share(hf_checkpoint=str(tmp_path)) == share
