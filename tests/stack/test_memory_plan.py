"""The memory plan must agree with the tensors of real learners, on one to four ranks.

Run as a script this file is those ranks.
"""

from __future__ import annotations

import json
import random
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_async.adapters.megatron.model.output_layer import CHUNK_ENTRIES, OutputLayer
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import distinct_storages, model_tensors
from miles_async.adapters.system.network_ports import claim_port
from miles_async.batching.batch import rank_batches
from miles_async.config.memory import learner_job, planned_model
from miles_async.config.schema import RunConfig
from miles_async.losses.logprobs import PART_ENTRIES
from miles_async.planning.plan import GIB, LearnerJob, plan_learner
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.forked_ranks import fork_ranks, run_ranks

RANKS = 4
SAMPLE = 192
"""Tokens."""
SIZES = {
    "vocab_size": 3000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "norm_topk_prob": True}


class Layout(NamedTuple):
    ranks: int
    settings: dict[str, Any]
    experts: bool = False


BF16 = {"precision": "bf16"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
LAYOUTS = {
    "one rank": Layout(1, {}),
    "bf16, recomputed": Layout(1, BF16 | FULL),
    "bf16, tensor and sequence parallel": Layout(
        2, BF16 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ),
    "tensor parallel": Layout(2, {"tensor_model_parallel_size": 2}),
    "pipeline": Layout(2, {"pipeline_model_parallel_size": 2}),
    "bf16, virtual pipeline": Layout(
        2, BF16 | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    ),
    "context parallel": Layout(2, {"context_parallel_size": 2}),
    "bf16, distributed optimizer": Layout(2, BF16 | {"use_distributed_optimizer": True}),
    "bf16, experts": Layout(1, BF16, experts=True),
    "expert parallel": Layout(2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}, experts=True),
    "bf16, expert, tensor and sequence parallel": Layout(
        4,
        BF16 | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
        experts=True,
    ),
}


def config(root: Path, layout: Layout) -> RunConfig:
    checkpoint = root / ("experts" if layout.experts else "dense")
    given = {"use_distributed_optimizer": False, "use_kl_loss": False} | layout.settings
    return run_config(
        hf_checkpoint=str(checkpoint),
        actor_num_gpus_per_node=layout.ranks,
        transformer_impl="local",
        share_prefixes=False,
        max_tokens_per_gpu=2 * SAMPLE,
        rollout_batch_size=1,
        n_samples_per_prompt=8 * layout.ranks,
        rollout_max_prompt_len=8,
        rollout_max_response_len=SAMPLE - 8,
        **given,
    )


def cpu_job(settings: RunConfig) -> LearnerJob:
    """The plan's job with the constants of a CPU: smaller parts of logits, and a fused Adam."""
    model = planned_model(settings)
    assert model is not None
    job = learner_job(settings, model, GIB)
    # Fused activations of experts need CUDA.
    layers = tuple(
        layer._replace(feed_forward=replace(layer.feed_forward, is_fused=False))
        if settings_has_experts(layer)
        else layer
        for layer in model.layers
    )
    return replace(
        job,
        model=replace(model, layers=layers),
        chunk_entries=CHUNK_ENTRIES,
        softmax=2 * 4 * PART_ENTRIES["cpu"],
        foreach_adam=False,
    )


def settings_has_experts(layer: Any) -> bool:
    return hasattr(layer.feed_forward, "is_fused")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Do not count these tensors, which exist already."""
        for tensor in tensors:
            self._add(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, leaf.untyped_storage().nbytes())
        return result

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def measure(root: Path, name: str, rank: int, port: int) -> None:
    """Take a step, and write what this rank has kept."""
    torch.set_num_threads(1)
    layout = LAYOUTS[name]
    settings = config(root, layout)
    learner = MegatronLearner(settings, settings.model.hf_checkpoint or "", rank, layout.ranks, "127.0.0.1", port)
    steps = rank_batches([group(8 * layout.ranks)], settings, layout.ranks)[rank]
    learner.train(0, steps)
    model = learner._model
    weights = distinct_storages(parameter for chunk in model.chunks for parameter in chunk.parameters())
    buffers = [
        buffer.grad_data for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    state = distinct_storages(model_tensors(model))
    live, kept = LiveBytes(), []
    live.ignore([*(tensor for chunk in model.chunks for tensor in chunk.parameters()), *buffers, *model_tensors(model)])
    usual: Callable[..., Any] = OutputLayer.map

    def watched(self: OutputLayer, *args: Any) -> Any:
        if torch.is_grad_enabled():
            kept.append(live.now)
        return usual(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputLayer, "map", watched)
        with live:
            learner.train(1, steps)
    learner.close()
    measured = {
        "weights": sum(one.nbytes() for one in weights.values()),
        "gradients": sum(one.untyped_storage().nbytes() for one in buffers),
        "optimizer": sum(one.nbytes() for key, one in state.items() if key not in weights),
        "kept": max(kept, default=None),
        "peak": live.peak,
    }
    (root / f"{name} {rank}.json").write_text(json.dumps(measured))


def group(samples: int) -> Group:
    draw = random.Random(0)
    prompt = [draw.randrange(256) for _ in range(8)]
    return Group(
        Sample(
            index=i,
            tokens=prompt + [draw.randrange(256) for _ in range(SAMPLE - 8)],
            response_length=SAMPLE - 8,
            rollout_log_probs=[-5.0] * (SAMPLE - 8),
            reward=float(i % 2),
        )
        for i in range(samples)
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    create_models(root)
    with run_ranks("tests.stack.test_memory_plan", root):
        pass
    return root


def create_models(root: Path) -> None:
    options: dict[str, Any] = {"tie_word_embeddings": False, "dtype": "float32"}
    Qwen3ForCausalLM(Qwen3Config(**SIZES, **options)).save_pretrained(root / "dense")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **options)).save_pretrained(root / "experts")
    for name in ("dense", "experts"):
        byte_tokenizer().save_pretrained(root / name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_agrees_with_the_tensors_of_each_rank(measured: Path, name: str) -> None:
    job = cpu_job(config(measured, LAYOUTS[name]))
    stages = plan_learner(job)
    for rank in range(LAYOUTS[name].ranks):
        found = json.loads((measured / f"{name} {rank}.json").read_text())
        plan = stages[rank * len(stages) // LAYOUTS[name].ranks]
        for line in ("weights", "gradients", "optimizer"):
            assert getattr(plan, line) == pytest.approx(found[line], rel=0.02), line
        assert plan.peak - plan.state == pytest.approx(found["peak"], rel=0.1)
        if found["kept"] is not None:
            assert plan.activations == pytest.approx(found["kept"], rel=0.1)


def run_layouts(process: int, root: Path, ports: dict[str, int]) -> None:
    for name, layout in LAYOUTS.items():
        if process < layout.ranks:
            measure(root, name, process, ports[name])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    claimed = {name: claim_port() for name in LAYOUTS}
    fork_ranks(RANKS, run_layouts, folder, {name: port.number for name, port in claimed.items()})
