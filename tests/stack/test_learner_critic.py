"""PPO with a critic, on one rank of the real learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from tests.stack.learning import TINY, learning, save_state, weights_of
from tests.stack.test_learner_settings import batch, config, same


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        create_tiny_model(TINY, root / f"tiny-{seed}", seed=seed)
    return root / "tiny-1"


def ppo(**settings: Any) -> RunConfig:
    return config(**{"advantage_estimator": "ppo", "critic_lr": 3e-3} | settings)


def train(learner: MegatronLearner, run: RunConfig, rollouts: range, seed: int | None = None) -> list[dict[str, float]]:
    """The metrics of each; two passes over the same samples, so that values move within a rollout."""
    metrics = []
    for rollout in rollouts:
        [steps] = rank_batches(batch(rollout if seed is None else seed) * 2, run, 1)
        report = learner.train(rollout, steps)
        assert report.finite
        metrics.append({name: value for name, value in report.metrics.items() if name != "memory_gib"})
    return metrics


def learned(tiny: Path, **settings: Any) -> dict[str, torch.Tensor]:
    run = ppo(**settings)
    with learning(tiny, run) as learner:
        train(learner, run, range(3))
        return weights_of(learner)


@pytest.fixture(scope="module")
def usual(tiny: Path) -> dict[str, torch.Tensor]:
    return learned(tiny)


@pytest.mark.parametrize(
    "setting",
    [
        {"gamma": 0.5},
        {"lambd": 0.5},
        {"normalize_advantages": True},
        {"value_clip": 1e-4},
        {"critic_lr": 1e-4},
        {"critic_lr_warmup_steps": 4},
        {"critic_load": "tiny-2"},
        {"kl_coef": 1.0},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_another_setting_of_the_critic_learns_other_weights(
    tiny: Path, usual: dict[str, torch.Tensor], setting: dict[str, Any]
) -> None:
    if "critic_load" in setting:
        setting = {"critic_load": str(tiny.parent / setting["critic_load"])}
    assert not same(learned(tiny, **setting), usual)


@pytest.mark.parametrize("aggregation, expected", [("sequence_mean", 0.25), ("token_mean", 0.1)])
def test_the_critic_averages_over_samples_or_tokens_as_the_policy_does(
    tiny: Path, aggregation: str, expected: float
) -> None:
    """A new critic predicts 0. Two samples with the reward 1 train one token each, two without reward four each."""
    groups = batch(0)
    for group in groups:
        group[1].loss_mask = [0, 0, 0, 1]
    run = ppo(num_critic_only_steps=5, num_rollout=6, num_steps_per_rollout=1, loss_aggregation=aggregation)
    with learning(tiny, run) as learner:
        [steps] = rank_batches(groups, run, 1)
        assert learner.train(0, steps).metrics["value_loss"] == pytest.approx(expected)


def test_the_policy_is_frozen_while_only_the_critic_learns(tiny: Path) -> None:
    run = ppo(num_critic_only_steps=5, num_rollout=6)
    with learning(tiny, run) as learner:
        before = weights_of(learner)
        metrics = train(learner, run, range(5), seed=0)
        assert same(weights_of(learner), before)
        assert "grad_norm" not in metrics[0]
        assert metrics[-1]["value_loss"] < 0.5 * metrics[0]["value_loss"], "the same samples, over and over"
        assert metrics[-1]["explained_variance"] > metrics[0]["explained_variance"]
        [after] = train(learner, run, range(5, 6), seed=0)
        assert not same(weights_of(learner), before)
        assert after["grad_norm"] > 0


def test_a_new_critic_predicts_zero_so_the_advantage_of_every_token_is_the_full_reward(tiny: Path) -> None:
    run = ppo()
    with learning(tiny, run) as learner:
        assert learner._critic is not None
        [[step, _]] = rank_batches(batch(0) * 2, run, 1)
        _, of_tokens, _ = learner._critic.evaluate(step, None)
        for packed, advantages in zip(step.micro_batches, of_tokens, strict=True):
            assert torch.equal(advantages, torch.from_numpy(packed.advantages))


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_a_completely_masked_batch_changes_nothing(tiny: Path, estimator: str) -> None:
    run = config(advantage_estimator=estimator)
    with learning(tiny, run) as learner:
        train(learner, run, range(1))
        before = weights_of(learner)
        masked = batch(1) * 2
        for group in masked:
            for sample in group:
                sample.remove_sample = True
        report = learner.train(1, rank_batches(masked, run, 1)[0])
        assert report.finite
        assert report.metrics["loss_tokens"] == 0
        assert same(weights_of(learner), before), "not even by the momentum of the step before"


def test_a_resumed_run_has_the_same_critic(tiny: Path, tmp_path: Path) -> None:
    run = ppo()
    with learning(tiny, run) as unbroken:
        train(unbroken, run, range(2))
        save_state(unbroken, tmp_path)
        expected_metrics = train(unbroken, run, range(2, 4))
        expected = weights_of(unbroken)
    with learning(tiny, run) as resumed:
        resumed.load_state(str(tmp_path))
        assert train(resumed, run, range(2, 4)) == expected_metrics
        assert same(weights_of(resumed), expected)


def test_a_step_that_is_not_finite_restores_the_critic(tiny: Path) -> None:
    run = ppo()
    with learning(tiny, run) as learner:
        train(learner, run, range(1))
        before = weights_of(learner)
        for spoiled in ({"rollout_log_probs": [float("nan")] * 4}, {"reward": float("nan")}, {"reward": float("inf")}):
            poisoned = batch(1) * 2
            poisoned[0][0] = replace(poisoned[0][0], **spoiled)
            [steps] = rank_batches(poisoned, run, 1)
            assert not learner.train(1, steps).finite
            assert same(weights_of(learner), before)
        found = train(learner, run, range(1, 2))
    with learning(tiny, run) as undisturbed:
        assert train(undisturbed, run, range(2))[1:] == found
