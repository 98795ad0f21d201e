"""Values derived from a configuration: batch sizes, sampling, parallel layout, and the start-up table."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_async.config.device_plan import Demand
from miles_async.config.generation import bounds_of, generates, reason_of_schedule, rollout_mode, schedule_of
from miles_async.config.learning_rate import LearningRate
from miles_async.config.losses import described, estimator_of, has_loss_functions, objective_name, objective_of
from miles_async.config.model_shape import shape_of
from miles_async.config.schema import Learner, Model, RunConfig
from miles_async.config.user_functions import load_function, takes_logits
from miles_async.scheduling.bounds import Schedule

GGUF_PACKAGE_PREFIX = "package:"
"""Begins an `hf_checkpoint` that is a file in an installed Python package."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_DATA_SUFFIXES = (".json", ".jsonl", ".parquet")
SAMPLING_MASK_MAX_TOKENS = 4096
"""SGLang's default of its argument `--sampling-mask-max-tokens`."""


def is_gguf(checkpoint: str) -> bool:
    """Whether an `hf_checkpoint` is a GGUF file, which is converted before the run starts."""
    return checkpoint.startswith(GGUF_PACKAGE_PREFIX) or checkpoint.endswith(".gguf")


def hub_name(text: str) -> str | None:
    """The name of a checkpoint or a data set on the Hugging Face Hub, such as `Qwen/Qwen3-4B`; None for anything else.

    A name of a data set may end with a split: `owner/name:test`. A path that exists is not a name.
    """
    named = _HUB_NAME.fullmatch(text) is not None and not text.endswith(_DATA_SUFFIXES) and not is_gguf(text)
    return text if named and not Path(text).exists() else None


def model_name(model: Model) -> str:
    """Return the name of the model for people: its folder, the name of its GGUF file, or the size of the tiny model."""
    checkpoint, tiny = model.hf_checkpoint, model.tiny_model
    if checkpoint is None:
        return f"tiny Qwen3, {tiny.num_layers} layers of width {tiny.hidden_size}"
    return Path(checkpoint).name if is_gguf(checkpoint) else checkpoint


def rollout_file(config: RunConfig) -> str | None:
    """Path template of saved batches, with the placeholder `{rollout_id}`; None if batches are not saved."""
    if config.debug.save_debug_rollout_data is None and config.debug.dump_details is not None:
        return f"{config.debug.dump_details}/rollout_data/{{rollout_id}}.safetensors"
    return config.debug.save_debug_rollout_data


def keeps_reference(config: RunConfig) -> bool:
    """Whether the learner keeps a frozen reference model."""
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef > 0


def skips_zero_advantages(config: RunConfig) -> bool:
    """Whether samples whose advantage is zero need no pass through the model.

    This holds if every term of the loss is a multiple of the advantage, and no token affects the terms of other
    samples, as the objective declares. It does not hold for

    - supervised fine-tuning, which has no advantages;
    - a critic, from which the advantages come and which trains on all samples;
    - a loss, advantages or a mean that functions of the user compute;
    - the KL loss, the KL penalty on rewards and the entropy bonus, which have a gradient at every token.
    """
    algorithm = config.algorithm
    return (
        config.learner.loss_type == "policy_loss"
        and objective_of(algorithm).scales_with_advantage
        and not estimator_of(algorithm).trains_critic
        and not has_loss_functions(algorithm)
        and not keeps_reference(config)
        and algorithm.entropy_coef == 0
    )


def trains_on_sampling_masks(config: RunConfig) -> bool:
    """Whether top-p or top-k limits the tokens that training samples are drawn from.

    Engines then return the kept tokens, and the learner computes its log-probabilities over them. Greedy decoding
    ignores top-p and top-k.
    """
    rollout = config.rollout
    is_limited = rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0
    return is_limited and rollout.rollout_temperature > 0 and config.learner.loss_type != "sft_loss"


def server_arguments(config: RunConfig) -> dict[str, Any]:
    """The further arguments of SGLang's server, by their names in Python. Users may write names with hyphens too."""
    return {name.replace("-", "_"): value for name, value in config.engine.sglang_server_args.items()}


