"""Builds the rewarder that the configuration selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from miles_async.config.checks.rollouts import BUILT_IN_REWARDS
from miles_async.config.derived import generates
from miles_async.config.fields import SETTINGS
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import UserError
from miles_async.rewards.builtin import ReasoningGymReward, exact, f1, gpqa
from miles_async.rewards.graders import Graders
from miles_async.rewards.instructions import ifeval
from miles_async.rewards.remote import RemoteReward
from miles_async.rewards.rewarder import Rewarder, RewardFunction
from miles_async.types import Sample

IN_PROCESS: dict[str, RewardFunction] = {"exact": exact, "f1": f1, "gpqa": gpqa, "ifeval": ifeval}
"""Fast rewards, which run in a thread of this process."""
IN_GRADER_PROCESSES = "math", "dapo", "deepscaler"
"""Rewards of `rewards/mathematics.py`: parsing a formula can hang, so they run in processes that can be killed."""


def open_rewarder(config: RunConfig, args: Any) -> Rewarder:
    """Return the rewarder for `rm_type` or `custom_rm_path`. `args` is the flat configuration that rewards receive.

    Raises UserError if `rm_type` is unknown or incomplete, or if the user's function cannot be imported.
    """
    rollout = config.rollout
    if not generates(config):
        # Saved batches contain their rewards, and supervised examples need none: this rewarder is never called.
        return Rewarder(exact, args, name="none", timeout_seconds=None)
    if rollout.custom_rm_path is not None:
        return _custom(config, rollout.custom_rm_path, args)
    name = str(rollout.rm_type)
    kind, boxed = name.removeprefix("boxed_"), name.startswith("boxed_")
    timeout = rollout.reward_timeout_seconds
    match kind, config.data.reasoning_gym_task:
        case fast, _ if fast in IN_PROCESS:
            return Rewarder(IN_PROCESS[fast], args, name=name, timeout_seconds=timeout, boxed=boxed)
        case slow, _ if slow in IN_GRADER_PROCESSES:
            path = f"miles_async.rewards.mathematics.{slow}"
            return _in_grader_processes(config, path, "rm_type", _without_tokens, name=name, boxed=boxed)
        case "remote_rm", _:
            return _remote(config, args, name=name, boxed=boxed)
        case "reasoning_gym", None:
            raise UserError("rm_type reasoning_gym needs reasoning_gym_task: set it to a task such as chain_sum")
        case "reasoning_gym", str(task):
            reward = ReasoningGymReward(task, config.data.reasoning_gym_settings)
            return Rewarder(reward, args, name=name, timeout_seconds=timeout, boxed=boxed)
        case _:
            raise UserError(
                f"rm_type {rollout.rm_type!r} is unknown: set one of {', '.join(BUILT_IN_REWARDS)}, or name your own "
                "function with custom_rm_path"
            )


def _custom(config: RunConfig, path: str, args: Any) -> Rewarder:
    rollout = config.rollout
    function = load_function(path, setting="custom_rm_path")
    if rollout.custom_rm_isolated:
        return _in_grader_processes(
            config, path, "custom_rm_path", lambda sample: sample, name=path, whole_groups=rollout.group_rm
        )
    return Rewarder(
        function,
        args,
        name=path,
        timeout_seconds=rollout.reward_timeout_seconds,
        reward_key=rollout.reward_key,
        whole_groups=rollout.group_rm,
    )


def _without_tokens(sample: Sample) -> Sample:
    """Return a copy with text only: serialising tens of thousands of tokens for a text reward is wasted time."""
    return replace(sample, tokens=[], rollout_log_probs=[], spans=[], loss_mask=None)


def _in_grader_processes(
    config: RunConfig, path: str, setting: str, prepare: Callable[[Any], Any], *, name: str, **options: bool
) -> Rewarder:
    """Return a rewarder that calls the function at `path` in grader processes.

    `prepare` maps a sample (or a list of samples) to the one that is sent to the process. `options` are `boxed` and
    `whole_groups` of `Rewarder`.
    """
    graders = Graders(
        path=path,
        setting=setting,
        args={name: reduce(getattr, field.path, config) for name, field in SETTINGS.items()},
        processes=config.rollout.reward_processes,
        timeout_seconds=config.rollout.reward_timeout_seconds,
    )

    async def grade(args: Any, samples: Any) -> Any:
        return await graders.grade(prepare(samples))

    # The graders enforce the deadline per call: a deadline here would count the time spent waiting for a free process.
    return Rewarder(
        grade,
        None,
        name=name,
        timeout_seconds=None,
        reward_key=config.rollout.reward_key,
        close=graders.close,
        **options,
    )


def _remote(config: RunConfig, args: Any, *, name: str, boxed: bool) -> Rewarder:
    rollout = config.rollout
    if rollout.rm_url is None:
        raise UserError("rm_type remote_rm needs a reward server: set rm_url to the address of the server")
    reward = RemoteReward(
        rollout.rm_url,
        concurrency=rollout.remote_rm_concurrency,
        retries=rollout.remote_rm_retries,
        timeout_seconds=rollout.reward_timeout_seconds,
    )
    # Each request has its own deadline: a deadline here would count the time spent in the queue and in retries.
    return Rewarder(
        reward,
        args,
        name=name,
        timeout_seconds=None,
        reward_key=rollout.reward_key,
        boxed=boxed,
        close=reward.close,
    )
