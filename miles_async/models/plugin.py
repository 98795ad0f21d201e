"""What a model plug-in provides: the layers of a model, its Megatron configuration, and the mapping of its weights.

A plug-in is a subclass of `ModelPlugin` (see `miles_async/plugins.py`). Its name is the `model_type` of the
checkpoint's `config.json`:

    [project.entry-points."miles_async.models"]
    gemma = "my_package.gemma:Gemma"

`--check-config` imports the plug-in and reads only `shape`. Import torch and Megatron inside the methods that need
them, so that the check stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_async.errors import UserError
from miles_async.json_values import shown_error
from miles_async.models.families import FAMILIES, HfConfig, plain_layer
from miles_async.models.layers import Layer, ModelShape
from miles_async.plugins import Kind, Plugin, name_of
from miles_async.user_code import USER_CODE_ERRORS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Same:
    """A Megatron parameter that equals one tensor of the checkpoint, up to the padding of a vocabulary."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """Megatron's fused projection or bias of queries, keys and values, which is grouped by key/value head."""

    query: str
    key: str
    value: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.query, self.key, self.value


@dataclass(frozen=True, slots=True)
class GateUp:
    """The gate and up projections of a gated feed-forward layer, which Megatron stacks by rows."""

    gate: str
    up: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.gate, self.up


@dataclass(frozen=True, slots=True)
class Custom:
    """A Megatron parameter that two functions of the plug-in compute from tensors of the checkpoint, and back.

    Both get whole tensors, before they are split among tensor-parallel ranks. Megatron's own split applies afterwards.
    """

    names: tuple[str, ...]
    to_megatron: Callable[[Sequence[Tensor], HfConfig], Tensor]
    """Returns the parameter from the tensors in the order of `names`."""
    to_hf: Callable[[Tensor, HfConfig], Sequence[Tensor]]
    """Returns the tensors in the order of `names` from the parameter."""


Conversion = Same | QueryKeyValue | GateUp | Custom

