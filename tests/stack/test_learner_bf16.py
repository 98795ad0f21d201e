"""The learner in bfloat16, whose optimizer weights, gradients and loss stay in float32, on CPUs too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_async.adapters.megatron.model import host_memory
from miles_async.adapters.megatron.training import offloading
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import model_tensors
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.learning import learning, save_state, weights_of

# Micro-batches of two sequences, so that gradients are added up over several.
LEARNER = {
    "precision": "bf16",
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "adam_beta2": 0.98,
    "loss_aggregation": "token_mean",
    "off_policy_correction": "tis",
    "kl_loss_type": "k3",
    "max_tokens_per_gpu": 16,
}
NORM = "model.layers.0.input_layernorm.weight"


def config(**settings: Any) -> RunConfig:
    return run_config(**LEARNER | settings, num_rollout=100)


def batch(rollout: int, *, poison: bool = False) -> list[Group]:
    draw = random.Random(rollout)
    return [
        Group(
            Sample(
                index=2 * g + i,
                tokens=[draw.randrange(256) for _ in range(8)],
                response_length=4,
                rollout_log_probs=[-5.0 - draw.random() for _ in range(4)],
                reward=float("nan") if poison and g == 3 else float(i),
            )
            for i in range(2)
        )
        for g in range(4)
    ]


def train(learner: MegatronLearner, run: RunConfig, rollouts: Sequence[int]) -> list[dict[str, float]]:
    metrics = []
    for rollout in rollouts:
        [steps] = rank_batches(batch(rollout), run, 1)
        report = learner.train(rollout, steps)
        assert report.finite
        metrics.append(dict(report.metrics))
    return metrics


def masters(learner: MegatronLearner) -> list[torch.Tensor]:
    """The optimizer's own weights."""
    return [master.clone() for group in learner._model.optimizer.param_groups for master in group["params"]]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_bfloat16_learns_what_float32_does(tiny: Path) -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        run = config(precision=precision, loss_type="sft_loss", lr=1e-2)
        with learning(tiny, run) as learner:
            found[precision] = train(learner, run, [0] * 8)
            assert {tensor.dtype for tensor in weights_of(learner).values()} == {
                torch.bfloat16 if precision == "bf16" else torch.float32
            }
    mixed, full = found["bf16"], found["fp32"]
    assert mixed[0]["micro_batches"] == 4
    assert mixed[-1]["loss"] < 0.7 * mixed[0]["loss"]
    for ours, theirs in zip(mixed, full, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)


@pytest.mark.parametrize(
    "algorithm",
    [{"use_kl_loss": True, "kl_loss_coef": 0.1}, {"advantage_estimator": "ppo", "kl_coef": 0.1}],
    ids=["reference model", "critic"],
)
def test_policy_reference_model_and_critic_agree_with_their_float32(tiny: Path, algorithm: dict[str, Any]) -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        run = config(**algorithm, precision=precision, num_steps_per_rollout=2)
        with learning(tiny, run) as learner:
            found[precision] = train(learner, run, range(4))[-1]
    mixed, full = found["bf16"], found["fp32"]
    figures = {"loss", "entropy", "grad_norm", "kl", "value_loss", "critic_grad_norm"} & full.keys()
    assert {name: mixed[name] for name in figures} == pytest.approx({name: full[name] for name in figures}, rel=0.1)


def test_updates_that_bfloat16_would_round_away_add_up(tiny: Path) -> None:
    """Next to 1, where norms begin, bfloat16 knows no number nearer than 0.004: a step of 0.0001 alone is lost."""
    run = config(loss_type="sft_loss", lr=1e-4, adam_beta2=0.9)
    with learning(tiny, run) as learner:
        train(learner, run, [0])
        assert torch.equal(weights_of(learner)[NORM], torch.ones(32, dtype=torch.bfloat16))
        train(learner, run, [0] * 39)
        assert (weights_of(learner)[NORM] != 1).any()
        assert {tensor.dtype for tensor in masters(learner)} == {torch.float32}
        assert {buffer.grad_data.dtype for chunk in learner._model.chunks for buffer in chunk.buffers} == {
            torch.float32
        }


