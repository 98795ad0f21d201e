"""MTP heads learn what transformers' layers would learn, and change nothing but themselves.

Run as a script this file is the two ranks of the parallel layouts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file, save_file

from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.process_groups import destroy_process_groups
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port, free_port
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from tests.bridge.computing import RESPONSES, SEQUENCES, bridge_config, export_gradient, train_step
from tests.bridge.families import LAYOUTS, tensors_of, write_checkpoint
from tests.bridge.mtp import is_of_head, reference_of_head, write_with_head
from tests.stack.forked_ranks import fork_ranks, run_ranks
from tests.stack.learning import learning, save_state, uneven_groups, weights_of

FACTOR = 0.5
FAMILIES = ("Qwen3.5", "Qwen3.5-MoE", "DeepSeek-V3", "GLM-4.7-Flash", "GLM-4.5")
TRAINS_HEADS: dict[str, Any] = {
    "enable_mtp_training": True,
    "mtp_loss_scaling_factor": FACTOR,
    "loss_type": "sft_loss",
}


def layers_of(path: Path) -> int:
    config = json.loads((path / "config.json").read_text())
    return int(config.get("text_config", config)["num_hidden_layers"])


def step_gradient(learner: MegatronLearner, run: RunConfig, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """The gradient of an optimizer step, and its `mtp_loss` under that name. It replaces the learner's weights."""
    [step] = rank_batches(uneven_groups(0), run, ranks)[rank]
    _, _, metrics = learner._policy_gradients(step, *learner._pre_step_values(0, [step]))
    with redirect_cuda_to_cpu():
        finalize_model_grads(learner._model.chunks, force_all_reduce=True)
    gradient = export_gradient(learner)
    return gradient | {name: torch.tensor(value) for name, value in metrics.items()}


def errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() >= expected.keys()
    worst = {name: float((found[name] - one).norm() / (one.norm() + 1e-6)) for name, one in expected.items()}
    return [f"{name} {error:.1e}" for name, error in worst.items() if not error < 1e-3]


def expected_of(family: str, path: Path, scratch: Path) -> dict[str, torch.Tensor]:
    loss, gradient = reference_of_head(family, path, SEQUENCES, RESPONSES, scratch)
    return {name: FACTOR * one for name, one in gradient.items()} | {"mtp_loss": torch.tensor(loss)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_head_is_that_of_transformers_layers(family: str, tmp_path: Path) -> None:
    path, run = write_with_head(family, tmp_path / "checkpoint"), bridge_config(**TRAINS_HEADS)
    with learning(path, run) as learner:
        found = step_gradient(learner, run)
    assert errors(found, expected_of(family, path, tmp_path / "scratch")) == []


@pytest.mark.parametrize("family", ["Qwen3.5", "DeepSeek-V3"])
def test_the_loss_of_a_head_changes_no_other_gradient(family: str, tmp_path: Path) -> None:
    path, found = write_with_head(family, tmp_path / "checkpoint"), {}
    settings: Mapping[str, Mapping[str, Any]] = {
        "without": {"enable_mtp_training": False},
        "zero": {"mtp_loss_scaling_factor": 0.0},
        "half": {},
    }
    for name, changed in settings.items():
        run = bridge_config(**{**TRAINS_HEADS, **changed})
        with learning(path, run) as learner:
            found[name] = step_gradient(learner, run)
    heads = {name for name in found["half"] if is_of_head(name, layers_of(path))}
    assert found["without"].keys() == found["half"].keys() - heads - {"mtp_loss"}
    for name in ("zero", "half"):
        assert [one for one, tensor in found["without"].items() if not torch.equal(tensor, found[name][one])] == []
    assert not any(found["zero"][name].any() for name in heads)
    assert sum(bool(found["half"][name].any()) for name in heads) > len(heads) / 2
    assert torch.equal(found["zero"]["mtp_loss"], found["half"]["mtp_loss"])


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    for family in TWO_RANKS:
        write_with_head(family, root / family / "checkpoint")
    with run_ranks("tests.bridge.test_mtp_heads", root):
        pass
    return root


TWO_RANKS = {
    "Qwen3.5": ("tensor", "pipeline", "data"),
    "Qwen3.5-MoE": ("tensor", "pipeline", "expert"),
    "DeepSeek-V3": ("tensor", "pipeline", "expert"),
    "GLM-4.5": ("context",),
}


@pytest.mark.parametrize("family, layout", [(one, layout) for one, layouts in TWO_RANKS.items() for layout in layouts])
def test_two_ranks_compute_the_same_gradient(layouts: Path, tmp_path: Path, family: str, layout: str) -> None:
    path = layouts / family / "checkpoint"
    found = load_file(layouts / family / f"{layout}.safetensors")
    assert errors(found, expected_of(family, path, tmp_path / "scratch")) == []


def run_layouts(rank: int, root: Path, ports: dict[str, int]) -> None:
    torch.set_num_threads(1)
    further = {"data": {}, "context": {"context_parallel_size": 2}}
    for family, layouts in TWO_RANKS.items():
        for layout in layouts:
            run = bridge_config(actor_num_gpus_per_node=2, **TRAINS_HEADS, **{**LAYOUTS, **further}[layout])
            address = (rank, 2, "127.0.0.1", ports[f"{family} {layout}"])
            learner = MegatronLearner(run, str(root / family / "checkpoint"), *address)
            found = step_gradient(learner, run, rank, 2)
            if rank == 0:
                contiguous = {name: one.contiguous() for name, one in found.items()}
                save_file(contiguous, root / family / f"{layout}.safetensors")
            learner.close()


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_loss_of_a_head_falls(tmp_path: Path, recomputed: bool) -> None:
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    path = write_with_head("Qwen3.5", tmp_path)
    run = bridge_config(lr=0.01, num_rollout=20, enable_mtp_training=True, **whole if recomputed else {})
    with learning(path, run) as learner:
        steps = rank_batches(uneven_groups(0), run, 1)[0]
        losses = [learner.train(number, steps).metrics["mtp_loss"] for number in range(12)]
    assert losses[-1] < losses[0] / 2


def test_heads_learn_from_samples_without_an_advantage(tmp_path: Path) -> None:
    path, run = write_with_head("Qwen3.5", tmp_path), bridge_config(lr=0.01, enable_mtp_training=True)
    groups = uneven_groups(0)
    for group in groups:
        for sample in group:
            sample.reward = 1.0
    with learning(path, run) as learner:
        before = weights_of(learner)
        report = learner.train(0, rank_batches(groups, run, 1)[0])
        after = weights_of(learner)
    assert report.metrics["computed_fraction"] == 1
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name.partition(".")[0] for name in changed} == {"mtp"}


