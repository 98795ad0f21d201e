"""Optimizers that keep less on the GPU learn the same, and can be rolled back, moved, saved and loaded.

The main memory of the machine stands for that of a GPU, and a copy of its computation for Transformer Engine's Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from miles_async.adapters.megatron.model.factory import build_model
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training import offloading
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import Snapshot, distinct_storages, model_tensors
from miles_async.batching.batch import rank_batches
from miles_async.config.memory import learner_job, planned_model
from miles_async.config.schema import RunConfig, TinyModel
from miles_async.errors import UserError
from miles_async.planning.plan import GIB, HOST_GRADIENT, plan_learner
from tests.configuration import run_config
from tests.stack.fused_adam import transformer_engines_adam
from tests.stack.learning import learning, save_state, uneven_groups, weights_of
from tests.stack.pretended_device import in_main_memory, pretended_gpu


class Kind(NamedTuple):
    """An optimizer, and where it exists."""

    settings: dict[str, Any] = {}
    where: Callable[[], AbstractContextManager[None]] = nullcontext


@contextmanager
def both() -> Iterator[None]:
    with pretended_gpu(), transformer_engines_adam():
        yield


OFFLOADED = {"optimizer_cpu_offload": True}
HALF = OFFLOADED | {"optimizer_offload_fraction": 0.5}
AWARE = {"use_precision_aware_optimizer": True}
USUAL = "torch's Adam"
EXACT = {
    "offloaded": Kind(OFFLOADED, pretended_gpu),
    "half offloaded": Kind(HALF, pretended_gpu),
    "half offloaded, half Transformer Engine's": Kind(HALF, both),
    "offloaded, overlapped": Kind(OFFLOADED | {"overlap_cpu_optimizer_d2h_h2d": True}, pretended_gpu),
    "Transformer Engine's": Kind({}, transformer_engines_adam),
    "precision-aware": Kind(AWARE, transformer_engines_adam),
}
"""They compute what torch's Adam computes, up to rounding."""
SMALLER = {
    "precision-aware, small": Kind(
        AWARE | {"main_params_dtype": "fp16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"},
        transformer_engines_adam,
    ),
    "gradients in bf16": Kind(OFFLOADED | {"main_grads_dtype": "bf16"}, pretended_gpu),
}
"""They round what they keep."""
OTHERS = EXACT | SMALLER
KINDS = {USUAL: Kind()} | OTHERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    create_tiny_model(TinyModel(num_layers=2, hidden_size=64, ffn_hidden_size=128), path, seed=1)
    return path


def config(kind: str, **settings: Any) -> RunConfig:
    given = KINDS[kind].settings | settings
    return run_config(precision="bf16", lr=1e-3, weight_decay=0.1, max_tokens_per_gpu=40, **given)


@contextmanager
def learner_with(model: Path, kind: str, **settings: Any) -> Iterator[MegatronLearner]:
    with KINDS[kind].where(), learning(model, config(kind, **settings)) as learner:
        yield learner


def train(learner: MegatronLearner, *batches: int) -> None:
    for number in batches:
        assert learner.train(number, rank_batches(uneven_groups(number), config(USUAL), 1)[0]).finite


@cache
def learned(model: Path, kind: str, *batches: int) -> dict[str, Tensor]:
    """The weights after these batches. Several tests compare with the same ones."""
    with learner_with(model, kind) as learner:
        train(learner, *batches)
        return weights_of(learner)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def almost_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Up to a rounding to bfloat16."""
    return ours.keys() == theirs.keys() and all(
        torch.allclose(tensor, theirs[name], rtol=2**-7, atol=1e-8) for name, tensor in ours.items()
    )


@pytest.mark.parametrize("kind", EXACT)
def test_steps_are_the_same_wherever_the_state_is(model: Path, kind: str) -> None:
    assert almost_same(learned(model, kind, 0, 1, 2), learned(model, USUAL, 0, 1, 2))


@pytest.mark.parametrize("kind", SMALLER)
def test_a_state_in_fewer_bits_changes_the_steps_a_little(model: Path, kind: str) -> None:
    ours, exact, before = learned(model, kind, 0, 1), learned(model, USUAL, 0, 1), learned(model, USUAL)
    changed = sum((tensor.float() - before[one].float()).square().sum() for one, tensor in exact.items())
    apart = sum((tensor.float() - ours[one].float()).square().sum() for one, tensor in exact.items())
    assert 0 < apart < 0.1**2 * changed


@pytest.mark.parametrize("before", [(), (0,)], ids=["before the first step", "later"])
@pytest.mark.parametrize("kind", OTHERS)
def test_steps_after_a_rollback_are_those_of_a_run_without_it(model: Path, kind: str, before: tuple[int, ...]) -> None:
    with learner_with(model, kind) as learner:
        train(learner, *before)
        snapshot = Snapshot(learner._model)
        train(learner, 1, 4)
        snapshot.restore()
        train(learner, 2, 3)
        rolled_back = weights_of(learner)
    assert same(rolled_back, learned(model, kind, *before, 2, 3))


@pytest.mark.parametrize("before", [(), (0,)], ids=["before the first step", "later"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_resumed_run_takes_the_steps_of_one_that_was_not_interrupted(
    model: Path, tmp_path: Path, kind: str, before: tuple[int, ...]
) -> None:
    with learner_with(model, kind) as learner:
        train(learner, *before)
        save_state(learner, tmp_path)
    with learner_with(model, kind) as learner:
        train(learner, 4)
        learner.load_state(str(tmp_path))
        train(learner, 2, 3)
        resumed = weights_of(learner)
    assert same(resumed, learned(model, kind, *before, 2, 3))


@pytest.fixture(scope="module")
def usual_checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two batches."""
    folder = tmp_path_factory.mktemp("usual")
    save_after_two(model, USUAL, folder)
    return folder


