"""Checks of the model and its training: checkpoints, reference model, critic, exports, losses, micro-batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from miles_async.config.fields import nearest
from miles_async.config.generation import generates
from miles_async.config.guest_flags import shown
from miles_async.config.losses import clip_range, corrects, estimator_of, objective_name, objective_of
from miles_async.config.megatron import OF_THE_TRAINING_LOOP, SET_BY_THE_RUN, megatron_fields, table_version
from miles_async.config.memory import longest_sample
from miles_async.config.model_flags import differences
from miles_async.config.model_shape import config_complaint, context_limit, hf_config, is_of_megatron
from miles_async.config.model_source import has_plugin, source_of
from miles_async.config.schema import RunConfig
from miles_async.config.schema.model import hub_name, is_gguf
from miles_async.errors import UserError


def _checkpoint(config: RunConfig) -> Iterator[str]:
    checkpoint = config.model.hf_checkpoint
    if checkpoint is None:
        yield from _tiny_model(config)
    elif is_gguf(checkpoint) or hub_name(checkpoint) is not None:
        return  # it is checked again after its conversion or download
    elif not Path(checkpoint).expanduser().is_dir():
        yield f"hf_checkpoint {checkpoint}: no such folder; set it to the folder of a Hugging Face checkpoint"
    elif found := list(_unusable("hf_checkpoint", checkpoint)):
        yield from found
    else:
        yield from _context(config)
        yield from _sliding_window(config, checkpoint)
        if not config.debug.debug_rollout_only:
            try:
                mode, trains_adapter = config.learner.megatron_to_hf_mode, config.learner.lora_rank > 0
                source_of(mode, checkpoint, trains_adapter=trains_adapter)
            except UserError as error:
                yield str(error)


def _described(config: RunConfig) -> Iterator[str]:
    """Megatron's flags that describe another model than the checkpoint."""
    flags, checkpoint = config.model.megatron_model_flags, config.model.hf_checkpoint
    if not flags:
        return
    if checkpoint is None:
        names = ", ".join(map(shown, sorted(flags)))
        yield f"hf_checkpoint is unset, so no model can be compared with {names}: set it, or remove {names}; {_TINY}"
        return
    for name, given, theirs in differences(flags, hf_config(checkpoint)):
        yield (
            f"{name} {given} differs from config.json of hf_checkpoint {checkpoint}, which has {theirs}: correct the "
            "flag, or set hf_checkpoint to the checkpoint of this model"
        )


_TINY = "the tiny model is described by --tiny-num-layers and its kin"


def _megatron_args(config: RunConfig) -> Iterator[str]:
    for name in config.learner.megatron_args:
        if name in SET_BY_THE_RUN:
            yield f"megatron_args.{name} is set by the run itself: {SET_BY_THE_RUN[name]}"
        elif name in OF_THE_TRAINING_LOOP:
            yield f"megatron_args.{name} has no counterpart: {OF_THE_TRAINING_LOOP[name]}"
        elif name not in (known := megatron_fields()):
            yield f"megatron_args.{name}: Megatron-core {table_version()} has no such field{nearest(name, known)}"


def _unusable(setting: str, folder: str | None) -> Iterator[str]:
    """Why the folder that a setting names is not a checkpoint. Names of the Hub are checked after the download."""
    if folder is None or hub_name(folder) is not None:
        return
    if not (Path(folder).expanduser() / "config.json").is_file():
        yield f"{setting} {folder} is not a Hugging Face checkpoint: it contains no config.json; set a different folder"
    elif (complaint := config_complaint(folder)) is not None:
        yield f"{setting} {folder}: {complaint}"


def _context(config: RunConfig) -> Iterator[str]:
    """Engines refuse a request if the prompt and the longest allowed response exceed the context of the model."""
    context, rollout = context_limit(config), config.rollout
    if not generates(config) or context is None:
        return
    lengths = {"rollout_max_response_len": rollout.rollout_max_response_len}
    for name, dataset in rollout.eval_datasets.items():
        lengths[f"eval_datasets.{name}.max_response_len"] = dataset.max_response_len or 0
    for setting, length in lengths.items():
        if length >= context:
            yield f"{setting} {length} leaves no room for a prompt in the model's {context} tokens of context: lower it"


def _sliding_window(config: RunConfig, checkpoint: str) -> Iterator[str]:
    """SGLang computes Mistral without its sliding window, so engine and learner differ for longer sequences."""
    model, longest = hf_config(checkpoint), longest_sample(config)
    window = model.get("sliding_window")
    if model.get("model_type") == "mistral" and isinstance(window, int) and longest > window and generates(config):
        yield (
            f"samples of up to {longest} tokens exceed the sliding window {window} of hf_checkpoint {checkpoint}, and "
            "SGLang computes Mistral without it, so engines and learner would differ: lower rollout_max_prompt_len or "
            "rollout_max_response_len"
        )


