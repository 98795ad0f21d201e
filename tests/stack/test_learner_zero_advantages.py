"""Samples without an advantage take no pass through the model, and the gradient is that of computing all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import TrainStep, policy_steps
from miles_async.config.schema import RunConfig, TinyModel
from miles_async.types import Group, Sample, VersionSpan
from tests.configuration import run_config
from tests.stack.learning import create_experts, gradients_of, learning, weights_of

ROUNDING = 1e-5
"""Largest relative difference of gradients that rounding explains."""
ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
"""Ways to average, which change the batch and not the learner."""
OTHER_LOSSES: list[dict[str, Any]] = [
    {"policy_objective": "gmpo"},
    {"policy_objective": "sapo"},
    {"policy_objective": "reinforce"},
    {"policy_objective": "topr"},
    {"policy_objective": "dppo", "off_policy_correction": "none"},
    {"off_policy_correction": "decoupled"},
    {"off_policy_correction": "icepop"},
    {"off_policy_correction": "sequence"},
    {"grpo_std_normalization": False},
    {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 8},
    {"use_dynamic_batch_size": False, "micro_batch_size": 3},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    create_tiny_model(TinyModel(num_layers=2, hidden_size=64, ffn_hidden_size=128), root / "dense", seed=1)
    create_experts(root / "experts", 1)
    return root


def config(**settings: Any) -> RunConfig:
    return run_config(**{"lr": 1e-3, "max_tokens_per_gpu": 40, "rollout_max_response_len": 16} | settings)


def groups(*rewards: tuple[float, float]) -> list[Group]:
    """Two samples for each pair of rewards, with the same prompt and the same length of 3 to 6 response tokens."""
    draw = random.Random(5)
    found = []
    for g, pair in enumerate(rewards):
        length = 3 + g % 4
        prompt = [draw.randrange(256) for _ in range(length)]
        samples = [
            Sample(
                index=2 * g + i,
                tokens=prompt + [draw.randrange(256) for _ in range(length)],
                response_length=length,
                rollout_log_probs=[-5.5 - draw.random() for _ in range(length)],
                reward=reward,
                spans=[VersionSpan(g % 3, 0, length)],
            )
            for i, reward in enumerate(pair)
        ]
        found.append(Group(samples))
    return found


def half_without_advantage() -> list[Group]:
    """The mean reward is 0.5 over every group, over all samples and over all tokens."""
    return groups((1.0, 0.0), (0.5, 0.5), (0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (0.5, 0.5), (0.5, 0.5), (0.0, 1.0))


def step_of(run: RunConfig, *, computes_all: bool = False) -> TrainStep:
    [[step]] = policy_steps(half_without_advantage(), run, ranks=1, computes_all=computes_all)
    return step


def computed_tokens(step: TrainStep) -> int:
    """The number of trained tokens that go through the model."""
    return sum(len(batch.targets) for batch in step.micro_batches)


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two gradients, relative to the norm of the second."""
    assert ours.keys() == theirs.keys()
    apart = sum((ours[name] - tensor).square().sum().item() for name, tensor in theirs.items())
    return float((apart / sum(tensor.square().sum().item() for tensor in theirs.values())) ** 0.5)


def assert_same_gradient(learner: MegatronLearner, run: RunConfig) -> None:
    skipping, complete = step_of(run), step_of(run, computes_all=True)
    assert (computed_tokens(skipping), computed_tokens(complete)) == (34, 72)
    expected = gradients_of(learner, complete)
    assert distance(gradients_of(learner, skipping), expected) < ROUNDING
    wrong = replace(skipping, total_tokens=computed_tokens(skipping))
    assert distance(gradients_of(learner, wrong), expected) > 0.5, "a mean over the computed tokens would be noticed"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_is_that_of_computing_all_samples(models: Path, estimator: str) -> None:
    runs = [config(advantage_estimator=estimator, loss_aggregation=aggregation) for aggregation in AGGREGATIONS]
    with learning(models / "dense", runs[0]) as learner:
        for run in runs:
            assert_same_gradient(learner, run)


@pytest.mark.parametrize("settings", OTHER_LOSSES, ids=str)
def test_other_objectives_corrections_and_layouts_give_the_same_gradient_too(
    models: Path, settings: dict[str, Any]
) -> None:
    run = config(**settings)
    with learning(models / "dense", run) as learner:
        assert_same_gradient(learner, run)


def test_a_mixture_of_experts_has_the_same_gradient_too(models: Path) -> None:
    run = config()
    with learning(models / "experts", run) as learner:
        assert_same_gradient(learner, run)


