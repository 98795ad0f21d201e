"""The dimensions of the model to train, read from its `config.json`, without loading weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_async.config.model_flags import COMPARED
from miles_async.config.schema import Learner, Model, RunConfig
from miles_async.errors import UserError
from miles_async.models.families import ADAPTED
from miles_async.models.layers import ModelShape
from miles_async.models.lora import base_hash
from miles_async.models.lora_layers import HEAD, MODULES, LinearLayers, engine_modules, kinds_of
from miles_async.models.plugin import MODELS, ModelPlugin, plugin_errors
from miles_async.models.text_part import text_config
from miles_async.planning.adapters import engine_rank


def shape_of(model: Model) -> ModelShape | None:
    """The layers of `hf_checkpoint` or of the tiny model; None if the checkpoint has no readable `config.json`.

    A broken `config.json` is reported elsewhere (`config_complaint`). A model type that neither a plug-in nor
    `FAMILIES` describes is read like Llama's. The shape of a type without a plug-in is None if dimensions are missing.
    Raises UserError if the plug-in fails.
    """
    if model.hf_checkpoint is None:
        tiny = model.tiny_model
        return ModelPlugin().shape(
            {
                "num_hidden_layers": tiny.num_layers,
                "hidden_size": tiny.hidden_size,
                "num_attention_heads": tiny.num_attention_heads,
                "num_key_value_heads": tiny.num_query_groups,
                "intermediate_size": tiny.ffn_hidden_size,
            }
        )
    config = hf_config(model.hf_checkpoint)
    if not MODELS.has(config.get("model_type", "")):
        with suppress(KeyError, TypeError):  # checks report what is wrong with a dimension
            return ModelPlugin().shape(text_config(dict(config)))
        return None
    plugin = MODELS.find(config["model_type"])
    with plugin_errors(plugin, f"read the shape of the model from {model.hf_checkpoint}/config.json"):
        return plugin.shape(config)


def linear_layers_of(model: Model) -> LinearLayers | None:
    """The linear layers of `hf_checkpoint` or of the tiny model.

    None if the checkpoint has no complete `config.json`, or if its family is not known and it has no plug-in. Raises
    UserError if the plug-in fails.
    """
    family = family_of(model)
    if model.hf_checkpoint is not None and family not in ADAPTED and not MODELS.has(family):
        return None
    shape = shape_of(model)
    return None if shape is None else shape.linear_layers()


def family_of(model: Model) -> str:
    """The `model_type` of the language model of `hf_checkpoint`; empty for a tiny model, or if there is none."""
    config = {} if model.hf_checkpoint is None else text_config(hf_config(model.hf_checkpoint))
    return str(config.get("model_type", ""))


def adapted_modules(learner: Learner, model: Model) -> Sequence[str]:
    """The kinds of linear layers that get an adapter, in some decoder layer at least.

    If the model is not known yet, all layers that most models have are candidates. Raises UserError if an entry of
    `lora_target_modules` chooses none, or if none is left.
    """
    targets, layers = learner.lora_targets, linear_layers_of(model)
    if layers is None:
        return [kind for kind in targets.modules if kind in (*MODULES, HEAD)]
    return kinds_of(targets.of_model(layers))


def adapter_of_engines(learner: Learner, model: Model) -> tuple[int, tuple[str, ...]]:
    """The rank of the adapter in engines, and the kinds of its layers under SGLang's names."""
    layers, modules, rank = linear_layers_of(model), adapted_modules(learner, model), learner.lora_rank
    return rank if layers is None else engine_rank(layers, modules, rank), engine_modules(modules)