def router_arguments(config: RunConfig) -> dict[str, Any]:
    """The further arguments of sglang-router, by their names in Python. Users may write names with hyphens too."""
    return {name.replace("-", "_"): value for name, value in config.engine.sglang_router_args.items()}


def sampling_mask_limit(config: RunConfig) -> int:
    """The most kept tokens that an engine can return for a token."""
    limit = server_arguments(config).get("sampling_mask_max_tokens", SAMPLING_MASK_MAX_TOKENS)
    # `config/checks` reports any other value.
    return limit if isinstance(limit, int) else SAMPLING_MASK_MAX_TOKENS


def sampling_top_k(config: RunConfig) -> int:
    """The top-k of training samples: the setting, else the limit that top-p alone implies.

    SGLang returns no sampling mask without top-k. The limit is half of what fits into a mask: SGLang also keeps the
    tokens that are as likely as the last of the k, and refuses a mask that is too long.
    """
    if config.rollout.rollout_top_k > 0 or not trains_on_sampling_masks(config):
        return config.rollout.rollout_top_k
    return max(2, sampling_mask_limit(config) // 2)


def reference_batching(learner: Learner) -> Learner:
    """The learner's settings with the reference model's overrides for dynamic batching applied."""
    overrides = {
        "use_dynamic_batching_in_infer": learner.ref_use_dynamic_batching_in_infer,
        "max_tokens_per_microbatch_in_infer": learner.ref_max_tokens_per_microbatch_in_infer,
        "sequence_length_round_in_infer": learner.ref_sequence_length_round_in_infer,
    }
    return learner.model_copy(update={name: value for name, value in overrides.items() if value is not None})


def critic_learning_rate(config: RunConfig) -> LearningRate:
    """The critic's learning rate: the policy's schedule with the critic's peak and warm-up."""
    peak, warmup = config.algorithm.critic_lr or config.learner.lr, config.algorithm.critic_lr_warmup_steps
    return replace(learning_rate(config), peak=peak, warmup_steps=warmup)


def learning_rate(config: RunConfig) -> LearningRate:
    """The policy's learning rate. It decays until the end of the run unless `lr_decay_steps` is set."""
    learner = config.learner
    decay_steps = learner.lr_decay_steps or config.rollout.num_rollout * steps_per_rollout(config)
    return LearningRate(
        peak=learner.lr,
        floor=learner.min_lr,
        warmup_steps=learner.lr_warmup_steps,
        style=learner.lr_decay_style,
        decay_steps=decay_steps,
        wsd_decay_steps=learner.lr_wsd_decay_steps or max(1, decay_steps // 10),
        wsd_decay_style=learner.lr_wsd_decay_style,
    )


def checkpoint_due(config: RunConfig, rollout_id: int) -> bool:
    """Whether a checkpoint or an export is written after rollout `rollout_id`."""
    learner, done = config.learner, rollout_id + 1
    if learner.save is None and learner.save_hf is None:
        return False
    return done == config.rollout.num_rollout or done % (learner.save_interval or done + 1) == 0


def restarts_learner(config: RunConfig) -> bool:
    """Whether a lost learner is replaced. Every batch since the last checkpoint is kept until the next one, so
    checkpoints must be written at intervals. A colocated run ends, because its engines share the learner's devices."""
    learner, cluster = config.learner, config.cluster
    return learner.save is not None and learner.save_interval is not None and not cluster.colocate


def publish_due(config: RunConfig, rollout_id: int) -> bool:
    """Whether a new weight version follows rollout `rollout_id`."""
    done = rollout_id + 1
    return done % config.weights.update_weights_interval == 0 or done == config.rollout.num_rollout


def evaluation_due(config: RunConfig, rollout_id: int) -> bool:
    """Whether an evaluation follows rollout `rollout_id`. The evaluation at the end of the run is not counted."""
    interval, done = config.rollout.eval_interval, rollout_id + 1
    return interval is not None and done % interval == 0 and done < config.rollout.num_rollout


def save_folder(config: RunConfig) -> Path | None:
    """Absolute path of the folder `save`; None if it is unset."""
    return None if config.learner.save is None else Path(config.learner.save).expanduser().absolute()


def hf_export(template: str, rollout_id: int) -> Path:
    """Absolute path of the Hugging Face export after rollout `rollout_id`; `template` is `save_hf`."""
    return Path(template.replace("{rollout_id}", str(rollout_id))).expanduser().absolute()


def min_samples_per_group(config: RunConfig) -> int:
    """Minimum number of surviving samples per group."""
    return config.rollout.min_samples_per_group or config.rollout.n_samples_per_prompt


def samples_per_rollout(config: RunConfig) -> int:
    """Samples per training batch."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def samples_per_step(config: RunConfig) -> int:
    """Samples per optimizer step: `global_batch_size`, or the training batch divided by its steps."""
    return config.learner.global_batch_size or samples_per_rollout(config) // steps_per_rollout(config)


def steps_per_rollout(config: RunConfig) -> int:
    """Optimizer steps per training batch: `num_steps_per_rollout`, or the training batch divided by
    `global_batch_size`, or 1 if both are unset."""
    learner = config.learner
    if learner.num_steps_per_rollout is not None:
        return learner.num_steps_per_rollout
    samples = samples_per_rollout(config)
    return max(1, samples // (learner.global_batch_size or samples))


def learner_ranks(config: RunConfig) -> int:
    """Total number of learner processes."""
    return config.learner.actor_num_nodes * config.learner.actor_num_gpus_per_node


def data_parallel_ranks(learner: Learner, ranks: int) -> int:
    """Number of model replicas that `ranks` learner ranks hold. Each replica trains a part of every batch."""
    return ranks // _ranks_per_replica(learner)


def data_parallel_rank(learner: Learner, rank: int, ranks: int) -> int:
    """The data-parallel rank of learner rank `rank` out of `ranks`.

    Megatron orders ranks by tensor, context, data and pipeline parallelism, with tensor-parallel ranks adjacent.
    """
    ranks_per_stage = learner.tensor_model_parallel_size * learner.context_parallel_size
    return rank // ranks_per_stage % data_parallel_ranks(learner, ranks)


def sequence_unit(learner: Learner) -> int:
    """Sequence lengths are padded to a multiple of this many tokens.

    Under context parallelism each rank takes one chunk from the front and one from the back of a sequence, because
    causal attention then costs every rank the same. So a sequence has two equal chunks per rank.
    """
    return 1 if learner.context_parallel_size == 1 else 2 * learner.context_parallel_size


def pack_unit(learner: Learner) -> int:
    """Packed micro-batches are padded to a multiple of this many tokens, for sequence parallelism to split."""
    shards = learner.tensor_model_parallel_size if learner.sequence_parallel else 1
    return math.lcm(sequence_unit(learner), learner.context_parallel_size * shards)


def shares_prefixes(learner: Learner) -> bool:
    """Whether settings, parallel layout and batching let the learner compute a common prefix of samples once.

    Context parallelism divides every sequence evenly among ranks, and dynamic batching pads rows to equal lengths.
    """
    needs_whole_samples = learner.context_parallel_size > 1 or learner.use_dynamic_batching_in_train
    return learner.share_prefixes is not False and not needs_whole_samples


def micro_batch_tokens(learner: Learner) -> int:
    """Maximum number of tokens in a packed micro-batch over all context-parallel ranks, a multiple of `pack_unit`."""
    tokens = learner.max_tokens_per_gpu * learner.context_parallel_size
    return tokens - tokens % pack_unit(learner)


def least_tokens_per_gpu(learner: Learner, longest: int) -> int:
    """The smallest max_tokens_per_gpu under which a sequence of `longest` tokens fits into a micro-batch."""
    padded = longest + -longest % pack_unit(learner)
    return -(-padded // learner.context_parallel_size)


def _ranks_per_replica(learner: Learner) -> int:
    return learner.tensor_model_parallel_size * learner.context_parallel_size * learner.pipeline_model_parallel_size


def engines(config: RunConfig) -> int:
    """Number of engines."""
    return config.engine.rollout_num_gpus // config.engine.rollout_num_gpus_per_engine


def evaluation_concurrency(config: RunConfig) -> int:
    """Evaluation samples that an engine runs beside training samples; 0 if the run never evaluates during training."""
    return 0 if config.rollout.eval_interval is None else max(1, config.engine.sglang_server_concurrency // 4)


def demand_of(config: RunConfig) -> Demand:
    """Devices that learner and engines need; none for a learner or engines that the run does not start."""
    return Demand(
        learner=0 if config.debug.debug_rollout_only else learner_ranks(config),
        engines=engines(config) if generates(config) else 0,
        per_engine=config.engine.rollout_num_gpus_per_engine,
        colocated=config.cluster.colocate and not config.debug.debug_rollout_only,
    )


def table(config: RunConfig, entry: str) -> str:
    """The table that start-up and `--check-config` print, one derived value per line."""
    bounds, rollout, learner = bounds_of(config, entry), config.rollout, config.learner
    schedule, keeps_groups = schedule_of(config, entry), rollout_mode(config).keeps_groups
    reduced = bounds.window < bounds.requested_window
    reason = f"; reduced from {bounds.requested_window} to leave enough slots for a publish" if reduced else ""
    rows: list[tuple[str, object, str]] = [("schedule", schedule.replace("_", " "), reason_of_schedule(config, entry))]
    if keeps_groups:
        limit = _or_no_limit(rollout.max_weight_staleness)
        rows += [
            ("P", bounds.publish_groups, "groups trained per publish"),
            ("staleness", limit, "maximum age of a trained group, in weight versions; older groups are recycled"),
        ]
    else:
        rows += [
            ("N", bounds.generation_batch, "maximum number of groups in flight"),
            ("W", bounds.window, f"window size in groups{reason}"),
            ("P", bounds.publish_groups, "groups trained per publish"),
            ("staleness", _or_no_limit(bounds.staleness), "maximum age of a freshly sampled group, in weight versions"),
        ]
    if keeps_groups is not False:
        rows.append(("held", bounds.held, "maximum of groups that a worker holds and that are being trained"))
    if schedule is Schedule.FULLY_ASYNC and not keeps_groups:
        rows += [
            ("B", _or_no_limit(bounds.slots), "slots for groups between admission and live weights"),
            (
                "queue",
                bounds.room,
                f"maximum of groups in flight and queued (queue_capacity {rollout.queue_capacity})",
            ),
        ]
    groups = f"{rollout.rollout_batch_size} groups of {rollout.n_samples_per_prompt}"
    steps = f"{steps_per_rollout(config)} optimizer step(s) of {samples_per_step(config)}"
    rows += [
        ("batch", samples_per_rollout(config), f"samples: {groups}, trained in {steps}"),
        *_objective_row(config),
        ("learner", learner_ranks(config), f"rank(s): {_layout(learner)}"),
        ("engines", engines(config), f"engine(s) of {config.engine.rollout_num_gpus_per_engine} rank(s)")
        if generates(config)
        else ("engines", 0, "the run generates nothing"),
    ]
    return "\n".join(f"{name:<10} {value:>12}  {meaning}" for name, value, meaning in rows)


def _objective_row(config: RunConfig) -> list[tuple[str, object, str]]:
    if config.learner.loss_type == "custom_loss":
        return _custom_loss_rows(config)
    if config.learner.loss_type != "policy_loss":
        return []
    return [("objective", objective_name(config.algorithm), described(config.algorithm))]


def _custom_loss_rows(config: RunConfig) -> list[tuple[str, object, str]]:
    path = config.algorithm.custom_loss_function_path
    assert path is not None, "config/checks refuses it"
    rows: list[tuple[str, object, str]] = [("objective", "custom_loss", path)]
    if takes_logits(load_function(path, setting="custom_loss_function_path")):
        shape, tokens = shape_of(config.model), micro_batch_tokens(config.learner)
        vocabulary = 0 if shape is None else shape.vocabulary
        size = f"{4 * tokens * vocabulary:,}" if vocabulary else "unknown"
        meaning = f"bytes on each rank for the logits of {tokens} tokens, and as many for their gradient"
        rows.append(("logits", size, meaning))
    return rows


def _layout(learner: Learner) -> str:
    """The sizes of the parallel groups. Tensor parallelism is always listed, the others only if they are in use."""
    sizes = {
        "tensor-parallel": learner.tensor_model_parallel_size,
        "pipeline-parallel": learner.pipeline_model_parallel_size,
        "context-parallel": learner.context_parallel_size,
        "expert-parallel": learner.expert_model_parallel_size,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "tensor-parallel")


def _or_no_limit(value: int | None) -> str:
    return "no limit" if value is None else str(value)
