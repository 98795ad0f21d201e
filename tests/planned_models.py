"""The dimensions of published models, as their `config.json` has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
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
    | {
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
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


def checkpoint(name: str, folder: Path) -> str:
    """A folder with the `config.json` of a model, and nothing else."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    return str(path)
