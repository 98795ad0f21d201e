"""Inputs of the loss that one optimizer step or batch has in common, on one rank of the real learner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import TinyModel
from miles_async.types import Group
from tests.stack.learning import learning
from tests.stack.test_learner_settings import SMALL, batch, config

pytestmark = pytest.mark.stack


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in ((1, "tiny"), (2, "reference")):
        create_tiny_model(TinyModel(**SMALL), root / name, seed=seed)
    return root / "tiny"


def on_policy(learner: MegatronLearner, groups: list[Group]) -> list[Group]:
    """The groups with the log-probabilities that the learner gives their tokens."""
    for sample in (sample for group in groups for sample in group):
        [logprobs] = learner.logprobs([sample.tokens])
        sample.rollout_log_probs = logprobs[-sample.response_length :]
    return groups


def test_m2po_clips_tokens_that_earlier_steps_on_the_batch_have_moved(tiny: Path) -> None:
    run = config(policy_objective="m2po", off_policy_correction="none", lr=0.1)
    with learning(tiny, run) as learner:
        groups = on_policy(learner, batch(0))
        [[one_step]] = rank_batches(groups, config(num_steps_per_rollout=1), 1)
        assert learner.train(0, [one_step]).metrics["clip_fraction"] == 0
    with learning(tiny, run) as learner:
        # The second step trains the same samples, whose ratios the first one has moved away from 1.
        report = learner.train(0, [one_step, one_step])
        assert report.finite
        assert report.metrics["clip_fraction"] > 0.1