def test_a_resumed_run_has_the_same_float32_weights(tiny: Path, tmp_path: Path) -> None:
    run = config()
    with learning(tiny, run) as unbroken:
        train(unbroken, run, range(3))
        save_state(unbroken, tmp_path / "state")
        stopped = masters(unbroken)
        train(unbroken, run, range(3, 8))
        expected = masters(unbroken)
    with learning(tiny, run) as resumed:
        resumed.load_state(str(tmp_path / "state"))
        assert same(masters(resumed), stopped)
        assert not same([master.bfloat16().float() for master in stopped], stopped)
        train(resumed, run, range(3, 8))
        assert same(masters(resumed), expected)


@pytest.mark.parametrize("before, after", [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_run_resumes_in_another_precision_from_its_float32_weights(
    tiny: Path, tmp_path: Path, before: str, after: str
) -> None:
    run = config(precision=before)
    with learning(tiny, run) as learner:
        train(learner, run, range(2))
        save_state(learner, tmp_path / "state")
        stopped = float32_weights(learner)
    run = config(precision=after)
    with learning(tiny, run) as learner:
        learner.load_state(str(tmp_path / "state"))
        assert same(float32_weights(learner), stopped)
        train(learner, run, [2])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_learner_whose_memory_was_freed_for_an_engine_continues_as_if_it_had_not(
    tiny: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(precision=precision, use_kl_loss=True)
    with learning(tiny, run) as learner:
        train(learner, run, range(3))
        expected = list(weights_of(learner).values()), masters(learner)
    monkeypatch.setattr(offloading, "on_cpu", lambda: False)
    with learning(tiny, run) as learner:
        train(learner, run, [0])
        for rollout in (1, 2):
            learner.offload()
            learner.offload()
            tensors = list(model_tensors(learner._model))
            assert learner._reference is not None
            tensors += [parameter for chunk in learner._reference.chunks for parameter in chunk.parameters()]
            assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
            learner.onload()
            train(learner, run, [rollout])
        assert same(list(weights_of(learner).values()), expected[0])
        assert same(masters(learner), expected[1])


def test_host_memory_that_is_kept_serves_rollbacks_offloading_and_checkpoints(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but with memory that is not pinned."""
    run = config(grpo_std_normalization=False, num_steps_per_rollout=2)
    for module in (host_memory, offloading):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    monkeypatch.setattr(host_memory, "_pinned", lambda size: np.empty(size, np.uint8))
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda _: None, raising=False)
    with learning(tiny, run) as learner:
        for rollout in (0, 1):
            train(learner, run, [rollout])
            save_state(learner, tmp_path / str(rollout))
            learner.offload()
            learner.onload()
            own = masters(learner)
            [steps] = rank_batches(batch(1, poison=True), run, 1)
            assert not learner.train(1, steps).finite
            assert same(masters(learner), own)
        learner.load_state(str(tmp_path / "0"))
        train(learner, run, [1])
        assert same(masters(learner), own)


def float32_weights(learner: MegatronLearner) -> list[torch.Tensor]:
    """The float32 weights in the model's order: those of fp32 training are the model's own."""
    parameters = [parameter for chunk in learner._model.chunks for parameter in chunk.parameters()]
    return [vars(own).get("main_param", own).detach().clone() for own in parameters]


def test_a_batch_that_fails_in_its_second_step_restores_the_float32_weights(tiny: Path) -> None:
    run = config(grpo_std_normalization=False, num_steps_per_rollout=2)
    with learning(tiny, run) as learner:
        train(learner, run, [0])
        own, published = masters(learner), weights_of(learner)
        [steps] = rank_batches(batch(1, poison=True), run, 1)
        assert not learner.train(1, steps).finite
        assert same(masters(learner), own)
        assert same(list(weights_of(learner).values()), list(published.values()))


def test_the_export_is_in_bfloat16_and_its_configuration_states_that(tiny: Path, tmp_path: Path) -> None:
    run = config()
    tokens = [random.Random(0).randrange(256) for _ in range(16)]
    with learning(tiny, run) as learner:
        train(learner, run, range(2))
        [ours] = learner.logprobs([tokens])
        learner.save_hf(str(tmp_path / "saved"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert model.dtype is torch.bfloat16
    with torch.no_grad():
        theirs = model.float()(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    assert ours == pytest.approx(theirs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist(), abs=0.05)