@pytest.mark.parametrize("family, precision", [("Qwen3.5-MoE, images", "bf16"), ("DeepSeek-V3", "fp32")])
def test_checkpoints_and_exports_keep_the_heads_and_engines_do_not_get_them(
    family: str, precision: str, tmp_path: Path
) -> None:
    path = write_with_head(family, tmp_path / "model")
    run = bridge_config(lr=0.01, precision=precision, **TRAINS_HEADS)

    with learning(path, run) as learner:
        first = train_step(learner, run, 0)
        save_state(learner, tmp_path / "state")
        learner.save_hf(str(tmp_path / "export"))
        published = {name for name, _ in learner.engine_weights()}
        second = train_step(learner, run, 1)
    layers, held = layers_of(path), load_file(path / "model.safetensors")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == held.keys()
    heads = {name for name in first if is_of_head(name, layers)}
    assert heads
    assert published == first.keys() - heads
    assert [name for name in heads if not torch.equal(exported[name], first[name])] == []
    assert any(not torch.equal(first[name].float(), held[name]) for name in heads)
    with learning(path, run) as learner:
        learner.load_state(str(tmp_path / "state"))
        resumed = weights_of(learner)
        assert [name for name in first if not torch.equal(first[name], resumed[name])] == []
        continued = train_step(learner, run, 1)
        assert [name for name in second if not torch.equal(second[name], continued[name])] == []


def test_a_critic_and_a_reference_model_have_no_heads(tmp_path: Path) -> None:
    path = write_with_head("Qwen3.5", tmp_path / "model")
    run = bridge_config(
        advantage_estimator="ppo", use_kl_loss=True, kl_loss_coef=0.1, critic_lr=0.01, enable_mtp_training=True
    )
    with learning(path, run) as learner:
        report = learner.train(0, rank_batches(uneven_groups(0), run, 1)[0])
        assert report.finite
        assert report.metrics["mtp_loss"] > 0
        models = learner._model, learner._reference, learner._critic.model  # type: ignore[union-attr]
        assert [model.heads for model in models if model is not None] == [1, 0, 0]


def test_a_checkpoint_without_heads_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint("Qwen3.5", tmp_path)
    try:
        with pytest.raises(UserError, match="has no MTP heads, which enable_mtp_training would train: unset it, or"):
            MegatronLearner(bridge_config(enable_mtp_training=True), str(path), 0, 1, "127.0.0.1", free_port())
    finally:
        destroy_process_groups()


def test_a_tensor_of_a_head_that_nothing_holds_is_refused(tmp_path: Path) -> None:
    path = write_with_head("Qwen3.5", tmp_path)
    tensors = {**tensors_of(path), "mtp.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    try:
        with pytest.raises(UserError, match=r"has a tensor mtp.layers.0.self_attn.q_proj.bias, which the model of its"):
            MegatronLearner(bridge_config(enable_mtp_training=True), str(path), 0, 1, "127.0.0.1", free_port())
    finally:
        destroy_process_groups()


if __name__ == "__main__":
    outputs = [f"{family} {layout}" for family, layouts in TWO_RANKS.items() for layout in layouts]
    # Other tests must not take the ports before they are used.
    claimed = {output: claim_port() for output in outputs}
    fork_ranks(2, run_layouts, Path(sys.argv[1]), {output: port.number for output, port in claimed.items()})
