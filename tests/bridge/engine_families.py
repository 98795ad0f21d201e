"""Families whose engine does not run on a CPU, and what SGLang's loader does with the tensors of each.

`test_engine_loaders.py` compares this table with SGLang. The documentation reads it too, so this file imports nothing
large.
"""

from __future__ import annotations

from collections.abc import Mapping

COPIES = None
"""The loader only copies elements, so transports can write into the engine's memory."""
_DECAY = "SGLang's loader computes what its parameter model.layers.0.mixer.A holds"
_LATENT = "SGLang's loader derives w_kc of a DeepseekV2AttentionMLA from the weights"
LOADERS: Mapping[str, str | None] = {
    "Qwen3-Next": COPIES,
    "Qwen3.5": COPIES,
    "Qwen3.5-MoE": COPIES,
    "Qwen3.5, images": COPIES,
    "Qwen3.5-MoE, images": COPIES,
    "DeepSeek-V2": _LATENT,
    "DeepSeek-V3": _LATENT,
    "Kimi K2": _LATENT,
    "gpt-oss": COPIES,
    "MiniMax-M2": COPIES,
    "Nemotron-H": _DECAY,
    "Nemotron-H, experts": _DECAY,
}
"""By family: `COPIES`, or the reason why SGLang's loader has to load the tensors by their names."""
WITHOUT_LOADER: Mapping[str, str] = {"GLM-4": "Unsupported TP style 'colwise_gather_output' for Transformers backend"}
"""By family that SGLang lacks: the error with which SGLang does not use transformers' model instead."""