def _tiny_model(config: RunConfig) -> Iterator[str]:
    model, response = config.model.tiny_model, config.rollout.rollout_max_response_len
    if model.hidden_size % model.num_attention_heads:
        yield (
            f"tiny_hidden_size {model.hidden_size} is not divisible by tiny_num_attention_heads "
            f"{model.num_attention_heads}; set tiny_hidden_size to a multiple"
        )
    if model.num_attention_heads % model.num_query_groups:
        yield (
            f"tiny_num_attention_heads {model.num_attention_heads} is not divisible by tiny_num_query_groups "
            f"{model.num_query_groups}; set tiny_num_query_groups to a divisor"
        )
    if response >= model.max_position_embeddings:
        yield (
            f"rollout_max_response_len {response} leaves no room for a prompt in "
            f"tiny_max_position_embeddings {model.max_position_embeddings}; lower the first or raise the second"
        )


def _reference(config: RunConfig) -> Iterator[str]:
    folder = config.algorithm.ref_load
    if folder is not None and not is_of_megatron(folder):
        yield from _unusable("ref_load", folder)


def _critic(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    yield from _unusable("critic_load", algorithm.critic_load)
    if estimator_of(algorithm).trains_critic:
        if config.learner.loss_type == "sft_loss":
            estimator = f"advantage_estimator {algorithm.advantage_estimator}"
            yield f"{estimator} trains a critic, but loss_type sft_loss does not use it: unset one of them"
        return
    unused = sorted(algorithm.model_dump(exclude_defaults=True).keys() & _CRITIC_SETTINGS)
    if unused:
        yield f"{', '.join(unused)}: only advantage_estimator ppo trains a critic; set it, or unset these settings"


_CRITIC_SETTINGS = {"value_clip", "num_critic_only_steps", "critic_load", "critic_lr", "critic_lr_warmup_steps"}


def _folders(config: RunConfig) -> Iterator[str]:
    for setting, folder in (
        ("save", config.learner.save),
        ("load", config.learner.load),
        ("run_dir", config.observability.run_dir),
        ("store_dir", config.cluster.store_dir),
    ):
        if folder is not None and "://" in folder:
            yield f"{setting} {folder} is an address, not a folder: mount the storage, and set {setting} to its folder"


def _resume(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if learner.resume is None:
        return
    if config.cluster.colocate:
        yield "resume auto cannot continue a colocated run: unset resume, and set load to the same folder as save"
    elif not config.restarts_learner:
        yield "resume auto needs checkpoints at intervals: set save and save_interval"
    if learner.load is not None:
        yield "resume auto and load exclude each other: unset load, which begins another run, or unset resume"


def _mtp_heads(config: RunConfig) -> Iterator[str]:
    """MTP heads come from a checkpoint that has them, through Megatron-Bridge."""
    learner, checkpoint = config.learner, config.model.hf_checkpoint
    if not learner.enable_mtp_training:
        return
    if checkpoint is None:
        yield "enable_mtp_training: the tiny model has no MTP heads; set hf_checkpoint to a model that has them"
    elif learner.lora_rank:
        yield "enable_mtp_training: a run that trains an adapter trains no MTP heads; unset it, or set lora_rank to 0"
    elif has_plugin(checkpoint) and learner.megatron_to_hf_mode != "bridge":
        yield (
            f"enable_mtp_training: the model plug-in of hf_checkpoint {checkpoint} builds no MTP heads; unset it, or "
            "set megatron_to_hf_mode to bridge if the checkpoint has them"
        )
    if learner.recompute_method == "uniform" and learner.recompute_num_layers != 1:
        yield (
            f"enable_mtp_training: Megatron computes MTP heads again one by one, so recompute_num_layers "
            f"{learner.recompute_num_layers} does not work with recompute_method uniform; set it to 1"
        )
    if learner.overlap_grad_reduce and learner.pipeline_model_parallel_size > 1:
        yield (
            "enable_mtp_training: the copy of the embedding on the last pipeline stage gets no gradient, and "
            "overlap_grad_reduce would wait for one; unset overlap_grad_reduce"
        )


def _exports(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if learner.save_hf is None:
        return
    for setting, path in (
        ("hf_checkpoint", config.model.hf_checkpoint),
        ("ref_load", config.algorithm.ref_load),
        ("lora_load", learner.lora_load),
    ):
        if path is not None and _may_export_to(Path(path).expanduser().resolve(), config):
            yield f"save_hf {learner.save_hf} would overwrite {setting}: set save_hf to a different folder"


def _may_export_to(folder: Path, config: RunConfig) -> bool:
    """Whether the export after any rollout is written to `folder`: a run that is stopped may export after each."""
    rollouts = {0, *map(int, re.findall(r"\d+", str(folder)))}
    written = (config.learner.export_folder(n) for n in rollouts if n < config.rollout.num_rollout)
    adapters = config.data.adapter_weights
    return any(export is not None and (export / one).resolve() == folder for export in written for one in adapters)


def _recomputation(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    is_set = learner.recompute_method is not None, learner.recompute_num_layers is not None
    if learner.recompute_granularity == "full" and not all(is_set):
        yield (
            "recompute_granularity full needs recompute_method and recompute_num_layers: set them, for "
            "example to uniform and 1"
        )
    if learner.recompute_granularity != "full" and any(is_set):
        yield (
            "recompute_method and recompute_num_layers apply to whole layers: set recompute_granularity to full, or "
            "unset both"
        )
    if learner.recompute_modules is not None and learner.recompute_granularity != "selective":
        yield "recompute_modules needs recompute_granularity selective: set it, or unset recompute_modules"
    if learner.precision == "fp32" and learner.transformer_impl == "transformer_engine":
        yield (
            "Transformer Engine computes attention over packed sequences in bf16 only: set precision to bf16, or "
            "transformer_impl to local"
        )


def _dynamic_batching(config: RunConfig) -> Iterator[str]:
    learner, longest = config.learner, longest_sample(config)
    ranks_per_sample = learner.tensor_model_parallel_size * learner.context_parallel_size
    train = learner.max_tokens_per_microbatch_in_train or learner.micro_batch_tokens
    rows = [("", "train", learner.use_dynamic_batching_in_train, train, learner.sequence_length_round_in_train)]
    learners = {"": learner}
    if config.keeps_reference and learner.reference_batching != learner:
        learners["ref_"] = learner.reference_batching
    for prefix, settings in learners.items():
        limit = settings.max_tokens_per_microbatch_in_infer or settings.micro_batch_tokens
        round_to = settings.sequence_length_round_in_infer
        rows.append((prefix, "infer", settings.use_dynamic_batching_in_infer, limit, round_to))
    for prefix, phase, used, limit, round_to in rows:
        if not used:
            continue
        if round_to % ranks_per_sample:
            yield (
                f"{prefix}sequence_length_round_in_{phase} {round_to} is not divisible by tensor_model_parallel_size * "
                f"context_parallel_size = {ranks_per_sample}; set it to a multiple of {ranks_per_sample}"
            )
        if (padded := longest + -longest % round_to) > limit:
            yield (
                f"the longest sample has {padded} tokens, rounded up to a multiple of {round_to}, but a micro-batch "
                f"holds at most {limit}; set {prefix}max_tokens_per_microbatch_in_{phase} to {padded} or more"
            )


def _loss(config: RunConfig) -> Iterator[str]:
    algorithm, longest = config.algorithm, config.rollout.rollout_max_response_len
    if algorithm.overlong_buffer_len is not None and algorithm.overlong_buffer_len > longest:
        yield (
            f"overlong_buffer_len {algorithm.overlong_buffer_len} is above rollout_max_response_len {longest}; "
            f"set it to {longest} or less"
        )
    if config.learner.loss_type == "custom_loss" and algorithm.custom_loss_function_path is None:
        yield "loss_type custom_loss needs a function: set custom_loss_function_path to module.function"
    name, objective = objective_name(algorithm), objective_of(algorithm)
    selected = estimator_of(algorithm).objective
    if selected not in (None, name):
        same = estimator_of(algorithm).same_advantages
        advice = "" if same is None else f"set advantage_estimator to {same}, which computes the same advantages, or "
        yield (
            f"advantage_estimator {algorithm.advantage_estimator} selects policy_objective {selected}, not {name}: "
            f"{advice}unset policy_objective"
        )
    if objective.corrects and corrects(algorithm):
        given, advice = f"off_policy_correction {algorithm.off_policy_correction}", "set off_policy_correction to none"
        if algorithm.custom_tis_function_path is not None:
            given, advice = "custom_tis_function_path", "unset custom_tis_function_path"
        yield (
            f"policy_objective {name} already uses the ratio to the policy that sampled, so {given} would apply the "
            f"correction twice: {advice}"
        )
    lowest, highest = algorithm.rejection_band
    if not 0 <= lowest < 1 < highest:
        yield f"rejection_band [{lowest:g}, {highest:g}] does not contain the ratio 1; set it to [0.5, 2], for example"
    low, _ = clip_range(algorithm)
    if objective.clip is not None and not objective.clips_log_ratios and low > 1:
        yield (
            f"eps_clip {low:g} sets no lower bound, because 1 - eps_clip is negative and ratios never are: set it to "
            "less than 1, or to 1 for no lower bound"
        )


CHECKS = (
    _checkpoint,
    _described,
    _megatron_args,
    _reference,
    _critic,
    _folders,
    _resume,
    _exports,
    _recomputation,
    _mtp_heads,
    _dynamic_batching,
    _loss,
)