@pytest.mark.parametrize("ranks", [2, 3, 12])
def test_the_gradients_of_data_parallel_ranks_add_up_to_that_of_computing_all_samples(models: Path, ranks: int) -> None:
    run = config(max_tokens_per_gpu=30)
    steps = [step for [step] in policy_steps(half_without_advantage(), run, ranks=ranks)]
    assert len({len(step.micro_batches) for step in steps}) == 1
    with learning(models / "dense", run) as learner:
        expected = gradients_of(learner, step_of(run, computes_all=True))
        parts = [gradients_of(learner, step) for step in steps]
    total = {name: torch.stack([part[name] for part in parts]).sum(0) for name in expected}
    assert distance(total, expected) < ROUNDING


def test_later_steps_of_a_rollout_have_the_same_loss_and_gradient_norm(models: Path) -> None:
    """The ratio to the policy before the first step, which later steps clip, is then not 1."""
    run = config(num_steps_per_rollout=4, eps_clip=1e-3)
    found = []
    for computes_all in (False, True):
        # Twice the same samples, so that the second half has moved away from the policy before the first step.
        twice = half_without_advantage() + half_without_advantage()
        for index, sample in enumerate(sample for group in twice for sample in group):
            sample.index = index
        [steps] = policy_steps(twice, run, ranks=1, computes_all=computes_all)
        with learning(models / "dense", run) as learner:
            found.append(learner.train(0, steps).metrics)
    skipping, complete = found
    assert skipping["clip_fraction"] > 0
    for name in ("loss", "grad_norm", "loss_tokens"):
        assert skipping[name] == pytest.approx(complete[name], rel=1e-4, abs=1e-7), name


def test_counts_and_shares_are_over_all_tokens_and_the_other_metrics_over_the_computed_ones(models: Path) -> None:
    run = config(off_policy_correction="tis")
    computed = [group for group in half_without_advantage() if group[0].reward != group[1].reward]
    batches = {
        "skipping": policy_steps(half_without_advantage(), run, ranks=1),
        "complete": policy_steps(half_without_advantage(), run, ranks=1, computes_all=True),
        "computed": policy_steps(computed, run, ranks=1),
    }
    metrics = {}
    for name, [steps] in batches.items():
        with learning(models / "dense", run) as learner:
            learner.version = 2
            metrics[name] = learner.train(0, steps).metrics
    skipping, complete, alone = metrics["skipping"], metrics["complete"], metrics["computed"]
    assert (skipping["computed_fraction"], complete["computed_fraction"]) == (34 / 72, 1)
    assert skipping["loss_tokens"] == complete["loss_tokens"] == 72
    over_all = ["loss", "grad_norm", *(f"token_share_staleness_{age}" for age in range(3))]
    over_computed = ["entropy", "ess", "logprob_gap_mean", "logprob_gap_max", "importance_weight", "ess_staleness_1"]
    assert [skipping[name] for name in over_all] == pytest.approx([complete[name] for name in over_all], rel=1e-5)
    assert [skipping[name] for name in over_computed] == pytest.approx([alone[name] for name in over_computed])
    assert skipping["entropy"] != complete["entropy"]


@pytest.fixture
def nothing_to_learn() -> list[Group]:
    return groups((1.0, 1.0), (0.5, 0.5), (0.0, 0.0))


def test_a_step_without_any_advantage_changes_nothing(models: Path, nothing_to_learn: list[Group]) -> None:
    run = config()
    with learning(models / "dense", run) as learner:
        learner.train(0, [step_of(run)])
        before = weights_of(learner)
        [steps] = policy_steps(nothing_to_learn, run, ranks=1)
        report = learner.train(1, steps)
        after = weights_of(learner)
    assert report.finite
    assert (report.metrics["loss_tokens"], report.metrics["computed_fraction"]) == (24, 0)
    assert not {"ess", "entropy", "grad_norm"} & set(report.metrics), "their mean over no token is not 0"
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "not even by Adam's momentum"


@pytest.mark.parametrize(
    "settings", [{"entropy_coef": 0.1}, {"use_kl_loss": True, "kl_loss_coef": 0.1}], ids=["entropy bonus", "KL loss"]
)
def test_terms_without_an_advantage_are_learned_from_all_samples(
    models: Path, nothing_to_learn: list[Group], settings: dict[str, Any]
) -> None:
    run = config(**settings)
    [[step]] = policy_steps(nothing_to_learn, run, ranks=1)
    with learning(models / "dense", run) as learner:
        gradients = gradients_of(learner, step)
    assert computed_tokens(step) == 24
    assert sum(tensor.square().sum().item() for tensor in gradients.values()) > 0
