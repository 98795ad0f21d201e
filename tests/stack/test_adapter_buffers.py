"""The buffers for adapters that the memory plan counts are those that SGLang allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from miles_async.config.memory import engine_job, planned_model
from miles_async.config.model_shape import adapter_of_engines
from miles_async.planning.plan import GIB
from tests.configuration import run_config
from tests.planned_models import checkpoint

ROOT = Path(__file__).parents[2]
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("Qwen3-4B", {}),
    "two ranks": (
        "Qwen3-4B",
        {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "max_weight_staleness": 4},
    ),
    "layers that SGLang joins": ("Qwen3-4B", {"lora_target_modules": ["q_proj", "v_proj", "lm_head"]}),
    "experts": ("Qwen3-30B-A3B", {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}),
    "experts whose rank is doubled": ("gpt-oss-20b", {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}),
    "linear attention": ("Qwen3.5-9B", {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}),
    "a shared expert": ("Qwen3.5-35B-A3B", {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}),
}
ALLOCATE = """
import json, sys
from miles_async import cpu_compat
cpu_compat.install()
import torch
from transformers import AutoConfig
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.lora import mem_pool
from sglang.srt.lora.utils import get_normalized_target_modules

def elements(folder, modules, ranks, adapters, rank_of_adapter):
    mem_pool._get_moe_tp_context = lambda: (ranks, 0)
    model = torch.nn.Module()
    model.config = AutoConfig.from_pretrained(folder)
    model.weight = torch.nn.Parameter(torch.empty(0, device="meta"))
    if hasattr(model.config, "linear_key_head_dim"):
        from sglang.srt.models.qwen3_5 import Qwen3_5ForCausalLM
        model.get_hidden_dim = Qwen3_5ForCausalLM.get_hidden_dim.__get__(model)
    if "Moe" in model.config.architectures[0] or "GptOss" in model.config.architectures[0]:
        # Only its presence counts, and its constructor needs a running engine.
        model.experts = FusedMoE.__new__(FusedMoE)
        torch.nn.Module.__init__(model.experts)
    pool = mem_pool.LoRAMemoryPool(
        base_hf_config=model.config,
        max_loras_per_batch=adapters,
        dtype=torch.bfloat16,
        tp_size=ranks,
        tp_rank=0,
        attn_tp_size=ranks,
        max_lora_rank=rank_of_adapter,
        target_modules=get_normalized_target_modules(modules),
        base_model=model,
        eviction_policy="lru",
        lora_added_tokens_size=0,
    )
    layers = [one for buffer in (pool.A_buffer, pool.B_buffer) for tensors in buffer.values() for one in tensors]
    heads = [*pool.lm_head_A_buffer.values(), *pool.lm_head_B_buffer.values()]
    return sum(tensor.numel() for tensor in layers + heads)

print(json.dumps([elements(*job) for job in json.loads(sys.argv[1])]))
"""


def test_the_memory_plan_counts_the_buffers_that_sglang_allocates(tmp_path: Path) -> None:
    planned, arguments = {}, []
    for name, (model, settings) in JOBS.items():
        config = run_config(hf_checkpoint=checkpoint(model, tmp_path), lora_rank=8, **settings)
        layers = planned_model(config)
        assert layers is not None
        planned[name] = engine_job(config, layers, 80 * GIB).adapters
        rank, modules = adapter_of_engines(config.learner, config.model)
        # The model itself has a buffer too, and there are at most max_weight_staleness + 2 versions.
        adapters = (config.rollout.max_weight_staleness or 1) + 3
        ranks = config.engine.rollout_num_gpus_per_engine
        arguments.append([config.model.hf_checkpoint, modules, ranks, adapters, rank])
    command = [sys.executable, "-c", ALLOCATE, json.dumps(arguments, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert planned == dict(zip(JOBS, json.loads(done.stdout), strict=True))
