"""The products that a model's shape counts are those that torch counts in the model of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from miles_async.models.layers import DeltaRule
from miles_async.models.plugin import MODELS, ModelPlugin
from tests.bridge.families import FAMILIES

TOKENS, CHUNK = 128, 64
"""Of the sequence, and of a chunk in which transformers computes the delta rule."""


@pytest.mark.parametrize(
    "name",
    [
        *("Llama", "Gemma", "Qwen2", "Qwen3-MoE", "MiniMax-M2", "gpt-oss", "GLM-4.5"),
        *("DeepSeek-V2", "DeepSeek-V3", "GLM-4.7-Flash", "Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next"),
    ],
)
def test_a_forward_pass_takes_the_products_that_the_shape_counts(name: str) -> None:
    config = getattr(transformers, FAMILIES[name].config)(**FAMILIES[name].settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)[None])
    content, kind = config.to_dict(), config.model_type
    shape = (MODELS.find(kind) if MODELS.has(kind) else ModelPlugin()).shape(content)
    rules = [rule for layer in shape.layers if isinstance(rule := shape.kinds[layer].attention, DeltaRule)]
    # transformers also computes pairs of a query and a later key.
    expected = shape.products(TOKENS, TOKENS**2) + TOKENS * shape.hidden * shape.vocabulary
    # Within a chunk, keys, queries and values are multiplied with each other, which the recurrence does not need.
    expected += sum(TOKENS * CHUNK * one.heads * (3 * one.width + 2 * one.value) for one in rules)
    # Norms and biases count as products of the shape, and angles of the rotary embedding as products of transformers.
    assert expected == pytest.approx(counter.get_total_flops() / 2, rel=0.012)
