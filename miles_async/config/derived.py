"""What follows from a configuration: the schedule, the bounds, the sizes, and the table that start-up prints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from miles_async.config.device_plan import Demand
from miles_async.config.learning_rate import LearningRate
from miles_async.config.schema import Learner, Rollout, RunConfig
from miles_async.scheduling.bounds import Bounds, Schedule

FULLY_ASYNC_FUNCTION = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
WINDOWED_FUNCTION = "miles_async.rollout.windowed_fifo_rollout.generate_rollout"
EXTERNAL_FUNCTION = "miles_async.rollout.external_rollout.generate_rollout"
SFT_FUNCTION = "miles_async.rollout.sft_rollout.generate_rollout"
GREEDY_FUNCTION = "miles_async.rollout.sglang_rollout.generate_rollout"
"""Collects whatever finishes first, as slime's does; every other function collects through the window."""


def schedule_of(config: RunConfig, entry: str) -> Schedule:
    """`entry` is `train_async.py` or `train.py`. A user's own function returns a batch per call."""
    if entry == "train.py":
        return Schedule.SYNCHRONOUS
    if config.rollout.rollout_function_path == FULLY_ASYNC_FUNCTION:
        return Schedule.FULLY_ASYNC
    return Schedule.ONE_STEP_OFF


def trains_only(config: RunConfig) -> bool:
    """Whether batches come from disk."""
    return config.debug.debug_train_only or config.debug.load_debug_rollout_data is not None


def evaluates(config: RunConfig) -> bool:
    """Whether anything is held out, or named, to be evaluated on."""
    rollout = config.rollout
    return bool(config.data.eval_size or rollout.eval_datasets or rollout.eval_function_path)


def generates(config: RunConfig) -> bool:
    """Whether anything is ever asked of an engine: saved batches and lessons come without, evaluations do not."""
    sft_examples = config.rollout.rollout_function_path == SFT_FUNCTION
    return not trains_only(config) and not (sft_examples and not evaluates(config))


def rollout_file(config: RunConfig) -> str | None:
    """Where each batch is saved, with `{rollout_id}` in it; None where it is not."""
    if config.debug.save_debug_rollout_data is None and config.debug.dump_details is not None:
        return f"{config.debug.dump_details}/rollout_data/{{rollout_id}}.safetensors"
    return config.debug.save_debug_rollout_data


def keeps_reference(config: RunConfig) -> bool:
    """Whether a frozen model is compared with."""
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef > 0


def reference_batching(learner: Learner) -> Learner:
    """The settings under which the reference model's log-probabilities are computed."""
    own = {
        "use_dynamic_batching_in_infer": learner.ref_use_dynamic_batching_in_infer,
        "max_tokens_per_microbatch_in_infer": learner.ref_max_tokens_per_microbatch_in_infer,
        "sequence_length_round_in_infer": learner.ref_sequence_length_round_in_infer,
    }
    return learner.model_copy(update={name: value for name, value in own.items() if value is not None})


def critic_learning_rate(config: RunConfig) -> LearningRate:
    peak, warmup = config.algorithm.critic_lr or config.learner.lr, config.algorithm.critic_lr_warmup_steps
    return replace(learning_rate(config), peak=peak, warmup_steps=warmup)


def learning_rate(config: RunConfig) -> LearningRate:
    """The learner's; unless told otherwise it decays over the whole run."""
    learner = config.learner
    decay_steps = learner.lr_decay_steps or config.rollout.num_rollout * learner.num_steps_per_rollout
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
    """Whether a checkpoint or an export follows rollout `rollout_id`."""
    learner, done = config.learner, rollout_id + 1
    if learner.save is None and learner.save_hf is None:
        return False
    return done == config.rollout.num_rollout or done % (learner.save_interval or done + 1) == 0


def hf_export(template: str, rollout_id: int) -> Path:
    """Where `save_hf` puts the model after rollout `rollout_id`."""
    return Path(template.replace("{rollout_id}", str(rollout_id))).expanduser().absolute()


def bounds_of(config: RunConfig, entry: str) -> Bounds:
    rollout = config.rollout
    return Bounds.derive(
        rollout_batch_size=rollout.rollout_batch_size,
        over_sampling_batch_size=rollout.over_sampling_batch_size,
        windowed_fifo_ratio=(None if rollout.rollout_function_path == GREEDY_FUNCTION else rollout.windowed_fifo_ratio),
        max_weight_staleness=rollout.max_weight_staleness,
        update_weights_interval=config.weights.update_weights_interval,
        queue_capacity=rollout.queue_capacity,
        schedule=schedule_of(config, entry),
    )


def samples_per_rollout(config: RunConfig) -> int:
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def samples_per_step(config: RunConfig) -> int:
    """`global_batch_size`, or what the rollout batch and the steps per rollout make it."""
    return config.learner.global_batch_size or samples_per_rollout(config) // config.learner.num_steps_per_rollout


def learner_ranks(config: RunConfig) -> int:
    return config.learner.actor_num_nodes * config.learner.actor_num_gpus_per_node


