"""The text part of models that also take images: the language model, which is all that a run trains.

A checkpoint of such a model holds a vision tower and a projector beside the language model. The learner trains and
publishes the language model under the names of the checkpoint. Engines keep the other tensors as they loaded them, and
exports copy these tensors from the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TEXT_PARTS: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""The architectures that also take images, each with the architecture of its text part."""
_OF_IMAGES = re.compile(r"(^|\.)(visual|vision_tower|multi_modal_projector)\.")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a checkpoint's `config.json` about the language model: all of it if the model takes only text."""
    part: Mapping[str, Any] | None = config.get("text_config")
    return part or config


def is_of_images(name: str) -> bool:
    """Whether a tensor of a checkpoint, or a parameter of an engine, is outside the text part."""
    return _OF_IMAGES.search(name) is not None


def text_name(name: str) -> str:
    """The name that a tensor of the text part has in a checkpoint that holds nothing else."""
    return name.replace("language_model.", "", 1)
