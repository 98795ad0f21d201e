"""Warnings about settings that have no effect in a run, or an effect that users may not expect."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.adapter_arguments import adapter_notes
from miles_async.config.checks.unused import unused_settings
from miles_async.config.generation import bounds_of, rollout_mode, schedule_of, takes_from_queue, trains_only
from miles_async.config.guest_flags import shown
from miles_async.config.losses import corrects, differences, objective_name, objective_of
from miles_async.config.model_flags import incomparable
from miles_async.config.model_shape import hf_config, is_of_megatron
from miles_async.config.model_source import has_plugin
from miles_async.config.plugins import plugin_problems
from miles_async.config.schema import RunConfig
from miles_async.config.untested import drafts_from_heads, noted_arguments
from miles_async.scheduling.bounds import Schedule

HARMLESS_AGE = 3
"""A mean age of samples, in weight versions, that cost no visible accuracy in `docs/explanation/staleness.md`."""
_COMPARE_WHOLE_TEXTS = ("exact", "f1", "reasoning_gym")


def _stale_samples(config: RunConfig, entry: str) -> Iterator[str]:
    """What the loss makes of samples as old as the configuration lets them become."""
    algorithm, bounds = config.algorithm, bounds_of(config, entry)
    objective, correction = objective_of(algorithm), algorithm.off_policy_correction
    if schedule_of(config, entry) is not Schedule.FULLY_ASYNC or correction is None:
        return
    if not (corrects(algorithm) or objective.corrects or algorithm.use_rollout_logprobs):
        yield (
            "off_policy_correction none trains tokens of older weights as if they were on-policy, and the policy ratio "
            "does not show it because it compares only the trainer's own log-probabilities; samples that were 3 "
            "versions old lowered the accuracy by 0.2 (docs/explanation/staleness.md): set it to tis"
        )
        return
    groups = min(bounds.generation_batch, bounds.room)
    age = groups / bounds.publish_groups
    old = f"with {groups} groups in flight, samples will be about {age:.0f} weight versions old when they are trained; "
    weighted = algorithm.use_rollout_logprobs or algorithm.custom_tis_function_path is not None
    if objective.ratio_of_sequence and correction != "sequence" and not weighted:
        # A sequence in which one token has become very unlikely keeps most of its gradient.
        if age > 1:
            yield (
                f"{old}off_policy_correction {correction} hardly corrects for that with policy_objective "
                f"{objective_name(algorithm)}, which has one ratio per sequence; under tis, an age of 3 versions "
                "lowered the accuracy by 0.2, and at 12 the reward collapsed (docs/explanation/staleness.md): set "
                "off_policy_correction to sequence"
            )
        return
    if age <= HARMLESS_AGE:
        return
    cost = "13 cost 0.01 to 0.03"
    if algorithm.use_rollout_logprobs:
        # The policy ratio, which is clipped, then corrects for the age too.
        cost = "13 cost 0.07 with use_rollout_logprobs, and 0.01 with off_policy_correction decoupled instead"
    yield (
        f"{old}{HARMLESS_AGE} cost no visible accuracy, and {cost} (docs/explanation/staleness.md): lower "
        "over_sampling_batch_size unless the engines or tools need so many groups"
    )


def _reference(config: RunConfig) -> Iterator[str]:
    folder = config.algorithm.ref_load
    if folder is not None and config.keeps_reference and is_of_megatron(folder):
        yield (
            f"ref_load {folder} has the format of Megatron-LM, so the reference model is hf_checkpoint; ref_load "
            "should be a conversion of it: set ref_load to a Hugging Face checkpoint if it is another model"
        )


def _flags_not_compared(config: RunConfig) -> Iterator[str]:
    flags, checkpoint = config.model.megatron_model_flags, config.model.hf_checkpoint
    if checkpoint is None or not (content := hf_config(checkpoint)):
        return
    if names := ", ".join(map(shown, incomparable(flags, content))):
        yield (
            f"{names} cannot be compared with config.json of hf_checkpoint {checkpoint}, which alone defines these "
            "parts of the model"
        )


def _kl_loss(config: RunConfig) -> Iterator[str]:
    if config.algorithm.use_kl_loss and not config.algorithm.kl_loss_coef and config.learner.loss_type == "policy_loss":
        yield (
            "use_kl_loss measures the KL divergence and does not train on it, because kl_loss_coef is 0: set "
            "kl_loss_coef, or unset use_kl_loss, which saves the memory of the reference model"
        )


def lost_model(config: RunConfig) -> Iterator[str]:
    """A sentence if a run trains a model and keeps it nowhere."""
    learner, debug = config.learner, config.debug
    if learner.save is None and learner.save_hf is None and not debug.debug_rollout_only and not trains_only(config):
        yield (
            "the trained model will be lost when the run ends, because neither save nor save_hf is set: set save to a "
            "folder for checkpoints, or save_hf to a folder for the model in Hugging Face format"
        )


def _drafts(config: RunConfig) -> Iterator[str]:
    if not config.learner.enable_mtp_training or "speculative_algorithm" not in config.engine.sglang_server_args:
        return
    if drafts_from_heads(config):
        yield (
            "each publish also brings the trained MTP heads to the engines' draft model; this was tried with SGLang's "
            "loaders on CPUs, and never with an engine that drafts tokens: watch SGLang's acceptance length"
        )
    else:
        yield (
            "enable_mtp_training trains heads from which the engines do not draft, because "
            "speculative_draft_model_path or speculative_algorithm names another draft model: unset these arguments"
        )


def _whole_texts(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rm_type in _COMPARE_WHOLE_TEXTS and not rollout.rollout_skip_special_tokens:
        yield (
            f"rm_type {rollout.rm_type} compares the whole response with the answer, and responses end with a special "
            "token: set rollout_skip_special_tokens"
        )


def _unlike_the_paper(config: RunConfig) -> Iterator[str]:
    if config.learner.loss_type == "policy_loss":
        yield from differences(config.algorithm)


def _unused_over_sampling_filter(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    if rollout.over_sampling_filter_path is None or rollout_mode(config).keeps_groups:
        return
    if schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        yield (
            "over_sampling_filter_path has no effect: it selects groups of a batch, but a fully asynchronous run has "
            "no batches; use train.py, or a rollout function that returns batches"
        )
    elif rollout.over_sampling_batch_size in (None, rollout.rollout_batch_size):
        yield "over_sampling_filter_path has nothing to discard: set over_sampling_batch_size above rollout_batch_size"


def _unused_all_samples_function(config: RunConfig, entry: str) -> Iterator[str]:
    if config.rollout.rollout_all_samples_process_path is not None and takes_from_queue(config, entry):
        yield (
            "rollout_all_samples_process_path has no effect: it gets the groups of a batch, but a fully asynchronous "
            "run has no batches; use train.py, or a rollout function that returns batches"
        )


def _unused_window(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    mode = rollout_mode(config)
    if rollout.windowed_fifo_ratio is None or mode.keeps_groups:
        return
    if not mode.uses_window:
        windowed = "unset rollout_function_path, or set it to windowed_fifo_rollout.generate_rollout"
        advice = windowed if mode.collects_only else "unset windowed_fifo_ratio"
        yield f"windowed_fifo_ratio has no effect: {rollout.rollout_function_path} {mode.summary}; {advice}"
        return
    surplus = rollout.over_sampling_batch_size not in (None, rollout.rollout_batch_size)
    filtered = rollout.dynamic_sampling_filter_path is not None
    if schedule_of(config, entry) is not Schedule.FULLY_ASYNC and not surplus and not filtered:
        yield (
            "windowed_fifo_ratio has no effect: all generated groups are trained in one batch, in any order; "
            "set over_sampling_batch_size above rollout_batch_size, or set dynamic_sampling_filter_path"
        )


def _unused_skip(config: RunConfig, entry: str) -> list[str]:
    if rollout_mode(config).keeps_groups:
        return []
    used, idle = ("rollout", "async_rollout")
    if schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        used, idle = idle, used
    roles = {"rollout": config.skip.rollout, "async_rollout": config.skip.async_rollout}
    found = []
    # The deprecated --skip-rollout enables both roles, so an idle role beside an enabled one is expected.
    if roles[idle].enable and not roles[used].enable:
        found.append(f"skip.{idle} has no effect with this schedule: enable skip.{used} instead")
    if roles[used].enable and not roles[used].steps:
        found.append(f'skip.{used} is enabled but skips no step: set skip.{used}.steps, for example to "[1-128]"')
    return found


def _router_notes(config: RunConfig) -> Iterator[str]:
    policy = config.engine.sglang_router_policy
    if policy in ("consistent_hashing", "prefix_hash") and config.engine.count > 1:
        yield (
            f"sglang_router_policy {policy} assigns requests to engines by a hash and ignores the load: one engine may "
            "get most of the requests while others idle; set cache_aware or power_of_two to balance the load"
        )


def _training_notes(config: RunConfig) -> Iterator[str]:
    rollout, debug = config.rollout, config.debug
    trains = config.learner.loss_type != "sft_loss" and not trains_only(config) and not debug.debug_rollout_only
    if rollout.rollout_temperature == 0 and trains:
        yield "rollout_temperature 0 makes sampling greedy, so the policy does not explore: set it to 1, for example"
    total = rollout.num_rollout * config.steps_per_rollout
    for name, warmup in (
        ("lr_warmup_steps", config.learner.lr_warmup_steps),
        ("critic_lr_warmup_steps", config.algorithm.critic_lr_warmup_steps),
    ):
        if warmup > total:
            yield (
                f"the learning rate never reaches its peak, because {name} is {warmup} and the run has {total} "
                f"optimizer steps: lower {name}"
            )
    loaded = debug.load_debug_rollout_data
    if loaded is not None and "{rollout_id}" not in loaded and rollout.num_rollout > 1:
        yield f"every rollout trains on the same batch, {loaded}: add {{rollout_id}} to load_debug_rollout_data"
    if debug.use_pytorch_profiler and debug.profile_step_start >= rollout.num_rollout:
        yield (
            f"use_pytorch_profiler profiles nothing, because profile_step_start {debug.profile_step_start} is not "
            f"below num_rollout {rollout.num_rollout}: lower it"
        )


def _texts_like_switches(config: RunConfig) -> Iterator[str]:
    """`no` is false in YAML 1.1 and a text here, which a template or an environment takes for true."""
    data = config.data
    for name, values in (
        ("apply_chat_template_kwargs", data.apply_chat_template_kwargs),
        ("reasoning_gym_settings", data.reasoning_gym_settings),
        ("environment_settings", data.environment_settings),
        *((f"datasets.{name}", dataset.apply_chat_template_kwargs or {}) for name, dataset in data.datasets.items()),
    ):
        for key, value in values.items():
            if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
                yield f"{name} sets {key} to the text {value!r}: for a switch, write true or false"


def _saved_format(config: RunConfig) -> Iterator[str]:
    template = config.debug.save_debug_rollout_data
    if template is not None and template.endswith((".pt", ".pth")):
        yield (
            "save_debug_rollout_data writes safetensors files, which torch.load cannot read: end the file name in "
            ".safetensors; load_debug_rollout_data and make inspect read them"
        )


def _bridge_with_adapters(config: RunConfig) -> Iterator[str]:
    learner, checkpoint = config.learner, config.model.hf_checkpoint
    asks_for_bridge = learner.lora_rank and learner.megatron_to_hf_mode == "bridge"
    if asks_for_bridge and checkpoint is not None and has_plugin(checkpoint):
        yield (
            "megatron_to_hf_mode bridge has no effect with lora_rank, because the model has a plug-in, which the "
            "learner uses"
        )


def _plugins(config: RunConfig) -> Iterator[str]:
    yield from plugin_problems()


NOTES_ON_SCHEDULE = (
    _unused_window,
    _unused_over_sampling_filter,
    _unused_all_samples_function,
    _unused_skip,
    _stale_samples,
)
"""These also get the entry script, which determines the schedule."""
NOTES = (
    _reference,
    _flags_not_compared,
    _kl_loss,
    _unlike_the_paper,
    unused_settings,
    noted_arguments,
    _training_notes,
    _router_notes,
    _texts_like_switches,
    _saved_format,
    _bridge_with_adapters,
    adapter_notes,
    _plugins,
    _drafts,
    _whole_texts,
)
