"""The dimensions of published models, as their `config.json` has them, and how well both memory plans of them agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def _dense(kind: str, hidden: int, width: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


_QWEN3 = {"head_dim": 128}
_QWEN3_MOE = _QWEN3 | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_DELTA_RULE = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4}
MODELS: Mapping[str, dict[str, Any]] = {
    "Qwen3-0.6B": _dense("qwen3", 1024, 3072, 28, 16, 8, 151_936) | _QWEN3 | {"tie_word_embeddings": True},
    "Qwen3-4B": _dense("qwen3", 2560, 9728, 36, 32, 8, 151_936) | _QWEN3 | {"tie_word_embeddings": True},
    "Qwen3-32B": _dense("qwen3", 5120, 25_600, 64, 64, 8, 151_936) | _QWEN3,
    "Qwen2.5-7B": _dense("qwen2", 3584, 18_944, 28, 28, 4, 152_064),
    "Llama-3.1-8B": _dense("llama", 4096, 14_336, 32, 32, 8, 128_256),
    "Llama-3.1-70B": _dense("llama", 8192, 28_672, 80, 64, 8, 128_256),
    "Gemma-7B": _dense("gemma", 3072, 24_576, 28, 16, 16, 256_000)
    | {"head_dim": 256, "hidden_act": "gelu", "tie_word_embeddings": True},
    "Mixtral-8x7B": _dense("mixtral", 4096, 14_336, 32, 32, 8, 32_000)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3-30B-A3B": _dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151_936) | _QWEN3_MOE | {"moe_intermediate_size": 768},
    "Qwen3-235B-A22B": _dense("qwen3_moe", 4096, 12_288, 94, 64, 4, 151_936)
    | _QWEN3_MOE
    | {"moe_intermediate_size": 1536},
    "gpt-oss-20b": _dense("gpt_oss", 2880, 2880, 24, 64, 8, 201_088) | _GPT_OSS | {"num_local_experts": 32},
    "gpt-oss-120b": _dense("gpt_oss", 2880, 2880, 36, 64, 8, 201_088) | _GPT_OSS | {"num_local_experts": 128},
    "Qwen3-Next-80B-A3B": _dense("qwen3_next", 2048, 5120, 48, 16, 2, 151_936)
    | _DELTA_RULE
    | _SHARED_EXPERT
    | {"num_experts": 512, "num_experts_per_tok": 10},
    # The sizes that transformers' configurations of these families have by default.
    "Qwen3.5-9B": _dense("qwen3_5_text", 4096, 12_288, 32, 16, 4, 248_320) | _DELTA_RULE,
    "Qwen3.5-35B-A3B": _dense("qwen3_5_moe_text", 2048, 512, 40, 16, 2, 248_320)
    | _DELTA_RULE
    | _SHARED_EXPERT
    | {"num_experts": 256, "num_experts_per_tok": 8},
    "DeepSeek-V3": _dense("deepseek_v3", 7168, 18_432, 61, 128, 128, 129_280)
    | {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
}


class Planned(NamedTuple):
    """A job whose memory plan from the settings is compared with that from Megatron's modules."""

    layout: str
    settings: Mapping[str, Any]
    """Of the layout, on 8 ranks."""
    differences: tuple[float, ...]
    """How much more the plan from the settings has for the activations of each pipeline stage, in percent."""
    changes: Mapping[str, Any] = {}
    """Of `config.json`: fewer layers where building all of them takes long."""


_TENSOR = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
_TWO = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_SHARED = _TWO | {"expert_model_parallel_size": 4}
_DEALT = _SHARED | {"expert_tensor_parallel_size": 1}
_VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
_FOUR = {"num_hidden_layers": 4}
PLANNED: Mapping[str, Planned] = {
    "Qwen3-0.6B": Planned("data parallel", {}, (0.1,)),
    "Qwen3-4B": Planned("context parallel 2", {"context_parallel_size": 2}, (0.1,)),
    "Qwen2.5-7B": Planned("pipeline of 2 stages with 2 chunks each", _VIRTUAL, (-0.4, 0.4)),
    "Llama-3.1-8B": Planned(
        "tensor parallel 4, pipeline of 2 stages", _TENSOR | {"pipeline_model_parallel_size": 2}, (-1.6, -0.1)
    ),
    "Gemma-7B": Planned("tensor parallel 4", _TENSOR, (-0.2,)),
    "Mixtral-8x7B": Planned("tensor parallel 2, expert parallel 4, experts shared", _SHARED, (0.0,)),
    "Qwen3-30B-A3B": Planned("tensor parallel 2, expert parallel 4", _DEALT, (-0.4,), _FOUR),
    "gpt-oss-20b": Planned("tensor parallel 2, expert parallel 4", _DEALT, (-0.1,), _FOUR),
    "gpt-oss-120b": Planned("tensor parallel 2, expert parallel 4", _DEALT, (-0.1,), _FOUR),
    "DeepSeek-V3": Planned(
        "tensor parallel 2, expert parallel 4", _DEALT, (-0.2,), _FOUR | {"first_k_dense_replace": 1}
    ),
    "Qwen3-Next-80B-A3B": Planned("tensor parallel 2, expert parallel 4", _DEALT, (0.5,), _FOUR),
    "Qwen3.5-9B": Planned("tensor parallel 4", _TENSOR, (-0.1,), _FOUR),
    "Qwen3.5-35B-A3B": Planned("tensor parallel 2, expert parallel 4", _DEALT, (0.5,), _FOUR),
}


def checkpoint(name: str, folder: Path, changes: Mapping[str, Any] | None = None) -> str:
    """A folder with the `config.json` of a model, and nothing else."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**MODELS[name], **(changes or {})}))
    return str(path)
