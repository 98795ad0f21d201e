"""The plug-in for Gemma (arXiv 2403.08295), and an example of a plug-in: it needs no change in `adapters`.

Gemma differs from Llama in four points. Norms multiply by 1 + weight. Embeddings are multiplied by the square root of
the hidden size. The feed-forward layers are gated with GELU. The width of a head is not the hidden size over the heads.

SGLang always computes the exact GELU. For `hidden_act: gelu_pytorch_tanh` the learner computes the approximation, like
transformers, so the log-probabilities of engine and learner differ slightly.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from miles_async.models.families import HfConfig
from miles_async.models.layers import ModelShape
from miles_async.models.plugin import ModelPlugin


class Gemma(ModelPlugin):
    """Gemma 1 (`GemmaForCausalLM`) of 2 and 7 billion parameters. Gemma 2 and 3 have other layers."""

    name = "gemma"

    def shape(self, config: HfConfig) -> ModelShape:
        # transformers ties the embeddings unless config.json says otherwise.
        return replace(super().shape(config), is_tied=config.get("tie_word_embeddings", True))

    def transformer_config(self, config: HfConfig) -> dict[str, Any]:
        return super().transformer_config(config) | {"layernorm_zero_centered_gamma": True}

    def finish_model(self, model: Any, config: HfConfig) -> None:
        """Let the first stage scale its embeddings. The output layer, which shares their weights, is not scaled."""
        if model.pre_process:
            model.embedding.register_forward_hook(partial(_scale_output, config["hidden_size"] ** 0.5))


def _scale_output(scale: float, module: Any, inputs: Any, output: Any) -> Any:
    # In bfloat16 the factor is rounded, as in transformers.
    return output * output.new_tensor(scale)
