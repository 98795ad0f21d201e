"""Auxiliary losses and biases of the routers, which a model plug-in turns on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from miles_async.adapters.megatron.model.factory import MegatronModel
from miles_async.batching.batch import PackedBatch, TrainStep, rank_batches
from miles_async.models.experts import Qwen3Moe
from miles_async.models.plugin import Same
from tests.configuration import run_config
from tests.stack.learning import create_experts, learning, uneven_groups, weights_of

BALANCE, SIZE = 0.01, 0.002
"""Coefficients of the load-balancing loss and of the z-loss."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3MoeForCausalLM]:
    path = tmp_path_factory.mktemp("models") / "experts"
    return path, create_experts(path, 1).float()


def router_gradients(path: Path, role: str, max_tokens: int, **of_the_model: Any) -> tuple[torch.Tensor, TrainStep]:
    """[layers, experts, hidden] gradients of one optimizer step, for a plug-in with these fields."""
    usual = Qwen3Moe.transformer_config
    run = run_config(lr=1e-4, share_prefixes=False, max_tokens_per_gpu=max_tokens)
    if role == "critic":
        run = run_config(lr=1e-4, share_prefixes=False, max_tokens_per_gpu=max_tokens, advantage_estimator="ppo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3Moe, "transformer_config", lambda self, config: usual(self, config) | of_the_model)
        with learning(path, run) as learner:
            [[step]] = rank_batches(uneven_groups(0), run, 1)
            [values] = learner._pre_step_values(0, [step])
            if learner._critic is None:
                learner._policy_gradients(step, values)
                return stacked_gradients(learner._model), step
            learner._critic.compute_gradients(step, values.critic_values, values.returns)
            return stacked_gradients(learner._critic.model), step


def stacked_gradients(model: MegatronModel) -> torch.Tensor:
    [chunk] = model.chunks
    found = {name: one.main_grad for name, one in chunk.named_parameters() if name.endswith("router.weight")}
    return torch.stack([found[name] for name in sorted(found)]).clone()


def auxiliary_loss(model: Qwen3MoeForCausalLM, batches: list[PackedBatch]) -> torch.Tensor:
    """The mean over micro-batches, weighted by their tokens.

    Of a micro-batch and a layer: experts times the sum over experts of the share of choices and the mean probability
    (Switch Transformer, arXiv 2101.03961, equation 4), and the mean squared log of the router's normalizer (ST-MoE,
    arXiv 2202.08906, equation 5).
    """
    parts = []
    for batch in batches:
        sequences = torch.from_numpy(batch.tokens).split(batch.lengths.tolist())
        outputs = [model(one[None], output_router_logits=True).router_logits for one in sequences]
        for logits in (torch.cat(layer) for layer in zip(*outputs, strict=True)):
            probabilities = logits.softmax(-1)
            chosen = torch.zeros_like(logits).scatter(1, probabilities.topk(2, dim=-1).indices, 1.0)
            balance = logits.shape[1] * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
            size = logits.logsumexp(-1).square().mean()
            parts.append(len(logits) * (BALANCE * balance + SIZE * size))
    tokens = sum(len(batch.tokens) for batch in batches)
    return torch.stack(parts).sum() / tokens


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("max_tokens, micro_batches", [(1000, 1), (40, 4)])
def test_auxiliary_losses_of_routers_are_added_at_the_scale_of_their_coefficients(
    experts: tuple[Path, Qwen3MoeForCausalLM], role: str, max_tokens: int, micro_batches: int
) -> None:
    path, reference = experts
    without, step = router_gradients(path, role, max_tokens)
    turned_on = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": SIZE}
    found, _ = router_gradients(path, role, max_tokens, **turned_on)
    assert len(step.micro_batches) == micro_batches
    weights = [layer.mlp.gate.weight for layer in reference.model.layers]
    expected = torch.stack(torch.autograd.grad(auxiliary_loss(reference, step.micro_batches), weights))
    assert expected.abs().max() > 1e-4
    assert torch.allclose(found - without, expected, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_batch_that_is_not_finite_leaves_the_biases_of_routers_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Megatron adjusts the biases when it reduces the gradients, before it is known whether these are finite."""
    create_experts(tmp_path, 1)
    file, bias = tmp_path / "model.safetensors", "mlp.gate.e_score_correction_bias"
    biases = {f"model.layers.{layer}.{bias}": torch.zeros(4) for layer in range(2)}
    save_file({**load_file(file), **biases}, file, {"format": "pt"})
    config, tensors = Qwen3Moe.transformer_config, Qwen3Moe.layer_tensors
    turned_on = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    monkeypatch.setattr(Qwen3Moe, "transformer_config", lambda *a: config(*a) | turned_on)
    monkeypatch.setattr(Qwen3Moe, "layer_tensors", lambda *a: tensors(*a) | {"mlp.router.expert_bias": Same(bias)})
    sizes = {"rollout_batch_size": 3, "n_samples_per_prompt": 4, "num_steps_per_rollout": steps}
    run = run_config(lr=1e-4, max_tokens_per_gpu=1000, **sizes)
    poisoned = uneven_groups(0)
    poisoned[-1][0].reward = math.nan

    def biases_of(learner: Any) -> dict[str, torch.Tensor]:
        return {name: one for name, one in weights_of(learner).items() if name.endswith(bias)}

    with learning(tmp_path, run) as learner:
        before = biases_of(learner)
        assert len(before) == 2
        assert not learner.train(0, rank_batches(poisoned, run, 1)[0]).finite
        assert all(torch.equal(one, before[name]) for name, one in biases_of(learner).items())
        assert learner.train(1, rank_batches(uneven_groups(0), run, 1)[0]).finite
        assert any(not torch.equal(one, before[name]) for name, one in biases_of(learner).items())
