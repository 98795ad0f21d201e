"""The memory plan must agree with the tensors of real learners, on one to four ranks.

Run as a script this file is those ranks.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_async.adapters.megatron.model.fake_ranks import measure_stages
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.planning.plan import plan_learner
from tests.configuration import run_config
from tests.learner_memory import cpu_job, full_group, measure
from tests.stack.forked_ranks import fork_ranks, layouts_by_process, run_ranks

RANKS = 4
SAMPLE = 192
"""Tokens."""
SIZES: dict[str, Any] = {
    "vocab_size": 3000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}


class Layout(NamedTuple):
    ranks: int
    settings: dict[str, Any]
    experts: bool = False


BF16: dict[str, Any] = {"precision": "bf16", "moe_router_dtype": "fp32"}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
SEQUENCE: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "one rank": Layout(1, {}),
    "bf16, recomputed": Layout(1, BF16 | FULL),
    "bf16, tensor and sequence parallel": Layout(
        2, BF16 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ),
    "tensor parallel": Layout(2, {"tensor_model_parallel_size": 2}),
    "pipeline": Layout(2, {"pipeline_model_parallel_size": 2}),
    "uneven pipeline": Layout(2, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}),
    "bf16, virtual pipeline": Layout(
        2, BF16 | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    ),
    "context parallel": Layout(2, {"context_parallel_size": 2}),
    "bf16, distributed optimizer": Layout(2, BF16 | {"use_distributed_optimizer": True}),
    "bf16, experts": Layout(1, BF16, experts=True),
    "expert parallel": Layout(2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}, experts=True),
    "bf16, expert, tensor and sequence parallel": Layout(
        4, BF16 | SEQUENCE | {"expert_model_parallel_size": 2}, experts=True
    ),
}


def config(root: Path, layout: Layout) -> RunConfig:
    """Each replica of the model takes two micro-batches of two samples, or four in a pipeline, so that all of a virtual
    pipeline's stages are in flight."""
    checkpoint = root / ("experts" if layout.experts else "dense")
    given: dict[str, Any] = {
        "precision": "fp32",
        "use_distributed_optimizer": False,
        "use_kl_loss": False,
    } | layout.settings
    sizes = [given.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline")]
    replicas = layout.ranks // (prod(sizes) * given.get("context_parallel_size", 1))
    return run_config(
        hf_checkpoint=str(checkpoint),
        actor_num_gpus_per_node=layout.ranks,
        transformer_impl="local",
        share_prefixes=False,
        max_tokens_per_gpu=2 * SAMPLE,
        rollout_batch_size=1,
        n_samples_per_prompt=4 * replicas * sizes[1],
        rollout_max_prompt_len=8,
        rollout_max_response_len=SAMPLE - 8,
        **given,
    )


def measure_rank(root: Path, name: str, rank: int, port: int) -> None:
    """Take steps in a layout, and write what this rank has kept."""
    torch.set_num_threads(1)
    layout = LAYOUTS[name]
    settings = config(root, layout)
    learner = MegatronLearner(settings, str(settings.model.hf_checkpoint), rank, layout.ranks, "127.0.0.1", port)
    first, steps = (
        rank_batches([full_group(settings.rollout.n_samples_per_prompt, tokens)], settings, layout.ranks)[rank]
        for tokens in (16, SAMPLE)
    )
    (root / f"{name} {rank}.json").write_text(json.dumps(measure(learner, first, steps)))
    learner.close()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    create_models(root)
    with run_ranks("tests.stack.test_memory_plan", root):
        pass
    return root


def create_models(root: Path) -> None:
    torch.manual_seed(1)  # the routers of experts depend on it
    options: dict[str, Any] = {"tie_word_embeddings": False, "dtype": "float32"}
    Qwen3ForCausalLM(Qwen3Config(**SIZES, **options)).save_pretrained(root / "dense")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **options)).save_pretrained(root / "experts")
    for name in ("dense", "experts"):
        byte_tokenizer().save_pretrained(root / name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_agrees_with_the_tensors_of_real_ranks(measured: Path, name: str) -> None:
    ranks = LAYOUTS[name].ranks
    job = cpu_job(config(measured, LAYOUTS[name]))
    stages = plan_learner(job)
    for number, plan in enumerate(stages):
        of_stage = range(number * ranks // len(stages), (number + 1) * ranks // len(stages))
        found = [json.loads((measured / f"{name} {rank}.json").read_text()) for rank in of_stage]
        for line in ("weights", "gradients", "optimizer"):
            assert getattr(plan, line) == pytest.approx(found[0][line], rel=0.01), line
        # Experts of one rank get more tokens than those of another.
        assert plan.peak - plan.state == pytest.approx(fmean(one["peak"] for one in found), rel=0.1)
        # On CPUs the dispatcher of expert parallelism keeps the tokens that it gathered, which that of GPUs does not.
        if plan.logits and job.split.expert == 1:
            assert plan.activations == pytest.approx(fmean(one["activations"] for one in found), rel=0.1)


@pytest.mark.parametrize(
    "name", ["one rank", "bf16, tensor and sequence parallel", "context parallel", "bf16, experts"]
)
def test_modules_with_fake_tensors_keep_what_real_ones_keep(measured: Path, name: str) -> None:
    settings = config(measured, LAYOUTS[name])
    job = cpu_job(settings)
    # On CPUs activations are not fused.
    learner = settings.learner.model_copy(update={"bias_swiglu_fusion": False})
    modules = measure_stages(learner, str(settings.model.hf_checkpoint), job.tokens)
    [plan] = plan_learner(job, modules)
    real = [json.loads((measured / f"{name} {rank}.json").read_text()) for rank in range(LAYOUTS[name].ranks)]
    assert plan.activations == pytest.approx(fmean(one["activations"] for one in real), rel=0.03)


def run_layouts(process: int, root: Path, ports: dict[str, int]) -> None:
    for name, rank in layouts_by_process({name: layout.ranks for name, layout in LAYOUTS.items()})[process]:
        measure_rank(root, name, rank, ports[name])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    claimed = {name: claim_port() for name in LAYOUTS}
    fork_ranks(RANKS, run_layouts, folder, {name: port.number for name, port in claimed.items()})
