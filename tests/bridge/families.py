"""A tiny checkpoint of each model family that Megatron-Bridge converts, and what transformers computes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.models.text_part import TEXT_PARTS, is_of_images

_SIZES = {
    "vocab_size": 321,  # two tensor-parallel ranks pad it
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 300,  # transformers gives it no gradient
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = (
    _SIZES
    | _ROUTED_EXPERTS
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "rms_norm_eps": 1e-6,
    }
)
_DELTA_RULE = _GROUPED | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 8}
_MAMBA = {
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 64,
    "time_step_min": 1e-9,
}
_HYBRID_EXPERTS = _ROUTED_EXPERTS | {"hybrid_override_pattern": "M*EE", "moe_shared_expert_intermediate_size": 32}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "vision_use_head": False,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_ROUTERS = (".gate.weight", ".router.weight")

TENSOR, PIPELINE, EXPERT, WHOLE_EXPERTS = "tensor", "pipeline", "expert", "tensor with expert"
EVERYWHERE = "tensor, with all experts on each rank"
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    TENSOR: {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    PIPELINE: {"pipeline_model_parallel_size": 2},
    EXPERT: {"expert_model_parallel_size": 2},
    WHOLE_EXPERTS: {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    EVERYWHERE: {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
}


@dataclass(frozen=True)
class Family:
    """One model family, as a configuration of transformers of a size that a CPU computes at once."""

    config: str
    """Class in transformers."""
    settings: Mapping[str, Any]
    architecture: str | None = None
    """Name in `config.json`, if it is not that of the class in transformers for causal language models."""
    has_experts: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    """Layouts that Megatron or the bridge does not support, and a part of the sentence that refuses them."""
    further: Sequence[str] = ()
    """Layouts besides the usual ones."""

    @property
    def layouts(self) -> list[str]:
        layouts = [TENSOR, PIPELINE, *([EXPERT] if self.has_experts else []), *self.further]
        return [layout for layout in layouts if layout not in self.refused]


FAMILIES: Mapping[str, Family] = {
    "Qwen2": Family("Qwen2Config", _SIZES | {"num_key_value_heads": 2}),
    "Qwen3": Family("Qwen3Config", _GROUPED | {"tie_word_embeddings": False}),
    "Mistral": Family("MistralConfig", _GROUPED | {"sliding_window": None}),
    "Mistral, window": Family("MistralConfig", _GROUPED | {"sliding_window": 8}),
    "Llama": Family("LlamaConfig", _GROUPED),
    "Llama 3.1": Family("LlamaConfig", _GROUPED | {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "Qwen3-MoE": Family("Qwen3MoeConfig", _GROUPED | _EXPERTS, has_experts=True),
    "OLMoE": Family(
        "OlmoeConfig",
        _SIZES | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
        has_experts=True,
        refused={TENSOR: "the norms of its queries and keys span all heads: set tensor_model_parallel_size to 1"},
    ),
    "Gemma": Family("GemmaConfig", _GROUPED),
    "Gemma 2": Family("Gemma2Config", _GROUPED | _GEMMA),
    "Gemma 3": Family("Gemma3TextConfig", _GROUPED | _GEMMA | {"num_hidden_layers": 6}),
    "Qwen3-Next": Family("Qwen3NextConfig", _DELTA_RULE | _EXPERTS | _SHARED_EXPERT, has_experts=True),
    "Qwen3.5": Family("Qwen3_5TextConfig", _DELTA_RULE),
    "Qwen3.5-MoE": Family("Qwen3_5MoeTextConfig", _DELTA_RULE | _EXPERTS | _SHARED_EXPERT, has_experts=True),
    "Gemma 3, images": Family(
        "Gemma3Config",
        {
            "text_config": _GROUPED | _GEMMA | {"num_hidden_layers": 6},
            "vision_config": _SIGLIP,
            "image_token_index": 320,
            "mm_tokens_per_image": 4,
        },
        architecture="Gemma3ForConditionalGeneration",
    ),
    "Qwen3.5, images": Family(
        "Qwen3_5Config",
        {
            "text_config": _DELTA_RULE | {"tie_word_embeddings": True, "rope_parameters": _SECTIONS},
            "vision_config": _QWEN_VISION,
            "tie_word_embeddings": True,
        },
        architecture="Qwen3_5ForConditionalGeneration",
    ),
    "Qwen3.5-MoE, images": Family(
        "Qwen3_5MoeConfig",
        {
            "text_config": _DELTA_RULE | _EXPERTS | _SHARED_EXPERT | {"rope_parameters": _SECTIONS},
            "vision_config": _QWEN_VISION,
        },
        architecture="Qwen3_5MoeForConditionalGeneration",
        has_experts=True,
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2Config", _LATENT | {"topk_method": "greedy", "norm_topk_prob": False}, has_experts=True
    ),
    "DeepSeek-V3": Family("DeepseekV3Config", _LATENT, has_experts=True),
    "Kimi K2": Family(
        "DeepseekV3Config",
        _LATENT | {"scoring_func": "sigmoid"},
        architecture="KimiK2ForCausalLM",
        has_experts=True,
    ),
    "GLM-4": Family("GlmConfig", _GROUPED),
    "GLM-4-0414": Family("Glm4Config", _GROUPED),
    "GLM-4.5": Family("Glm4MoeConfig", _GROUPED | _ROUTED_EXPERTS | {"use_qk_norm": True}, has_experts=True),
    "GLM-4.7-Flash": Family("Glm4MoeLiteConfig", _LATENT, has_experts=True),
    "gpt-oss": Family(
        "GptOssConfig",
        _GROUPED | _LOCAL_EXPERTS | {"sliding_window": 8, "rope_parameters": _YARN},
        has_experts=True,
        refused={TENSOR: "Bias in Moe is only supported when ETP==1"},
        further=[WHOLE_EXPERTS, EVERYWHERE],
    ),
    "MiniMax-M2": Family(
        "MiniMaxM2Config",
        _GROUPED | _LOCAL_EXPERTS,
        has_experts=True,
        refused={TENSOR: "the norms of its queries and keys span all heads: set tensor_model_parallel_size to 1"},
    ),
    "Nemotron-H": Family("NemotronHConfig", _GROUPED | _MAMBA),
    "Nemotron-H, experts": Family("NemotronHConfig", _GROUPED | _MAMBA | _HYBRID_EXPERTS, has_experts=True),
}


def write_checkpoint(name: str, path: Path, seed: int = 1) -> Path:
    """Write the family's checkpoint, with random values in every tensor."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.settings)
    torch.manual_seed(seed)
    model = class_of(family.architecture).from_config(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Routers choose each of the experts for some tokens.
            scale = 0.5 if key.endswith(_ROUTERS) else 0.1
            parameter.add_(scale * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.copy_(0.1 * torch.randn_like(buffer))
    save(model, path)
    byte_tokenizer().save_pretrained(path)
    if config.model_type in ("qwen3_5", "qwen3_5_moe"):
        transformers.Qwen2VLImageProcessor().save_pretrained(path)  # its engines read the file at their start
    if family.architecture is not None:
        file = path / "config.json"
        content = json.loads(file.read_text()) | {"architectures": [family.architecture]}
        file.write_text(json.dumps(content))
    return path


def class_of(architecture: str | None) -> Any:
    """The class in transformers that opens checkpoints of this architecture."""
    return AutoModelForImageTextToText if architecture in TEXT_PARTS else AutoModelForCausalLM


def save(model: PreTrainedModel, path: Path) -> None:
    """Save a model with the names of tensors that its family's published checkpoints have."""
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    # transformers reads these tensors, but writes them in another form: Nemotron-H's embeddings, Gemma 3's vision tower
    # and the experts of Qwen3.5, all of which are in one tensor.
    renamed = {
        "nemotron_h": ("backbone.embedding.", "backbone.embeddings."),
        "gemma3": ("tower.", "tower.vision_model."),
    }
    kind = model.config.model_type
    if kind in renamed:
        tensors = {name.replace(*renamed[kind]): one for name, one in tensors.items()}
    elif kind == "qwen3_5_moe":
        tensors = {name: one.detach().clone() for name, one in model.state_dict().items()}
    else:
        return
    save_file(tensors, file, metadata={"format": "pt"})


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's text part, which is all of it unless the model also takes images."""
    return {name: one for name, one in load_file(path / "model.safetensors").items() if not is_of_images(name)}


def reference(path: Path, sequences: Sequence[Sequence[int]], responses: Sequence[int], out: Path) -> list[list[float]]:
    """What transformers computes: log-probabilities of all tokens but the first.

    Writes to `out` the gradient, by the names of the checkpoint, of the mean negative log-likelihood of the responses,
    which are the last tokens of the sequences.
    """
    # Other implementations of attention leave out Gemma 2's caps of the scores.
    [architecture] = json.loads((path / "config.json").read_text())["architectures"]
    model = class_of(architecture).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    result = []
    loss = torch.zeros(())
    for tokens, response in zip(sequences, responses, strict=True):
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        result.append(logprobs.tolist())
        loss = loss - logprobs[-response:].sum() / sum(responses)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.zero_()
    save(model, out)
    return result
