"""Models that plug-ins describe: Megatron's GPT model with the dimensions and the layers that a plug-in returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import AutoConfig

from miles_async.adapters.megatron.model.hf_weights import WeightConverter, export_weights, load_weights
from miles_async.adapters.megatron.model.linear_parts import Part, equal, query_key_value
from miles_async.adapters.megatron.model.local_layers import dtype_of, local_layer_spec, uses_local_layers
from miles_async.adapters.megatron.model.source import ModelSource, chosen_fusions, cpu_fields, passed_on, run_fields
from miles_async.config.schema import Learner
from miles_async.errors import UserError
from miles_async.models.families import HfConfig
from miles_async.models.plugin import MODELS, Custom, ModelPlugin, QueryKeyValue, plugin_errors
from miles_async.plugins import name_of

_ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}
"""By `hidden_act` of `config.json`."""


class PluginSource(ModelSource):
    """The model of a checkpoint whose `model_type` a plug-in describes.

    Raises UserError if no plug-in supports the model, if the plug-in fails or does not fit the checkpoint, and if
    Megatron does not support the scaling of the rotary embedding.
    """

    takes_positions: ClassVar[bool] = True

    def __init__(self, settings: Learner, hf_checkpoint: str, *, fuses: bool = False) -> None:
        self._plugin, self._hf_config = _read_checkpoint(hf_checkpoint)
        self._checkpoint = hf_checkpoint
        self._local = uses_local_layers(settings)
        self.config = _transformer_config(self._plugin, self._hf_config, settings, fuses=fuses)
        self.shape = self._plugin.shape(self._hf_config)
        # Tensor-parallel ranks hold equal parts of the vocabulary.
        self._padded = self.shape.vocabulary + -self.shape.vocabulary % settings.tensor_model_parallel_size
        self.converter = WeightConverter(
            self._plugin, self._hf_config, padded_vocabulary=self._padded, dtype=dtype_of(settings)
        )
        with plugin_errors(self._plugin, "describe its position embedding"):
            arguments = self._plugin.gpt_model(self._hf_config)
        of_config = {name for name in arguments if name.startswith("yarn_")}
        for name in of_config:
            setattr(self.config, name, arguments[name])
        self._position_embedding = {name: value for name, value in arguments.items() if name not in of_config}

    def build(self, vp_stage: int | None) -> torch.nn.Module:
        config, plugin, hf_config = self.config, self._plugin, self._hf_config
        if self._local:
            spec = local_layer_spec(config, vp_stage)
        else:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        with plugin_errors(plugin, "change the layer spec"):
            spec = plugin.layer_spec(spec, hf_config)
        chunk: torch.nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=self._padded,
            max_sequence_length=hf_config["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=hf_config["tie_word_embeddings"],
            vp_stage=vp_stage,
            **self._position_embedding,
        )
        with plugin_errors(plugin, "finish the model"):
            plugin.finish_model(chunk, hf_config)
        return chunk

    def load(self, chunks: Sequence[torch.nn.Module]) -> None:
        load_weights(self.converter, chunks, self._checkpoint)

    def linear_parts(self, name: str, outputs: int) -> list[Part]:
        names = [hf_name.removesuffix(".weight") for hf_name in self.converter.hf_names(name)]
        conversion, ranks = self.converter.conversion(name), parallel_state.get_tensor_model_parallel_world_size()
        if isinstance(conversion, Custom):
            raise UserError(f"the model plug-in {name_of(self._plugin)} computes {names[0]}: unset lora_rank")
        if isinstance(conversion, QueryKeyValue):
            one = self.shape.attention
            return query_key_value(names, heads=one.heads // ranks, groups=one.groups // ranks, width=one.width)
        return equal(names, outputs)

    def export(self, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.converter, chunks)


def _read_checkpoint(hf_checkpoint: str) -> tuple[ModelPlugin, HfConfig]:
    """Return the plug-in for a checkpoint, and the checkpoint's configuration with the defaults of transformers."""
    try:
        config = AutoConfig.from_pretrained(hf_checkpoint).to_dict()
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"transformers cannot read {hf_checkpoint}/config.json: {reason}") from error
    try:
        return MODELS.find(config["model_type"]), config
    except UserError as error:
        raise UserError(f"{hf_checkpoint}: {error}") from error


def _transformer_config(
    plugin: ModelPlugin, hf_config: HfConfig, settings: Learner, *, fuses: bool
) -> TransformerConfig:
    with plugin_errors(plugin, "describe its shape and Megatron's configuration"):
        shape, of_the_model = plugin.shape(hf_config), plugin.transformer_config(hf_config)
    attention, experts = shape.attention, shape.experts
    arguments: dict[str, Any] = {
        "num_layers": len(shape.layers),
        "hidden_size": shape.hidden,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.groups,
        "kv_channels": attention.width,
        "ffn_hidden_size": shape.kinds[0].feed_forward.width,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": hf_config.get("attention_dropout", 0.0),
        "masked_softmax_fusion": True,
    }
    if experts:
        arguments |= {"num_moe_experts": experts.count, "moe_router_topk": experts.active}
        arguments["moe_ffn_hidden_size"] = experts.width
    if "activation_func" not in of_the_model:
        arguments["activation_func"] = _activation(hf_config["hidden_act"])
    if "layernorm_epsilon" not in of_the_model:
        arguments["layernorm_epsilon"] = hf_config["rms_norm_eps"]
    arguments |= run_fields(settings) | of_the_model | chosen_fusions(settings) | passed_on(settings, "transformer")
    local = uses_local_layers(settings)
    if not local:
        fused = {
            "apply_rope_fusion": True,
            # Megatron has this kernel for few activations.
            "bias_activation_fusion": arguments["activation_func"] is silu,
            "gradient_accumulation_fusion": True,
            "moe_permute_fusion": experts is not None,
        }
        arguments = fused | arguments
    if experts and local:
        arguments["moe_grouped_gemm"] = False
    arguments |= cpu_fields(has_experts=experts is not None, fuses=fuses)
    try:
        config = TransformerConfig(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"Megatron refuses the configuration of the model plug-in {name_of(plugin)}: {error}"
        ) from error
    config.variable_seq_lengths = True
    return config


def _activation(name: str) -> Any:
    if name not in _ACTIVATIONS:
        raise UserError(
            f"the learner does not know the activation {name!r}; use a model with {' or '.join(_ACTIVATIONS)}, or let "
            "the transformer_config of its model plug-in return activation_func"
        )
    return _ACTIVATIONS[name]
