"""Models of NVIDIA's Megatron-Bridge: its Megatron configuration, its layers and its conversion of weights.

The bridge converts one parameter at a time, among the ranks of a tensor- or expert-parallel group. This module decides
what is converted when, checks that a checkpoint and the model fit, and sends weights between pipeline stages: the
bridge's own functions for this exchange pickles, and only warn of missing tensors.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import numbered_device, on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.hf_weights import broadcast_from_stage, open_tensors
from miles_async.adapters.megatron.model.linear_parts import Part, equal, query_key_value, stacked
from miles_async.adapters.megatron.model.local_layers import uses_local_layers
from miles_async.adapters.megatron.model.lora import adapters_of
from miles_async.adapters.megatron.model.process_groups import gather_json
from miles_async.adapters.megatron.model.source import ModelSource, cpu_fields, passed_on, run_fields
from miles_async.adapters.megatron.model.stand_in import stand_in
from miles_async.config.schema import Learner
from miles_async.errors import UserError
from miles_async.models.mtp_heads import is_of_heads, layers_of_heads
from miles_async.models.packed_experts import PARAMETERS
from miles_async.models.plugin import ModelPlugin
from miles_async.models.text_part import TEXT_PARTS, is_of_images, text_name

_BRIDGE_FIELDS = {
    "perform_initialization": False,
    "attention_backend": AttnBackend.auto,
    # Megatron pads the vocabulary so that tensor-parallel ranks hold equal parts of it.
    "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1,
    # A loss that balances the experts would change the gradient of the policy loss.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "fp16": False,
}
_LOCAL_FIELDS = {
    # These need Transformer Engine.
    "cross_entropy_loss_fusion": False,
    "fused_residual_rmsnorm": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "tp_comm_overlap": False,
    "use_te_rng_tracker": False,
}
_BRIDGE_CPU_FIELDS = {"moe_shared_expert_overlap": False}
_PACKED_PER_LAYER = 4
"""Weights and biases of the two layers of experts."""
_REFUSALS = (AssertionError, AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What Megatron and the bridge raise if they do not support a model, or if a checkpoint does not fit its config."""
_NORMS_OF_ALL_HEADS = ("MiniMaxM2ForCausalLM", "OlmoeForCausalLM")
"""With tensor parallelism the bridge does not split these norms (OLMoE), or leaves out a part of their gradient."""
_FREQUENCIES = ".rotary_emb.inv_freq"
"""The end of the names of tensors that the model has no use for."""
_SHARED_BY_HEADS = (".embed_tokens.weight", ".shared_head.head.weight")
"""The ends of the names of an MTP head's tensors that repeat the embedding and the output layer."""


