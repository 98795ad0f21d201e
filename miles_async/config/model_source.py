"""Which source the learner takes a model from: a plug-in of `miles_async.models`, or NVIDIA's Megatron-Bridge.

Nothing here imports Megatron-Bridge, so that `--check-config` stays fast.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from miles_async.config.model_shape import architecture_of, model_type_of, quantization_of
from miles_async.errors import UserError
from miles_async.models.plugin import MODELS
from miles_async.models.text_part import TEXT_PARTS

BRIDGE_VERSION = "0.6.2"
"""The version of Megatron-Bridge that `make setup-bridge` installs. The learner uses parts of it that may change."""
TESTED = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "KimiK2ForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MistralForCausalLM",
        "NemotronHForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""Architectures of Megatron-Bridge that are compared with transformers in `tests/bridge`."""
UNTESTED = frozenset(
    {
        "BailingMoeV2ForCausalLM",
        "DeciLMForCausalLM",
        "DeepseekV4ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "FalconH1ForCausalLM",
        "Gemma4ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV3ForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "NemotronForCausalLM",
        "SarvamMLAForCausalLM",
        "SarvamMoEForCausalLM",
        "Step3p5ForCausalLM",
    }
)
"""The other language models that Megatron-Bridge knows; the user has to ask for the bridge."""

Source = Literal["raw", "bridge"]


def source_of(mode: Source | None, hf_checkpoint: str, *, trains_adapter: bool = False) -> Source:
    """Return the source of a checkpoint's model; `mode` is the setting `megatron_to_hf_mode`.

    A run that trains an adapter uses the plug-in, if the model has one.

    Raises UserError if no source has the model, or if Megatron-Bridge is needed and cannot be used.
    """
    if mode == "bridge" and trains_adapter and has_plugin(hf_checkpoint):
        mode = "raw"
    model_type, whole = model_type_of(hf_checkpoint), architecture_of(hf_checkpoint)
    architecture = whole if whole is None else TEXT_PARTS.get(whole, whole)
    if (method := quantization_of(hf_checkpoint)) is not None:
        raise UserError(
            f"hf_checkpoint {hf_checkpoint} is quantised ({method}), and the learner trains float32 or bfloat16 "
            "weights: use a bfloat16 checkpoint of the model, or convert this one"
        )
    if mode == "bridge":
        if architecture is not None and architecture not in TESTED | UNTESTED:
            raise UserError(
                f"Megatron-Bridge {BRIDGE_VERSION} has no language model {architecture}, the architecture of "
                f"hf_checkpoint {hf_checkpoint}: use another model, or unset megatron_to_hf_mode and add a model "
                "plug-in"
            )
        if (complaint := _bridge_complaint()) is not None:
            raise UserError(f"megatron_to_hf_mode bridge: {complaint}, or unset megatron_to_hf_mode")
        return "bridge"
    # A broken or incomplete config.json is reported elsewhere.
    if model_type is None or MODELS.has(model_type):
        return "raw"
    unknown = f"hf_checkpoint {hf_checkpoint} has the model_type {model_type}: {MODELS.missing(model_type)}"
    if architecture in UNTESTED or (mode == "raw" and architecture in TESTED):
        raise UserError(f"{unknown}; or set megatron_to_hf_mode to bridge")
    if architecture not in TESTED:
        raise UserError(unknown)
    if (complaint := _bridge_complaint()) is not None:
        raise UserError(f"{unknown}; or use Megatron-Bridge, which has {architecture}: {complaint}")
    return "bridge"


def has_plugin(hf_checkpoint: str) -> bool:
    """Whether the model of a checkpoint has a plug-in."""
    model_type = model_type_of(hf_checkpoint)
    return model_type is not None and MODELS.has(model_type)


def _bridge_complaint() -> str | None:
    """Why Megatron-Bridge cannot be used, and what to do; None if it can."""
    do = "run make setup-bridge, and start the run with .venv-bridge/bin/python"
    if sys.version_info < (3, 12):
        return f"Megatron-Bridge needs Python 3.12, and this is {sys.version_info.major}.{sys.version_info.minor}: {do}"
    try:
        installed = version("megatron-bridge")
    except PackageNotFoundError:
        return f"Megatron-Bridge is not installed: {do}"
    if installed != BRIDGE_VERSION:
        return f"Megatron-Bridge {installed} is installed, but the learner works with {BRIDGE_VERSION}: {do}"
    return None
