"""Checks of sizes that must agree: batches, window, slots, sequence lengths and ranges."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

from miles_async.config.fields import with_settings
from miles_async.config.generation import bounds_of
from miles_async.config.losses import estimator_of
from miles_async.config.schema import RunConfig
from miles_async.scheduling.bounds import Bounds


def _batch_sizes(config: RunConfig) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    samples, steps = config.samples_per_rollout, config.steps_per_pass
    product = f"rollout_batch_size {rollout.rollout_batch_size} * n_samples_per_prompt {rollout.n_samples_per_prompt}"
    if learner.global_batch_size is None:
        if samples % steps:
            fitting = _nearest_divisor(samples, steps)
            yield (
                f"{product} = {samples} samples cannot be split into num_steps_per_rollout {steps} equal steps; "
                f"set num_steps_per_rollout to {fitting}"
            )
    elif samples != learner.global_batch_size * steps and not learner.segments_are_samples:
        yield (
            f"{product} = {samples} samples, but global_batch_size {learner.global_batch_size} * num_steps_per_rollout "
            f"{steps} = {learner.global_batch_size * steps}; set {_fitting_sizes(config)}"
        )
    if config.samples_per_step < (ranks := learner.data_parallel_ranks(learner.ranks)):
        yield (
            f"an optimizer step of {config.samples_per_step} samples is too small for {ranks} data-parallel learner "
            f"ranks; set global_batch_size to {ranks} or more"
        )


def _fitting_sizes(config: RunConfig) -> str:
    """Advice: the smallest changes after which the batch sizes agree."""
    requested, steps = config.learner.global_batch_size or 1, config.steps_per_pass
    samples, per_prompt = config.samples_per_rollout, config.rollout.n_samples_per_prompt
    options = []
    if samples % steps == 0:
        options.append(f"global_batch_size to {samples // steps}")
    if samples % requested == 0:
        options.append(f"num_steps_per_rollout to {samples // requested}")
    if requested * steps % per_prompt == 0:
        options.append(f"rollout_batch_size to {requested * steps // per_prompt}")
    if not options:
        size = _nearest_divisor(samples, requested)
        options.append(f"global_batch_size to {size} and num_steps_per_rollout to {samples // size}")
    return ", or ".join(options)


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return min((*small, *(number // divisor for divisor in small)), key=lambda divisor: abs(divisor - wanted))


def _over_sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.over_sampling_batch_size is not None and rollout.over_sampling_batch_size < rollout.rollout_batch_size:
        yield (
            f"over_sampling_batch_size {rollout.over_sampling_batch_size} is below rollout_batch_size "
            f"{rollout.rollout_batch_size}; set it to {rollout.rollout_batch_size} or more, or leave it unset"
        )
    algorithm = config.algorithm
    by_user = rollout.custom_reward_post_process_path or rollout.custom_convert_samples_to_train_data_path
    trains = not config.debug.debug_rollout_only
    uses_advantages = trains and config.learner.loss_type != "sft_loss" and by_user is None
    estimator, compares = algorithm.advantage_estimator, estimator_of(algorithm).compares_samples
    if rollout.n_samples_per_prompt == 1 and compares and algorithm.rewards_normalization and uses_advantages:
        yield (
            f"n_samples_per_prompt 1 gives no training signal: advantage_estimator {estimator} compares the samples of "
            "a group; set n_samples_per_prompt to 2 or more, or advantage_estimator to reinforce_plus_plus or ppo"
        )


def _smaller_groups(config: RunConfig) -> Iterator[str]:
    """Problems of groups that are trained without the samples that failed."""
    rollout = config.rollout
    least = rollout.min_samples_per_group
    if least is not None and least > rollout.n_samples_per_prompt:
        yield (
            f"min_samples_per_group {least} is more than n_samples_per_prompt {rollout.n_samples_per_prompt}, the size "
            "of a group; set it to that number or less, or leave it unset"
        )


def _ranges(config: RunConfig) -> Iterator[str]:
    low, high = config.warm_start.warm_start_accuracy
    if not 0 <= low < high <= 1:
        yield f"warm_start_accuracy [{low:g}, {high:g}] is not a range within [0, 1]: set it to [0.15, 0.35]"
    warn, abort = config.observability.no_progress_warn_seconds, config.observability.no_progress_abort_seconds
    if abort <= warn:
        yield (
            f"no_progress_abort_seconds {abort:g} stops the run before no_progress_warn_seconds {warn:g} warns; "
            "set no_progress_abort_seconds higher"
        )


def _learning_rates(config: RunConfig) -> Iterator[str]:
    learner, critic_lr = config.learner, config.algorithm.critic_lr
    for name, peak in (("lr", learner.lr), ("critic_lr", critic_lr)):
        if peak is not None and learner.lr_decay_style != "constant" and learner.min_lr > peak:
            yield (
                f"min_lr {learner.min_lr:g} is above {name} {peak:g}, so the learning rate would rise: set min_lr to "
                f"{peak:g} or less"
            )
    end, warmup = learner.lr_decay_steps, learner.lr_warmup_steps
    if learner.lr_decay_style in ("linear", "cosine") and end is not None and end <= warmup:
        yield (
            f"lr_decay_steps {end} ends the decay within the lr_warmup_steps {warmup}, so the learning rate would drop "
            "at once: set lr_decay_steps higher"
        )


def _critic_only(config: RunConfig) -> Iterator[str]:
    alone, total = config.algorithm.num_critic_only_steps, config.rollout.num_rollout
    if alone >= total:
        yield (
            f"num_critic_only_steps {alone} leaves none of num_rollout {total} to train the policy: set it to "
            f"{total - 1} or less"
        )


def _profiled_steps(config: RunConfig) -> Iterator[str]:
    debug = config.debug
    if debug.use_pytorch_profiler and debug.profile_step_end <= debug.profile_step_start:
        yield (
            f"profile_step_end {debug.profile_step_end} is not after profile_step_start {debug.profile_step_start}, so "
            f"nothing is profiled: set profile_step_end to {debug.profile_step_start + 1} or more"
        )


def key_age_problem(config: RunConfig, *, overlaps: bool) -> str | None:
    """Why the limit of staleness cannot be kept with keys of older versions, if it cannot."""
    limit, keys = config.rollout.max_weight_staleness, config.weights.max_kv_staleness
    if limit is None or keys == 0:
        return None
    if keys < 0:
        # A group that is dropped for the age of its keys finds the same cached prompt when it is generated again.
        return (
            f"max_weight_staleness {limit} keeps dropping groups with older keys, because max_kv_staleness "
            f"{keys} lets new requests go on from cached prompts of any age: set max_kv_staleness to 0 or more, or "
            "max_weight_staleness to null"
        )
    if keys + overlaps <= limit:
        return None
    return (
        f"max_weight_staleness {limit} counts keys that are max_kv_staleness {keys} versions older than the weights, "
        f"which leaves no version to overlap with: set max_weight_staleness to {keys + overlaps} or more"
    )


def fully_async_problems(config: RunConfig, bounds: Bounds) -> Iterator[str]:
    """Problems of the queue and the slots that would keep a fully asynchronous run from ever completing a batch."""
    rollout = config.rollout
    if rollout.queue_capacity < rollout.rollout_batch_size:
        yield (
            f"queue_capacity {rollout.queue_capacity} cannot hold a batch of rollout_batch_size "
            f"{rollout.rollout_batch_size} groups; set queue_capacity to {rollout.rollout_batch_size} or more"
        )
    elif bounds.generation_batch > bounds.room:
        limit = (
            f"queue_capacity {rollout.queue_capacity} allows"
            if bounds.room == rollout.queue_capacity
            else f"max_weight_staleness {rollout.max_weight_staleness} with a window of {bounds.window} allows"
        )
        yield (
            f"{bounds.generation_batch} groups can never be in flight: {limit} {bounds.room}; set "
            f"over_sampling_batch_size to {_largest_generation_batch(config)} or less, or raise that limit"
        )


def _largest_generation_batch(config: RunConfig) -> int:
    """The largest valid N. A smaller N has a smaller window and therefore more slots, so it is found by bisection."""
    rollout = config.rollout

    def is_too_large(size: int) -> bool:
        return size > bounds_of(with_settings(config, over_sampling_batch_size=size), "train_async.py").room

    least = rollout.rollout_batch_size
    sizes = range(least + 1, (rollout.over_sampling_batch_size or 0) + 1)
    return least + bisect_left(sizes, True, key=is_too_large)


CHECKS = (
    _batch_sizes,
    _over_sampling,
    _smaller_groups,
    _ranges,
    _learning_rates,
    _critic_only,
    _profiled_steps,
)