_NO_SCALING = "default"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1, 3.2 and 3.3. Megatron has these values as constants and supports no others."""


class ModelPlugin(Plugin):
    """Describes the models of one `model_type`. A plug-in overrides what differs from Llama.

    Every learner rank calls the methods with the configuration of the checkpoint. What they return does not depend on
    the parallel layout.
    """

    hf_layer = "model.layers.{layer}."
    """Prefix of the names of a layer's tensors in the checkpoint."""

    def layer(self, config: HfConfig, number: int) -> Layer:
        """Return the layer of this number, from 0 on, with its dimensions.

        Checks of the layout, the memory plan, operations per second and Megatron's configuration follow from it.
        """
        return FAMILIES.get(config.get("model_type", ""), plain_layer)(config, number)

    def shape(self, config: HfConfig) -> ModelShape:
        """Return all layers, and the dimensions around them."""
        layers = [self.layer(config, number) for number in range(config["num_hidden_layers"])]
        kinds = tuple(dict.fromkeys(layers))
        return ModelShape(
            hidden=config["hidden_size"],
            vocabulary=config.get("vocab_size", 0),
            is_tied=config.get("tie_word_embeddings", False),
            kinds=kinds,
            layers=tuple(map(kinds.index, layers)),
        )

    def transformer_config(self, config: HfConfig) -> dict[str, Any]:
        """Return fields of Megatron's `TransformerConfig`, besides the dimensions of `shape` and the parallel layout.

        The activation follows from `hidden_act` and the norm's epsilon from `rms_norm_eps` unless they are set here.
        """
        return {"add_qkv_bias": bool(config.get("attention_bias"))}

    def gpt_model(self, config: HfConfig) -> dict[str, Any]:
        """Return arguments of Megatron's `GPTModel` that describe the position embedding.

        Those of YaRN (arXiv 2309.00071), which begin with `yarn_`, become fields of Megatron's configuration, where
        `GPTModel` reads them. Raises UserError if Megatron does not support the scaling of the rotary embedding.
        """
        rope = config["rope_parameters"]
        arguments = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
        kind = rope.get("rope_type", _NO_SCALING)
        if kind == "llama3" and _LLAMA3.items() <= rope.items():
            return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        if kind == "yarn" and rope.get("attention_factor") is None:
            return arguments | {
                "position_embedding_type": "yarn",
                "yarn_rotary_scaling_factor": rope["factor"],
                "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
                "yarn_beta_fast": rope.get("beta_fast") or 32.0,
                "yarn_beta_slow": rope.get("beta_slow") or 1.0,
                "yarn_mscale": rope.get("mscale"),
                "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
                "yarn_correction_range_round_to_int": rope.get("truncate", True),
            }
        if kind != _NO_SCALING:
            raise UserError(
                f"the learner does not support rope type {kind!r} with {rope}; use a model with plain RoPE, Llama 3's "
                "or YaRN without an attention_factor"
            )
        return arguments

    def layer_spec(self, spec: Any, config: HfConfig) -> Any:
        """Return the layer spec (`TransformerBlockSubmodules`) of a pipeline stage.

        `spec` is Megatron's spec for the `TransformerConfig`: with Transformer Engine on GPUs, and with the attention
        and norms of this project on CPUs.
        """
        return spec

    def finish_model(self, model: Any, config: HfConfig) -> None:
        """Change one stage of a new `GPTModel` before its weights are loaded. `model.pre_process` marks the first."""

    def outer_tensors(self, config: HfConfig) -> dict[str, Conversion]:
        """Map Megatron's parameters outside the layers to tensors of the checkpoint."""
        embedding = "model.embed_tokens.weight"
        return {
            "embedding.word_embeddings.weight": Same(embedding),
            "decoder.final_layernorm.weight": Same("model.norm.weight"),
            "output_layer.weight": Same(embedding if config["tie_word_embeddings"] else "lm_head.weight"),
        }

    def layer_tensors(self, config: HfConfig) -> dict[str, Conversion]:
        """Map Megatron's parameters of a layer, without `decoder.layers.N.`, to tensors of the checkpoint.

        The names of the tensors follow `hf_layer`. `{expert}` on both sides is the number of an expert in its layer.
        Transformer Engine fuses norms into the linear layers that follow them, so norms have two names in Megatron.
        """
        before_attention = Same("input_layernorm.weight")
        before_feed_forward = Same("post_attention_layernorm.weight")
        return {
            "input_layernorm.weight": before_attention,
            "self_attention.linear_qkv.layer_norm_weight": before_attention,
            "self_attention.linear_qkv.weight": QueryKeyValue(
                "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
            ),
            "self_attention.linear_qkv.bias": QueryKeyValue(
                "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
            ),
            "self_attention.linear_proj.weight": Same("self_attn.o_proj.weight"),
            "pre_mlp_layernorm.weight": before_feed_forward,
            "mlp.linear_fc1.layer_norm_weight": before_feed_forward,
            "mlp.linear_fc1.weight": GateUp("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "mlp.linear_fc2.weight": Same("mlp.down_proj.weight"),
        }

    def unused_tensors(self, config: HfConfig) -> tuple[str, ...]:
        """Return the ends of the names of tensors that may be in a checkpoint although the model has no use for them.

        Any other tensor that no parameter holds is an error when the checkpoint is loaded.
        """
        # Old checkpoints contain the frequencies of the rotary embedding, and some contain a tied output layer twice.
        frequencies = (".rotary_emb.inv_freq",)
        return (*frequencies, "lm_head.weight") if config["tie_word_embeddings"] else frequencies


MODELS = Kind("model plug-in", ModelPlugin, "miles_async.models", by_path=False)


@contextmanager
def plugin_errors(plugin: ModelPlugin, action: str) -> Iterator[None]:
    """Turn an error of the plug-in's own code into a UserError: "the model plug-in NAME failed to ACTION: ..."."""
    try:
        yield
    except UserError:
        raise
    except USER_CODE_ERRORS as error:
        # A plug-in is user code, which can raise any exception.
        raise UserError(f"the model plug-in {name_of(plugin)} failed to {action}: {shown_error(error)}") from error