class BridgeSource(ModelSource):
    """The model of a checkpoint whose architecture Megatron-Bridge knows.

    Raises UserError if the bridge does not support the model in this layout, or if the checkpoint does not fit it.
    """

    takes_positions: ClassVar[bool] = False

    def __init__(self, settings: Learner, hf_checkpoint: str, *, fuses: bool = False) -> None:
        self._path = Path(hf_checkpoint).expanduser()
        self._local = uses_local_layers(settings)
        self._library = _library(local=self._local)
        with open_tensors(self._path) as files:
            self._names: Mapping[str, str] = {name: name for name in files}
        try:
            self._auto = self._library.AutoBridge.from_hf_pretrained(str(self._path))
            if self._auto.hf_pretrained.config.architectures[0] in TEXT_PARTS:
                self._take_text_part()
            self._bridge = self._auto._model_bridge
            self.config = self._auto.to_megatron_provider(load_weights=False)
            self._change_config(settings, fuses=fuses)
            of_checkpoint = self._auto.hf_pretrained.config.to_dict()
            # transformers may count the layers of a hybrid model in another way.
            self.shape = ModelPlugin().shape(of_checkpoint | {"num_hidden_layers": self.config.num_layers})
        except _REFUSALS as error:
            raise self._refusal(error) from error
        self._further = layers_of_heads(of_checkpoint)
        if settings.enable_mtp_training and not any(map(self.is_of_heads, self._names)):
            raise UserError(
                f"{self._path} has no MTP heads, which enable_mtp_training would train: unset it, or use a checkpoint "
                "that has them"
            )
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self.config._pg_collection = self._groups
        self._exports: Sequence[Any] | None = None
        """The conversions of an export, which looking up takes seconds in a large model; None before the first."""
        self._stages: Sequence[Sequence[_Exported]] | None = None
        """What each pipeline stage exports, which the other stages need to receive it; None before the first export."""

    def is_of_heads(self, name: str) -> bool:
        return is_of_heads(name, self._further)

    def _take_text_part(self) -> None:
        """Show the bridge a checkpoint that holds nothing but the text part."""
        self._names = {text_name(name): name for name in self._names if not is_of_images(name)}
        whole = self._auto.hf_pretrained.config
        text = whole.text_config
        text.architectures = [TEXT_PARTS[whole.architectures[0]]]
        # The setting of the whole model and that of its text part may differ.
        text.tie_word_embeddings = "lm_head.weight" not in self._names
        self._auto.hf_pretrained.config = text

    def _refusal(self, error: Exception) -> UserError:
        return UserError(
            f"Megatron-Bridge cannot build the model of {self._path} with these settings: {_reason(error)}; change the "
            "parallel layout or use another model"
        )

    def _change_config(self, settings: Learner, *, fuses: bool) -> None:
        config = self.config
        fields = run_fields(settings) | _BRIDGE_FIELDS | passed_on(settings, "transformer")
        # The config.json of Qwen3-Next does not count the heads.
        counted = len({name.split(".")[2] for name in self._names if name.startswith("mtp.layers.")})
        fields["mtp_num_layers"] = (config.mtp_num_layers or counted) if settings.enable_mtp_training else None
        if self._local:
            fields |= _LOCAL_FIELDS
        if on_cpu():
            fields |= cpu_fields(has_experts=bool(config.num_moe_experts), fuses=fuses) | _BRIDGE_CPU_FIELDS
        known = {field.name for field in dataclasses.fields(config)}
        for name in known & fields.keys():
            setattr(config, name, fields[name])
        config.finalize()
        config.variable_seq_lengths = True
        [architecture, *_] = self._auto.hf_pretrained.config.architectures
        if architecture in _NORMS_OF_ALL_HEADS and config.tensor_model_parallel_size > 1:
            raise ValueError("the norms of its queries and keys span all heads: set tensor_model_parallel_size to 1")
        if self._local and config.context_parallel_size > 1 and _has_linear_attention(config):
            raise ValueError("linear attention with context parallelism needs Transformer Engine")

    def build(self, vp_stage: int | None) -> torch.nn.Module:
        try:
            chunk: torch.nn.Module = self.config.provide(vp_stage=vp_stage)
        except _REFUSALS as error:
            raise self._refusal(error) from error
        for module in chunk.modules():
            if type(module).__name__ == "TERowParallelLinearLayerNorm":
                # The bridge gives these norms Transformer Engine's epsilon, not the model's.
                module.get_submodule("post_layernorm").eps = self.config.layernorm_epsilon
        self._replace_attention_of_gemma2(chunk)
        return chunk

    def _replace_attention_of_gemma2(self, chunk: torch.nn.Module) -> None:
        """Let a Gemma 2 use attention that takes packed sequences; the bridge's does not."""
        for module in list(chunk.modules()):
            attention = module._modules.get("core_attention")
            if not isinstance(attention, self._library.Gemma2DotProductAttention):
                continue
            if not self._local:
                raise UserError(
                    f"{self._path}: the attention of Gemma 2 does not take packed sequences with Transformer Engine; "
                    "set transformer_impl to local"
                )
            local_te = importlib.import_module("miles_async.adapters.megatron.model.local_te")
            module.core_attention = local_te.TEDotProductAttention.with_capped_scores(
                attention.config,
                scale=1 / attention.norm_factor,
                window=None if attention.window_size is None else attention.window_size[0],
                cap=attention.config.attn_logit_softcapping,
            )

    @torch.no_grad()
    def load(self, chunks: Sequence[torch.nn.Module]) -> None:
        with open_tensors(self._path) as files, redirect_cuda_to_cpu(), numbered_device():
            checkpoint = self._library.CheckpointTensors(files, self._names)
            self._auto.hf_pretrained._state_dict_accessor = self._library.StateDict(checkpoint)
            packed: dict[str, Any] = {}
            for task in self._tasks(chunks, load=True):
                self._load_parameter(task, checkpoint, packed)
            # Exports read shapes, but no values, when the files are closed.
            checkpoint.close()
        self._check_all_used(checkpoint)

    def _load_parameter(self, task: Any, checkpoint: Any, packed: dict[str, Any]) -> None:
        """`packed` holds the tensors of all experts of a layer, which the parameters of each expert need."""
        name, parameter = task.global_param_name, task.param_weight
        key, state = str(task.mapping.hf_param), self._auto.hf_pretrained.state
        try:
            if (tensors := packed.get(key)) is None:
                tensors = self._bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, state)
            if key not in packed and hasattr(task.mapping, "is_grouped_export"):
                if len(packed) == _PACKED_PER_LAYER:
                    packed.clear()
                packed[key] = tensors
            value = task.mapping.hf_to_megatron(tensors, task.megatron_module)
        except _REFUSALS as error:
            if missing := [one for one in _names(task.mapping) if one not in checkpoint.tensors]:
                raise UserError(
                    f"{self._path} has no tensor {missing[0]}, which Megatron's {name} holds: use a complete "
                    "checkpoint in safetensors files, whose config.json belongs to it"
                ) from error
            raise UserError(f"{self._mismatch(task, checkpoint)}: {_reason(error)}; use another checkpoint") from error
        if value.shape != parameter.shape:
            raise UserError(
                f"{self._mismatch(task, checkpoint)}, whose shape is {tuple(parameter.shape)}: use a checkpoint "
                "whose config.json belongs to it"
            )
        parameter.copy_(value)

    def _mismatch(self, task: Any, checkpoint: Any) -> str:
        tensors = {name: one for name, one in checkpoint.tensors.items() if name in _names(task.mapping)}
        held = {self._names[name]: tuple(one.shape) for name, one in tensors.items()}
        shapes = ", ".join(f"{name} {shape}" for name, shape in held.items())
        return f"{shapes} of {self._path} does not fit Megatron's {task.global_param_name}"

    def _check_all_used(self, checkpoint: Any) -> None:
        used = set().union(*gather_json(sorted(checkpoint.read)))
        of_heads = _SHARED_BY_HEADS if self.config.mtp_num_layers else ("",)
        for name in checkpoint.tensors:
            unused = name.endswith(_FREQUENCIES) or (self.is_of_heads(name) and name.endswith(of_heads))
            if self.config.share_embeddings_and_output_weights and name.endswith("lm_head.weight"):
                continue
            if name not in used and not unused:
                raise UserError(
                    f"{self._path} has a tensor {self._names[name]}, which the model of its config.json does not have: "
                    "use a checkpoint whose config.json belongs to it"
                )

    def export(self, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        if pipeline.size() == 1:
            yield from self._export_stage(chunks)
            return
        if self._stages is None:
            own = [_Exported(name, tuple(one.shape), str(one.dtype)) for name, one in self._export_stage(chunks)]
            self._stages = msgspec.convert(gather_json(own, pipeline), list[list[_Exported]])
        for stage, exported in enumerate(self._stages):
            held = self._export_stage(chunks) if stage == pipeline.rank() else None
            for one in exported:
                tensor = None if held is None else next(held)[1]
                yield one.name, broadcast_from_stage(tensor, one.shape, one.dtype, stage)

    @torch.no_grad()
    def _export_stage(self, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """The weights that this rank's pipeline stage holds, whole."""
        models = [unwrap_model(chunk) for chunk in chunks]
        if self._exports is None:
            self._exports = self._tasks(chunks, load=False)
        with redirect_cuda_to_cpu():
            exported = iter(
                self._bridge.stream_weights_megatron_to_hf(
                    models,
                    self._auto.hf_pretrained,
                    cpu=False,
                    show_progress=False,
                    conversion_tasks=self._exports,
                    merge_adapter_weights=False,
                )
            )
        while True:
            # The redirection must not reach what the caller does between two tensors.
            with redirect_cuda_to_cpu():
                found = next(exported, None)
            if found is None:
                return
            name, tensor = found
            if not tensor.is_meta:  # a tensor of the checkpoint that the model does not hold
                yield self._names.get(name, name), self._trim(name, tensor)

    def _trim(self, name: str, tensor: Tensor) -> Tensor:
        """Without the rows that pad the vocabulary."""
        tensors = self._auto.hf_pretrained.state.source.tensors
        rows, vocabulary = len(tensor) if tensor.dim() else 0, self.shape.vocabulary
        padded = rows > vocabulary and name in tensors and tensors[name].shape[0] == vocabulary
        return tensor[:vocabulary] if padded else tensor

    def linear_parts(self, name: str, outputs: int) -> list[Part]:
        mapping = self._mappings.megatron_to_hf_lookup(name)
        if mapping is None:
            return []
        config, ranks = self.config, self.config.tensor_model_parallel_size
        whole = [self._names.get(one, one) for one in _names(mapping)]
        names = [one.removesuffix(".weight") for one in whole]
        linear = name.split(".")[-2]
        if linear == "linear_qkv" and len(names) == 3:
            heads, groups = config.num_attention_heads // ranks, config.num_query_groups // ranks
            gate = bool(vars(config).get("attention_output_gate"))
            return query_key_value(names, heads=heads, groups=groups, width=config.kv_channels, has_gate=gate)
        if linear == "in_proj" and len(names) == 4:
            keys = config.linear_num_key_heads * config.linear_key_head_dim // ranks
            heads = config.linear_num_value_heads // ranks
            values = heads * config.linear_value_head_dim
            # Ranks divide queries, keys and values one by one.
            return stacked(names, [[keys, keys, values], [values], [heads], [heads]])
        if len(names) > (2 if linear == "linear_fc1" else 1):
            return []
        if whole == names:  # the checkpoint has one tensor for all experts
            block, _, kind = whole[0].rpartition(".")
            expert = re.search(r"\d+$", name)
            if expert is None or kind not in PARAMETERS:
                return []
            names = [f"{block}.{expert[0]}.{one}" for one in PARAMETERS[kind]]
        return equal(names, outputs)

    @cached_property
    def _mappings(self) -> Any:
        """The bridge's registry of mappings for this rank, which depends on the tensors of the checkpoint."""
        bridge = self._bridge
        bridge.hf_pretrained, bridge.hf_config = self._auto.hf_pretrained, self._auto.hf_pretrained.config
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.pp = _OneRank()
        registry = bridge.mapping_registry()
        registry.set_process_groups_from_pg_collection(groups)
        return registry

    def _tasks(self, chunks: Sequence[torch.nn.Module], *, load: bool) -> list[Any]:
        """The bridge's conversions of this rank's parameters, in an order that all ranks of its stage share.

        Parameters of adapters are not converted.
        """
        library, config, registry = self._library, self.config, self._mappings
        models = [unwrap_model(chunk) for chunk in chunks]
        tasks = []
        for stage, model in enumerate(models):
            trained = {one for adapters in adapters_of([model]) for one in adapters.parameters()}
            parameters = {name: one for name, one in model.named_parameters() if one not in trained}
            for local in [*parameters, *(name for name, _ in library.persistent_buffers(model))]:
                name = library.global_name(models, config, local, stage)
                if not load and name == "embedding.word_embeddings.weight" and not model.pre_process:
                    continue  # MTP heads need a copy on the last stage; the first stage exports the same weight
                if config.share_embeddings_and_output_weights and name == "output_layer.weight":
                    if not load:
                        continue  # the first stage exports the same weight as the embedding
                    mapping = registry.megatron_to_hf_lookup("embedding.word_embeddings.weight")
                else:
                    mapping = registry.megatron_to_hf_lookup(name)
                if mapping is None and local not in parameters:
                    continue
                if mapping is None:
                    raise UserError(
                        f"Megatron-Bridge has no mapping of {name}, a parameter of the model of {self._path}: "
                        "use another model"
                    )
                module, weight = library.module_and_parameter(models, local, stage)
                if "config" not in vars(module):
                    module.config = config  # some conversions read it from modules that are torch's
                tasks.append(
                    library.WeightConversionTask(
                        param_name=local,
                        global_param_name=name,
                        mapping=mapping,
                        pp_rank=0,
                        vp_stage=stage,
                        megatron_module=module,
                        param_weight=weight,
                    )
                )
        return sorted(tasks, key=lambda task: library.sort_key(task.global_param_name))


@dataclass(frozen=True, slots=True)
class _Exported:
    name: str
    shape: tuple[int, ...]
    dtype: str


def _has_linear_attention(config: Any) -> bool:
    fields = vars(config)
    return bool(fields.get("hybrid_layer_pattern") or fields.get("experimental_attention_variant"))


def _names(mapping: Any) -> list[str]:
    """The tensors of a checkpoint that a mapping names."""
    return [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())


def _reason(error: Exception) -> str:
    """The first sentence of an error of Megatron or of the bridge."""
    lines = [line.strip(" ✗•") for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


class _OneRank:
    """In place of the group of a pipeline: keeps the bridge from sending anything between stages."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@cache
def _library(*, local: bool) -> Any:
    """Import Megatron-Bridge; with `local`, on the layers of `local_te`."""
    name = "miles_async.adapters.megatron.model.bridge_library"
    with _unchanged_logging():
        if not local:
            return importlib.import_module(name)
        local_te = importlib.import_module("miles_async.adapters.megatron.model.local_te")
        local_te.install()
        with stand_in({"transformer_engine": {}, "transformer_engine.pytorch": {}}):
            return importlib.import_module(name)


@contextmanager
def _unchanged_logging() -> Iterator[None]:
    """Import Megatron-Bridge without its messages; it also imports what sets up the logging of the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)
