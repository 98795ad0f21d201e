"""The real learner calls the hooks of a user between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from miles_async.adapters.megatron.model.process_groups import destroy_process_groups
from miles_async.adapters.megatron.training.hooks import LearnerHooks
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.rollout.contract import flat_args
from tests.configuration import run_config
from tests.stack.learning import uneven_groups

CALLS: list[Any] = []


def note_start(args: Any) -> None:
    CALLS.append((args.lr, dist.is_initialized()))


def note_scoring(args: Any, model: Any, store_prefix: str) -> None:
    wrapped = all(isinstance(chunk, DistributedDataParallel) for chunk in model)
    CALLS.append((store_prefix, "trained" if wrapped else "frozen"))


def note_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: object
) -> None:
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    cleared = not any(parameter.main_grad.any() for parameter in parameters)
    moments = len(optimizer.state) > 0
    CALLS.append((rollout_id, step_id, cleared, moments))


def broken(args: Any, *others: Any) -> None:
    raise KeyError("expert_bias")


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


@contextmanager
def hooked(checkpoint: Path, config: RunConfig) -> Iterator[MegatronLearner]:
    hooks = LearnerHooks.load(config, flat_args(config))
    try:
        yield MegatronLearner(config, str(checkpoint), 0, 1, "127.0.0.1", free_port(), hooks=hooks)
    finally:
        destroy_process_groups()


def config(steps: int = 2, **settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": 3, "n_samples_per_prompt": 4, "num_steps_per_rollout": steps}
    return run_config(lr=1e-4, max_tokens_per_gpu=40, **sizes, **settings)


def train(checkpoint: Path, run: RunConfig, rollout_id: int = 0) -> None:
    with hooked(checkpoint, run) as learner:
        learner.train(rollout_id, rank_batches(uneven_groups(0), run, 1)[0])


def test_the_hook_of_the_start_is_called_before_the_model_is_built(tiny: Path) -> None:
    run = config(custom_megatron_init_path=f"{__name__}.note_start")
    with hooked(tiny, run):
        assert CALLS == [(1e-4, True)]
    broken_start = config(custom_megatron_init_path=f"{__name__}.broken")
    with pytest.raises(UserError, match=rf"^custom_megatron_init_path {__name__}.broken raised KeyError"):
        train(tiny / "no checkpoint", broken_start)


@pytest.mark.parametrize(
    "steps, settings, expected",
    [
        (1, {}, []),
        (2, {}, [("", "trained")] * 2),
        (2, {"use_kl_loss": True}, [("ref_", "frozen"), ("", "trained")] * 2),
    ],
    ids=["one step", "two steps", "two steps and a reference model"],
)
def test_a_hook_is_called_before_log_probabilities_are_computed(
    tiny: Path, steps: int, settings: dict[str, Any], expected: list[Any]
) -> None:
    path = f"{__name__}.note_scoring"
    train(tiny, config(steps, custom_megatron_before_log_prob_hook_path=path, **settings))
    assert expected == CALLS


def test_a_hook_is_called_before_each_optimizer_step(tiny: Path) -> None:
    """The optimizer has its moments after the first step."""
    train(tiny, config(custom_megatron_before_train_step_hook_path=f"{__name__}.note_step"), rollout_id=7)
    assert CALLS == [(7, 0, True, False), (7, 1, True, True)]


def test_a_hook_changes_the_weights_that_a_step_trains(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(steps=1, custom_megatron_before_train_step_hook_path=f"{__name__}.note_step")
    [steps] = rank_batches(uneven_groups(0), run, 1)

    def entropy() -> float:
        with hooked(tiny, run) as learner:
            return learner.train(0, steps).metrics["entropy"]

    def flatten(args: Any, rollout_id: int, step_id: int, model: Any, *others: Any) -> None:
        with torch.no_grad():
            for parameter in model[-1].parameters():
                parameter.zero_()

    usual = entropy()
    monkeypatch.setitem(globals(), "note_step", flatten)
    assert entropy() > usual


@pytest.mark.parametrize("when", ["log_prob", "train_step"])
def test_a_hook_that_raises_is_named(tiny: Path, when: str) -> None:
    setting = f"custom_megatron_before_{when}_hook_path"
    with pytest.raises(UserError, match=rf"^{setting} {__name__}.broken raised KeyError: 'expert_bias': correct"):
        train(tiny, config(2, **{setting: f"{__name__}.broken"}))
