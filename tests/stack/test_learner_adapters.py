"""A learner of several adapters trains each of them as a learner without the others would, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.models.lora import read_tensors
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.learning import learning

TURNS = ("math", "code", "math", "math", "code", "chat", "math", "code")
"""The adapter of each batch."""


def config(*adapters: str, **settings: Any) -> RunConfig:
    usual: dict[str, Any] = {"num_steps_per_rollout": 2, "lr_decay_style": "constant", "lr_warmup_steps": 2}
    return run_config(
        adapters={name: {} for name in adapters},
        num_rollout=len(TURNS),
        lora_rank=4,
        lr=1e-2,
        weight_decay=0.01,
        **usual | settings,
    )


def train(learner: MegatronLearner, rollout: int, trained: RunConfig | None = None) -> float:
    """Train a recorded batch, the same for every learner. Returns the learning rate."""
    draw = random.Random(rollout)
    groups = [
        Group(
            Sample(
                index=2 * g + i,
                tokens=[draw.randrange(256) for _ in range(8 + g)],
                response_length=4,
                rollout_log_probs=[-5.0 - draw.random() for _ in range(4)],
                reward=draw.random(),
            )
            for i in range(2)
        )
        for g in range(4)
    ]
    [steps] = rank_batches(groups, trained or config(), 1)
    report = learner.train(rollout, steps)
    assert report.finite
    return report.metrics["lr"]


def adapters_of(learner: MegatronLearner) -> dict[str, dict[str, torch.Tensor]]:
    return {name: learner.adapter() for name in learner.adapters}


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Each adapter, trained by a learner that has no other."""
    trained = {}
    for name in sorted(set(TURNS)):
        with learning(tiny, config()) as learner:
            for rollout, turn in enumerate(TURNS):
                if turn == name:
                    train(learner, rollout)
            trained[name] = learner.adapter()
    return trained


def check(found: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        assert tensors.keys() == found[name].keys()
        assert all(torch.equal(found[name][key], tensor) for key, tensor in tensors.items()), name


def test_adapters_that_take_turns_are_those_of_learners_of_their_own(
    tiny: Path, alone: dict[str, dict[str, torch.Tensor]]
) -> None:
    with learning(tiny, config("chat", "code", "math")) as learner:
        for rollout, turn in enumerate(TURNS):
            learner.adapters.select(turn)
            train(learner, rollout)
        check(adapters_of(learner), alone)


@pytest.mark.parametrize("stopped", [0, 4])
def test_a_checkpoint_holds_all_adapters(
    tiny: Path, tmp_path: Path, stopped: int, alone: dict[str, dict[str, torch.Tensor]]
) -> None:
    with learning(tiny, config("chat", "code", "math")) as learner:
        for rollout in range(stopped):
            learner.adapters.select(TURNS[rollout])
            train(learner, rollout)
        copy = learner.copy_state(str(tmp_path / "saved"))
        copy.finish([copy.write()])
    with learning(tiny, config("chat", "code", "math")) as resumed:
        resumed.load_state(str(tmp_path / "saved"))
        for rollout in range(stopped, len(TURNS)):
            resumed.adapters.select(TURNS[rollout])
            train(resumed, rollout)
        check(adapters_of(resumed), alone)


def test_the_learning_rate_of_each_adapter_falls_with_the_steps_of_all(tiny: Path, tmp_path: Path) -> None:
    several = config("chat", "code", "math", num_steps_per_rollout=1, lr_decay_style="linear", lr_warmup_steps=0)
    rates = []
    for rollouts in (range(4), range(4, len(TURNS))):
        with learning(tiny, several) as learner:
            if rollouts.start:
                learner.load_state(str(tmp_path / "saved"))
            for rollout in rollouts:
                learner.adapters.select(TURNS[rollout])
                rates.append(train(learner, rollout, several))
            if not rollouts.start:
                copy = learner.copy_state(str(tmp_path / "saved"))
                copy.finish([copy.write()])
    assert rates == pytest.approx([1e-2 * (1 - rollout / len(TURNS)) for rollout in range(len(TURNS))])


def test_each_adapter_is_exported_to_a_folder_of_its_own(
    tiny: Path, tmp_path: Path, alone: dict[str, dict[str, torch.Tensor]]
) -> None:
    with learning(tiny, config("chat", "code", "math")) as learner:
        for rollout, turn in enumerate(TURNS):
            learner.adapters.select(turn)
            train(learner, rollout)
        learner.copy_state(None, str(tmp_path / "exported")).write()
    check({name: dict(read_tensors(tmp_path / "exported" / name)) for name in alone}, alone)


def test_an_adapter_that_the_run_does_not_have_cannot_be_selected(tiny: Path) -> None:
    with learning(tiny, config("chat", "code")) as learner, pytest.raises(KeyError):
        learner.adapters.select("math")