def data_parallel_ranks(learner: Learner, ranks: int) -> int:
    """How many shares a batch is cut into: the ranks that are left once layers, stages and sequences are shared."""
    return ranks // _per_share(learner)


def data_parallel_rank(learner: Learner, rank: int, ranks: int) -> int:
    """Which of those shares learner rank `rank` of `ranks` trains.

    Megatron numbers its ranks so that those of one layer come first, then those of one sequence, then the shares; the
    stages of the pipeline are furthest apart.
    """
    beside = learner.tensor_model_parallel_size * learner.context_parallel_size
    return rank // beside % data_parallel_ranks(learner, ranks)


def sequence_unit(learner: Learner) -> int:
    """Every sequence is as long as a multiple of this many tokens.

    Ranks that share a sequence take one part each from its front and from its back, so that causal attention costs
    all of them the same.
    """
    return 1 if learner.context_parallel_size == 1 else 2 * learner.context_parallel_size


def pack_unit(learner: Learner) -> int:
    """Every micro-batch holds a multiple of this many tokens: sequence parallelism cuts a rank's part of it evenly."""
    shards = learner.tensor_model_parallel_size if learner.sequence_parallel else 1
    return math.lcm(sequence_unit(learner), learner.context_parallel_size * shards)


def micro_batch_tokens(learner: Learner) -> int:
    """The most tokens a packed micro-batch may hold: what its ranks take together, in whole units."""
    tokens = learner.max_tokens_per_gpu * learner.context_parallel_size
    return tokens - tokens % pack_unit(learner)


def least_tokens_per_gpu(learner: Learner, longest: int) -> int:
    """The smallest max_tokens_per_gpu under which a sequence of `longest` tokens fits into a micro-batch."""
    whole = longest + -longest % pack_unit(learner)
    return -(-whole // learner.context_parallel_size)


def _per_share(learner: Learner) -> int:
    return learner.tensor_model_parallel_size * learner.context_parallel_size * learner.pipeline_model_parallel_size


def engines(config: RunConfig) -> int:
    return config.engine.rollout_num_gpus // config.engine.rollout_num_gpus_per_engine


def evaluation_concurrency(config: RunConfig) -> int:
    """Samples of evaluations that each engine runs beside those of training; 0 where training never runs meanwhile."""
    return 0 if config.rollout.eval_interval is None else max(1, config.engine.sglang_server_concurrency // 4)


def demand_of(config: RunConfig) -> Demand:
    """The devices that learner and engines ask for; a debugging run asks for none for the half that it leaves out."""
    return Demand(
        learner=0 if config.debug.debug_rollout_only else learner_ranks(config),
        engines=engines(config) if generates(config) else 0,
        per_engine=config.engine.rollout_num_gpus_per_engine,
        colocated=config.cluster.colocate and not config.debug.debug_rollout_only,
    )


def table(config: RunConfig, entry: str) -> str:
    """The figures of start-up and of `--check-config`, one per line."""
    bounds, rollout, learner = bounds_of(config, entry), config.rollout, config.learner
    cut = f", cut from {bounds.window_asked}: a publish needs slots" if bounds.window < bounds.window_asked else ""
    rows: list[tuple[str, object, str]] = [
        ("schedule", bounds.schedule.replace("_", " "), entry),
        ("N", bounds.generation_batch, "groups in flight at most"),
        ("W", bounds.window, f"window in groups{cut}"),
        ("P", bounds.publish_groups, "groups trained per publish"),
        ("staleness", _or_none(bounds.staleness), "versions at most for a freshly sampled group"),
    ]
    if bounds.schedule is Schedule.FULLY_ASYNC:
        rows += [
            ("B", _or_none(bounds.slots), "slots between admission and live weights"),
            ("queue", bounds.room, f"groups at most, with those in flight; queue_capacity {rollout.queue_capacity}"),
        ]
    steps = f"in {learner.num_steps_per_rollout} step(s) of {samples_per_step(config)}"
    rows += [
        ("batch", samples_per_rollout(config), f"samples: {_times(rollout)}, {steps}"),
        ("learner", learner_ranks(config), f"rank(s), {_layout(learner)}"),
        ("engines", engines(config), f"of {config.engine.rollout_num_gpus_per_engine} rank(s)")
        if generates(config)
        else ("engines", 0, "nothing is generated"),
    ]
    return "\n".join(f"{name:<10} {value:>12}  {meaning}" for name, value, meaning in rows)


def _layout(learner: Learner) -> str:
    sizes = {
        "per layer": learner.tensor_model_parallel_size,
        "stages": learner.pipeline_model_parallel_size,
        "per sequence": learner.context_parallel_size,
        "per set of experts": learner.expert_model_parallel_size,
    }
    return ", ".join(f"{size} {what}" for what, size in sizes.items() if size > 1 or what == "per layer")


def _times(rollout: Rollout) -> str:
    return f"{rollout.rollout_batch_size} groups of {rollout.n_samples_per_prompt}"


def _or_none(value: int | None) -> str:
    return "no limit" if value is None else str(value)