def dimensions(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint stores of its model, so that another model is recognised: the main dimensions, if known.

    A checkpoint of adapters also stores what its tensors do not say: the factor of their outputs, and the layers that
    have one. It identifies the weights below them (`base_hash`), if those are in a folder.
    """
    shape, checkpoint, learner = shape_of(config.model), config.model.hf_checkpoint, config.learner
    known: dict[str, Any] = {}
    if shape is not None:
        known = {"layers": len(shape.layers), "hidden": shape.hidden}
        known |= {"heads": shape.attention.heads, "query_groups": shape.attention.groups}
        known |= {"vocabulary": shape.vocabulary} if shape.vocabulary else {}
    if learner.lora_rank:
        known["lora_scale"] = learner.lora_scale
        if (layers := linear_layers_of(config.model)) is not None:
            known["lora_target_modules"] = " ".join(learner.lora_targets.of_model(layers))
        if checkpoint is not None and not config_complaint(checkpoint):
            known["base_hash"] = base_hash(Path(checkpoint).expanduser())
    return known


def hf_config(hf_checkpoint: str) -> Mapping[str, Any]:
    """The contents of a checkpoint's `config.json`; empty if there is no usable one."""
    return {} if config_complaint(hf_checkpoint) else _read_config(hf_checkpoint)


def model_type_of(hf_checkpoint: str) -> str | None:
    """The `model_type` of a checkpoint, which selects its plug-in; None if its `config.json` does not define it."""
    return _read_config(hf_checkpoint).get("model_type")


def reference_of(ref_load: str | None, hf_checkpoint: str) -> str:
    """The Hugging Face checkpoint of the reference model.

    Scripts for slime and Miles name a conversion of `hf_checkpoint` to the format of Megatron-LM in `ref_load`. The
    checkpoint itself has the same weights.
    """
    return hf_checkpoint if ref_load is None or is_of_megatron(ref_load) else ref_load


def is_of_megatron(folder: str) -> bool:
    """Whether a folder holds a checkpoint in the format of Megatron-LM."""
    path = Path(folder).expanduser()
    return (path / "latest_checkpointed_iteration.txt").is_file() and not (path / "config.json").is_file()


def architecture_of(hf_checkpoint: str) -> str | None:
    """The class of a checkpoint's model in transformers, by which Megatron-Bridge knows it; None if it is not named."""
    architectures = _read_config(hf_checkpoint).get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None


def quantization_of(hf_checkpoint: str) -> str | None:
    """How the weights of a checkpoint are quantised, such as fp8; None if they are not."""
    quantization = _read_config(hf_checkpoint).get("quantization_config")
    return None if quantization is None else str(quantization.get("quant_method", "quantization_config"))


def mtp_heads(config: RunConfig) -> int:
    """Number of MTP heads that the learner trains."""
    if not config.learner.enable_mtp_training or config.model.hf_checkpoint is None:
        return 0
    # The config.json of Qwen3-Next does not count its only one.
    return int(COMPARED["mtp_num_layers"](text_config(hf_config(config.model.hf_checkpoint))) or 1)


def balances_experts_by_bias(model: Model) -> bool:
    """Whether each optimizer step adjusts the biases of the routers to the number of tokens that each expert received.

    The routers of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and of the models that adopted them learn in this way.
    The `config.json` of these models calls the number of experts `n_routed_experts`.
    """
    config = {} if model.hf_checkpoint is None else _read_config(model.hf_checkpoint)
    return "n_routed_experts" in config or "n_routed_experts" in text_config(config)


def context_limit(config: RunConfig) -> int | None:
    """The most tokens of a prompt and its response that the engines of a run accept; None if no limit is known."""
    server, checkpoint = config.engine.sglang_server_args, config.model.hf_checkpoint
    if checkpoint is None or server.get("allow_auto_truncate"):
        return None
    limit = server.get("context_length", _context_length(checkpoint))
    return limit if isinstance(limit, int) else None


def _context_length(hf_checkpoint: str) -> int | None:
    """The context of the model in tokens; None if `config.json` does not define it."""
    config: Mapping[str, Any] = _read_config(hf_checkpoint)
    config = config if "max_position_embeddings" in config else text_config(config)
    if (positions := config.get("max_position_embeddings")) is None:
        return None
    rope = config.get("rope_scaling") or {}
    # Models with one of these keys name the scaled length.
    scaled = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
    return int(positions if scaled else positions * rope.get("factor", 1))


def config_complaint(hf_checkpoint: str) -> str | None:
    """What is wrong with the `config.json` of a checkpoint, as the end of a sentence; None if it can be used."""
    try:
        config = json.loads((Path(hf_checkpoint).expanduser() / "config.json").read_bytes())
    except OSError as error:
        return f"config.json cannot be read ({error.strerror}): copy the checkpoint again"
    except (ValueError, RecursionError) as error:
        return f"config.json is not valid JSON ({error}): copy the checkpoint again"
    if not isinstance(config, dict):
        return f"config.json contains a {type(config).__name__}, not an object: copy the checkpoint again"
    if not isinstance(config.get("model_type"), str | None):
        return f"model_type in config.json is {config['model_type']!r}: set it to a name, such as qwen3"
    dimensions = {name: config[name] for name in _DIMENSIONS if config.get(name) is not None}
    for name, value in dimensions.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name} in config.json is {value!r}: set it to a positive whole number"
    for name in ("quantization_config", "rope_scaling", "text_config"):
        if not isinstance(config.get(name), dict | None):
            return f"{name} in config.json is {config[name]!r}: set it to an object"
    return None


_DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


class _HfConfig(dict[str, Any]):
    """The contents of a checkpoint's `config.json`. A plug-in that reads a missing key gets a UserError."""

    def __init__(self, hf_checkpoint: str, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._checkpoint = hf_checkpoint

    def __missing__(self, key: str) -> Any:
        raise UserError(
            f"hf_checkpoint {self._checkpoint}: config.json has no {key!r}, which the model needs; copy the checkpoint "
            "again"
        )


def _read_config(hf_checkpoint: str) -> dict[str, Any]:
    """The contents of `config.json`; an empty dictionary if there is no readable one."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads((Path(hf_checkpoint).expanduser() / "config.json").read_bytes())
        return _HfConfig(hf_checkpoint, content if isinstance(content, dict) else {})
    return {}
