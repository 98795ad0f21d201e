"""Checks of LoRA adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from miles_async.config.adapter_arguments import needed_room
from miles_async.config.guest_flags import shown
from miles_async.config.losses import estimator_of
from miles_async.config.model_shape import hf_config, linear_layers_of, shape_of
from miles_async.config.schema import Learner, RunConfig
from miles_async.models.families import ADAPTED
from miles_async.models.lora import AdapterConfig, check_adapter, expert_layers, read_config
from miles_async.models.lora_layers import EXPERTS, FEED_FORWARD, LOADED_TOGETHER, LinearLayers
from miles_async.models.text_part import text_config
from miles_async.scheduling.adapters import version_of

_OTHER_LAYOUTS = ("moe_shared_expert_overlap", "moe_mlp_glu_interleave_size")
"""Settings of Megatron with which its layers exchange tokens, or order their rows, in another way."""
_BACKEND_OF_EXPERTS = "triton"
"""See `adapters/sglang/launch.py`."""
_UNFINISHED = "unfinished"
"""A folder that a run writes beside those of adapters and versions."""


def _adapters(config: RunConfig) -> Iterator[str]:
    learner, checkpoint = config.learner, config.model.hf_checkpoint
    if not learner.lora_rank:
        return
    shape, layers = shape_of(config.model), linear_layers_of(config.model)
    if layers is None and checkpoint is not None and (content := hf_config(checkpoint)):
        if (family := text_config(content).get("model_type")) not in ADAPTED:
            yield (
                f"lora_rank: models of the type {family} get no adapters; train one of {', '.join(ADAPTED)}, or unset "
                "lora_rank"
            )
            return
        yield f"lora_rank: config.json of {checkpoint} lacks dimensions of the model; copy the checkpoint again"
    yield from _loaded_together(learner, layers)
    yield from _too_small_engines(config)
    base = None if checkpoint is None else Path(checkpoint).expanduser()
    if base is not None and not (base / "config.json").is_file():
        base = None
    if layers is not None and layers.experts:
        yield from _experts(config, layers, base)
    elif layers is not None and learner.experts_shared_outer_loras:
        yield "experts_shared_outer_loras has no effect, because the model has no experts: unset it"
    if shape is not None and learner.tensor_model_parallel_size > shape.attention.groups:
        yield (
            f"lora_rank: tensor-parallel ranks that share a key/value head get no adapters; set "
            f"tensor_model_parallel_size to {shape.attention.groups} or less"
        )
    if estimator_of(config.algorithm).trains_critic:
        yield "lora_rank: a critic has no adapters; unset lora_rank, or set another advantage_estimator than ppo"
    if learner.transformer_impl == "transformer_engine":
        yield "lora_rank: layers of Transformer Engine get no adapters; set transformer_impl to local, or unset it"
    for name in _OTHER_LAYOUTS:
        if learner.megatron_args.get(name):
            yield f"lora_rank: layers get no adapters with Megatron's {name}; unset it"
    if learner.lora_load is None:
        return
    folder = Path(learner.lora_load).expanduser()
    if base is not None and layers is not None:
        modules = learner.lora_targets.of_model(layers)
        check_adapter(folder, AdapterConfig(learner.lora_rank, learner.lora_scale, modules), base)
    else:  # it is compared with the model when that has been made, converted or downloaded
        read_config(folder)


def _loaded_together(learner: Learner, layers: LinearLayers | None) -> Iterator[str]:
    """Layers without others that SGLang joins with them. Raises UserError if the model lacks the layers of a target."""
    targets = learner.lora_targets
    chosen = [[*targets.modules]]
    if layers is not None:
        targets.of_model(layers)
        chosen = targets.by_layer(layers)
    missing = {
        name: needed
        for paths in chosen
        for path in paths
        for block, dot, name in [path.rpartition(".")]
        if (needed := [one for one in LOADED_TOGETHER.get(name, ()) if f"{block}{dot}{one}" not in paths])
    }
    for name, needed in missing.items():
        yield (
            f"lora_target_modules: engines load an adapter of {name} only together with {' and '.join(needed)}; add it"
        )


def _too_small_engines(config: RunConfig) -> Iterator[str]:
    """Arguments of SGLang that are refused in any case; others need `allow_untested` (`adapter_arguments.py`)."""
    if "lora" not in config.engine.allow_untested:
        return
    for name, needed in needed_room(config).items():
        given = config.engine.sglang_server_args.get(name)
        if isinstance(given, int) and given < needed:
            flag = shown(f"sglang_{name}")
            yield f"{flag} {given} is too small for the adapters of the run, which need {needed}: remove it"


def _experts(config: RunConfig, layers: LinearLayers, checkpoint: Path | None) -> Iterator[str]:
    """What is refused of a model with experts. `checkpoint` is its folder; None if it is read when the run starts."""
    learner = config.learner
    chosen = {path for paths in learner.lora_targets.by_layer(layers) for path in paths}
    others = [name for name in FEED_FORWARD if f"{EXPERTS}.{name}" not in chosen]
    if others and len(others) < len(FEED_FORWARD):
        yield (
            f"lora_target_modules: engines load adapters of experts only for {', '.join(FEED_FORWARD)} together; add "
            f"{' and '.join(others)}, or remove the others"
        )
    if learner.experts_shared_outer_loras and others:
        yield "experts_shared_outer_loras has no effect, because lora_target_modules leaves out experts: unset it"
    if learner.lora_dropout and not others:
        yield "lora_dropout: PEFT loads no adapters of experts with dropout; set it to 0"
    backend = config.engine.sglang_server_args.get("moe_runner_backend", _BACKEND_OF_EXPERTS)
    if backend != _BACKEND_OF_EXPERTS and not others:
        yield (
            f"--sglang-moe-runner-backend {backend} may leave out the adapters of experts without an error: remove it, "
            f"and engines use {_BACKEND_OF_EXPERTS}"
        )
    if checkpoint is None or others:
        return
    if foreign := expert_layers(checkpoint) - {*FEED_FORWARD}:
        yield (
            f"lora_target_modules: experts whose layers are {', '.join(sorted(foreign))} get no adapters; set "
            "lora_exclude_modules to gate_proj up_proj down_proj, or train another model"
        )


def _several(config: RunConfig) -> Iterator[str]:
    """What is refused of `adapters`."""
    data, names = config.data, [*config.data.adapters]
    if not names:
        for name, dataset in data.datasets.items():
            if dataset.adapter is not None:
                yield (
                    f"datasets.{name}.adapter has no effect without adapters: add the entry {dataset.adapter} to "
                    "adapters, or unset it"
                )
        return
    if not config.learner.lora_rank:
        yield "adapters have no effect without LoRA: set lora_rank, for example to 32, or unset adapters"
    for name in names:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or version_of(name) is not None or name == _UNFINISHED:
            yield (
                f"adapters: {name!r} cannot be the name of a folder of adapters: use letters, digits, - and _, begin "
                "with a letter, and use neither v with a number nor unfinished"
            )
        if all(dataset.adapter != name for dataset in data.datasets.values()):
            yield f"no data set trains adapters.{name}: set adapter of one of datasets to {name}, or remove the entry"
    for name, dataset in data.datasets.items():
        if dataset.adapter not in names:
            of = "is unset" if dataset.adapter is None else f"{dataset.adapter} is not one of adapters"
            yield f"datasets.{name}.adapter {of}: set it to {' or '.join(names)}"
    yield from _unsupported(config)


def _unsupported(config: RunConfig) -> Iterator[str]:
    """Settings that a run with several adapters does not support."""
    data, rollout, weights = config.data, config.rollout, config.weights
    for setting, is_set, remedy in (
        ("update_weights_interval", weights.update_weights_interval > 1, "set it to 1: each batch has one adapter"),
        ("data_source_path", data.data_source_path is not None, "unset it, and name the prompts in datasets"),
        ("buffer_filter_path", data.buffer_filter_path is not None, "unset it"),
        ("dataset_sampling", data.sampling_function is not None, "set it to weights or difficulty"),
        ("eval_datasets", bool(rollout.eval_datasets), "unset it, and set eval_size of datasets"),
        ("eval_function_path", rollout.eval_function_path is not None, "unset it, and set eval_size of datasets"),
        ("lora_merge", config.learner.lora_merge, "unset it, and merge each exported folder with PEFT"),
        ("skip_rollout_enable", config.skip.rollout.enable, "unset it: recordings name no adapter"),
        ("skip_async_rollout_enable", config.skip.async_rollout.enable, "unset it: recordings name no adapter"),
    ):
        if is_set:
            yield f"{setting} does not work with adapters: {remedy}"
    if rollout.queue_capacity < rollout.rollout_batch_size:
        yield (
            f"queue_capacity {rollout.queue_capacity} is below rollout_batch_size {rollout.rollout_batch_size}, and "
            "with adapters a batch is complete in its queue before it is trained: raise queue_capacity"
        )


CHECKS = (_adapters, _several)
