"""A run that was stopped and resumed learns, bit for bit, what an uninterrupted one learns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.disks import files_at_most
from tests.stack.learning import TINY, learning, save_state, weights_of

STOPPED, AFTER = 3, 10


def config() -> RunConfig:
    return run_config(
        num_rollout=STOPPED + AFTER + 1,
        num_steps_per_rollout=2,
        lr=1e-3,
        lr_warmup_steps=5,
        lr_decay_style="linear",
        weight_decay=0.01,
    )


def train(learner: MegatronLearner, rollouts: range) -> None:
    """Recorded rollouts: the same for every learner."""
    for rollout in rollouts:
        draw = random.Random(rollout)
        groups = [
            Group(
                Sample(
                    index=2 * g + i,
                    tokens=[draw.randrange(256) for _ in range(8 + g)],
                    response_length=4,
                    rollout_log_probs=[-5.0 - draw.random() for _ in range(4)],
                    reward=float(i),
                )
                for i in range(2)
            )
            for g in range(4)
        ]
        [steps] = rank_batches(groups, config(), 1)
        assert learner.train(rollout, steps).finite


@pytest.mark.parametrize("stopped", [0, STOPPED])
def test_ten_rollouts_after_the_stop_the_weights_are_those_of_an_unbroken_run(
    tiny: Path, tmp_path: Path, stopped: int
) -> None:
    with learning(tiny, config()) as unbroken:
        train(unbroken, range(stopped))
        copy = unbroken.copy_state(str(tmp_path))
        train(unbroken, range(stopped, stopped + AFTER))
        copy.finish([copy.write()])
        expected = weights_of(unbroken)
    with learning(tiny, config()) as resumed:
        resumed.load_state(str(tmp_path))
        train(resumed, range(stopped, stopped + AFTER))
        found = weights_of(resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_that_does_not_fit_is_refused(tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with learning(tiny, config()) as learner:
        train(learner, range(1))
        save_state(learner, saved)
    create_tiny_model(TINY.model_copy(update={"ffn_hidden_size": 64}), tmp_path / "wider", seed=1)
    create_tiny_model(TINY.model_copy(update={"num_layers": 2}), tmp_path / "deeper", seed=1)
    for other in ("wider", "deeper"):
        with (
            learning(tmp_path / other, config()) as learner,
            pytest.raises(UserError, match=r"belongs to another model: .*decoder"),
        ):
            learner.load_state(str(saved))
    with learning(tiny, config()) as learner:
        [data] = (saved / "actor").glob("*.distcp")
        whole = data.read_bytes()
        data.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=r"cannot be read: .*; load another one"):
            learner.load_state(str(saved))
        (saved / "actor" / "metadata.json").unlink()
        with pytest.raises(UserError, match=r"not a Megatron distributed checkpoint: .*; load another one"):
            learner.load_state(str(saved))


@pytest.mark.parametrize("exports", [False, True])
def test_a_full_disk_is_reported_while_a_checkpoint_is_written(tiny: Path, tmp_path: Path, exports: bool) -> None:
    with learning(tiny, config()) as learner:
        copy = learner.copy_state(None, str(tmp_path / "export")) if exports else learner.copy_state(str(tmp_path))
        with files_at_most(20_000), pytest.raises(OSError, match="disk is full"):
            copy.write()
