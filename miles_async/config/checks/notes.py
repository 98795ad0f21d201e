"""Settings that will do nothing in a run, or something else than one may think."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.derived import GREEDY_FUNCTION, engines, schedule_of
from miles_async.config.schema import RunConfig
from miles_async.scheduling.bounds import Schedule


def _policy_notes(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    if config.algorithm.off_policy_correction == "none" and schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        yield (
            "off_policy_correction none trains tokens of older weights as if they were new, and the policy ratio, "
            "measured from the trainer's own log-probabilities, hides it; set it to tis"
        )
    if rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0:
        yield (
            "rollout_top_p and rollout_top_k cut the distribution that is sampled from, but the trainer's "
            "log-probabilities are of the whole one: ratios are off by what was cut; leave both unset, or watch ess"
        )


def _idle_over_sampling_filter(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    if rollout.over_sampling_filter_path is None:
        return
    if schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        yield "over_sampling_filter_path has no effect: it chooses within a batch, and a stream has none; use train.py"
    elif rollout.over_sampling_batch_size in (None, rollout.rollout_batch_size):
        yield "over_sampling_filter_path has no choice: set over_sampling_batch_size above rollout_batch_size"


def _idle_window(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    if rollout.windowed_fifo_ratio is None:
        return
    if rollout.rollout_function_path == GREEDY_FUNCTION:
        yield (
            f"windowed_fifo_ratio has no effect: {GREEDY_FUNCTION} collects what finishes first; "
            "unset rollout_function_path, or name windowed_fifo_rollout.generate_rollout"
        )
        return
    surplus = rollout.over_sampling_batch_size not in (None, rollout.rollout_batch_size)
    filtered = rollout.dynamic_sampling_filter_path is not None
    if schedule_of(config, entry) is not Schedule.FULLY_ASYNC and not surplus and not filtered:
        yield (
            "windowed_fifo_ratio has no effect: every generated group is trained; "
            "set over_sampling_batch_size above rollout_batch_size, or a dynamic_sampling_filter_path"
        )


def _idle_skip(config: RunConfig, entry: str) -> list[str]:
    used, idle = ("rollout", "async_rollout")
    if schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        used, idle = idle, used
    roles = {"rollout": config.skip.rollout, "async_rollout": config.skip.async_rollout}
    found = []
    # The deprecated switch enables both, for whichever fits.
    if roles[idle].enable and not roles[used].enable:
        found.append(f"skip.{idle} has no effect: this run generates in the way of skip.{used}; enable that one")
    if roles[used].enable and not roles[used].steps:
        found.append(f'skip.{used} skips nothing: set skip.{used}.steps, such as "[1-128]"')
    return found


def _router_notes(config: RunConfig, entry: str) -> Iterator[str]:
    policy = config.engine.sglang_router_policy
    if policy in ("consistent_hashing", "prefix_hash") and engines(config) > 1:
        yield (
            f"sglang_router_policy {policy} ties requests to engines by a hash, however full these are: one engine may "
            "get most of them and thrash its cache while others idle; cache_aware or power_of_two look at the load"
        )


NOTES = (_idle_window, _idle_over_sampling_filter, _idle_skip, _policy_notes, _router_notes)