def save_after_two(model: Path, kind: str, folder: Path) -> None:
    with learner_with(model, kind) as learner:
        train(learner, 0, 1)
        save_state(learner, folder)


@pytest.mark.parametrize("kind", EXACT)
def test_a_run_resumes_with_another_optimizer(model: Path, tmp_path: Path, usual_checkpoint: Path, kind: str) -> None:
    save_after_two(model, kind, tmp_path)
    for other, checkpoint in ((USUAL, tmp_path), (kind, usual_checkpoint)):
        with learner_with(model, other) as learner:
            learner.load_state(str(checkpoint))
            train(learner, 2)
            assert almost_same(weights_of(learner), learned(model, USUAL, 0, 1, 2))


def sizes(learner: MegatronLearner) -> tuple[int, int]:
    """Bytes of weights and optimizer on the pretended GPU and in main memory."""
    tensors = [(in_main_memory(tensor), tensor) for tensor in model_tensors(learner._model)]
    on_device, on_host = (distinct_storages(one for host, one in tensors if host is there) for there in (False, True))
    return sum(one.nbytes() for one in on_device.values()), sum(one.nbytes() for one in on_host.values())


@pytest.mark.parametrize("kind", ["offloaded", "precision-aware", "precision-aware, small"])
def test_the_plan_counts_what_the_optimizer_keeps(model: Path, kind: str) -> None:
    settings = config(kind, hf_checkpoint=str(model))
    architecture = planned_model(settings)
    assert architecture is not None
    job = learner_job(settings, architecture, GIB)
    [plan] = plan_learner(job)
    with learner_with(model, kind, hf_checkpoint=str(model)) as learner:
        train(learner, 0)
        on_device, on_host = sizes(learner)
    assert on_device == pytest.approx(plan.weights + plan.optimizer, rel=0.01)
    [without] = plan_learner(replace(job, offloaded=0.0))
    gradients = HOST_GRADIENT * job.offloaded * architecture.weights(job.split).total
    assert on_host == pytest.approx(plan.host - without.host - gradients, rel=0.01)


def test_a_part_of_the_state_is_offloaded(model: Path) -> None:
    with learner_with(model, "half offloaded") as learner:
        train(learner, 0)
        on_device, on_host = sizes(learner)
        weights = sum(chunk.buffers[0].param_data.nbytes for chunk in learner._model.chunks)
    # Megatron moves whole parameters, until it has moved enough.
    assert weights < on_device < weights + 12 / 2 * weights / 2
    assert on_host > 12 / 2 * weights / 2


def test_each_parameter_has_an_optimizer_of_its_own_beside_copies(model: Path) -> None:
    """So that the CPU computes the step of one while others are copied."""
    numbers = []
    for kind in ("offloaded", "offloaded, overlapped"):
        with learner_with(model, kind) as learner:
            numbers.append(len(learner._model.inner_optimizers))
    assert numbers[0] == 1 < numbers[1]


def test_the_optimizer_holds_what_the_settings_say(model: Path) -> None:
    with learner_with(model, "precision-aware, small", main_grads_dtype="bf16") as learner:
        train(learner, 0)
        [inner] = learner._model.inner_optimizers
        types = {(name, value.dtype) for state in inner.state.values() for name, value in state.items()}
        assert types == {
            ("master_param", torch.float16),
            ("exp_avg", torch.bfloat16),
            ("exp_avg_sq", torch.float16),
        }
        assert learner._model.chunks[0].buffers[0].grad_data.dtype is torch.bfloat16


def test_a_loaded_state_holds_no_memory_of_other_ranks(model: Path, tmp_path: Path) -> None:
    with learner_with(model, "offloaded") as learner:
        train(learner, 0)
        before = sizes(learner)
        save_state(learner, tmp_path)
        learner.load_state(str(tmp_path))
        assert sizes(learner) == before
        states = [state for one in learner._model.inner_optimizers for state in one.state.values()]
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for state in states for tensor in state.values())


def test_what_is_in_main_memory_stays_there_while_engines_use_the_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learner_with(model, "half offloaded") as learner:
        train(learner, 0)
        on_device, on_host = sizes(learner)
        monkeypatch.setattr(offloading, "on_cpu", lambda: False)
        monkeypatch.setattr(offloading, "_is_on", lambda device, tensor: not in_main_memory(tensor))
        learner.offload()
        assert sizes(learner) == (0, on_host)
        learner.onload()
        assert sizes(learner) == (on_device, on_host)
        train(learner, 1)
        continued = weights_of(learner)
    assert same(continued, learned(model, "half offloaded", 0, 1))


@pytest.mark.parametrize("kind, said", [("offloaded", "runs on CPUs"), ("precision-aware", "needs a GPU")])
def test_a_cpu_has_nothing_to_offload_and_no_optimizer_of_transformer_engine(model: Path, kind: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_model(config(kind).learner, str(model))
