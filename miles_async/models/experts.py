"""Plug-ins for mixture-of-experts models: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from miles_async.models.dense import Qwen3
from miles_async.models.families import HfConfig, attention, experts
from miles_async.models.layers import Layer
from miles_async.models.plugin import Conversion, GateUp, ModelPlugin, Same


class Mixtral(ModelPlugin):
    """Mixtral (arXiv 2401.04088): Llama's layers with experts. Each token uses `num_experts_per_tok` of them."""

    name = "mixtral"

    def transformer_config(self, config: HfConfig) -> dict[str, Any]:
        return super().transformer_config(config) | expert_config(config, weights_add_up_to_one=True)

    def layer_tensors(self, config: HfConfig) -> dict[str, Conversion]:
        return super().layer_tensors(config) | expert_tensors("block_sparse_moe", gate="w1", up="w3", down="w2")


class Qwen3Moe(Qwen3):
    """Qwen3-MoE: Qwen3's attention with experts in every layer."""

    name = "qwen3_moe"

    def layer(self, config: HfConfig, number: int) -> Layer:
        return Layer(attention(config, has_norms=True), experts(config))

    def transformer_config(self, config: HfConfig) -> dict[str, Any]:
        experts = expert_config(config, weights_add_up_to_one=config["norm_topk_prob"])
        # These fusions need CUDA; the learner turns them off on CPUs.
        fusions = {"persist_layer_norm": True, "bias_activation_fusion": True, "bias_dropout_fusion": True}
        return super().transformer_config(config) | experts | fusions

    def layer_tensors(self, config: HfConfig) -> dict[str, Conversion]:
        return super().layer_tensors(config) | expert_tensors("mlp", gate="gate_proj", up="up_proj", down="down_proj")


def expert_tensors(block: str, *, gate: str, up: str, down: str) -> dict[str, Conversion]:
    """Map the router and the experts of a layer. `block` is the prefix of their tensors in the checkpoint."""
    expert = f"{block}.experts.{{expert}}"
    return {
        "mlp.router.weight": Same(f"{block}.gate.weight"),
        "mlp.experts.linear_fc1.weight{expert}": GateUp(f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
        "mlp.experts.linear_fc2.weight{expert}": Same(f"{expert}.{down}.weight"),
    }


def expert_config(config: HfConfig, *, weights_add_up_to_one: bool) -> dict[str, Any]:
    """Return the fields of Megatron's `TransformerConfig` for experts that a softmax router chooses.

    With `weights_add_up_to_one` the softmax is over the chosen experts of a token, else over all experts.
    """
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not weights_add_up_to_one,
        # A loss that balances the experts would change the gradient of the policy loss.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": config["router_aux_loss_coef"],
        "moe_grouped_gemm": True,
    }
