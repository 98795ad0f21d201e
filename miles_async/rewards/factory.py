"""Builds the rewarder that the configuration selects."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

from miles_async.config.checks.rollouts import BUILT_IN_REWARDS
from miles_async.config.derived import generates
from miles_async.config.fields import SETTINGS
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import UserError
from miles_async.rewards.builtin import exact, f1, gpqa
from miles_async.rewards.graders import Graders
from miles_async.rewards.instructions import ifeval
from miles_async.rewards.remote import RemoteReward
from miles_async.rewards.rewarder import Rewarder, RewardFunction
from miles_async.types import Sample

IN_PROCESS: dict[str, RewardFunction] = {"exact": exact, "f1": f1, "gpqa": gpqa, "ifeval": ifeval}
"""Rewards in linear time that evaluate nothing, which run in a thread of this process."""
IN_GRADER_PROCESSES = {
    "math": "miles_async.rewards.mathematics.math",
    "dapo": "miles_async.rewards.mathematics.dapo",
    "deepscaler": "miles_async.rewards.mathematics.deepscaler",
    "reasoning_gym": "miles_async.rewards.gym.ReasoningGymReward",
}
"""Rewards that parse or evaluate text of the model, which can hang: they run in confined processes."""


def open_rewarder(config: RunConfig, args: Any) -> Rewarder:
    """Return the rewarder for `rm_type` or `custom_rm_path`. `args` is the flat configuration that rewards receive.

    Raises UserError if `rm_type` is unknown or incomplete, or if the user's function cannot be imported.
    """
    rollout = config.rollout
    if config.data.environment is not None:
        # The environment computes the rewards, which this rewarder only checks.
        return Rewarder(exact, args, name=config.data.environment, timeout_seconds=None)
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
        case "remote_rm", _:
            return _remote(config, args, name=name, boxed=boxed)
        case "reasoning_gym", None:
            raise UserError("rm_type reasoning_gym needs reasoning_gym_task: set it to a task such as chain_sum")
        case slow, _ if slow in IN_GRADER_PROCESSES:
            return _evaluating(config, IN_GRADER_PROCESSES[slow], name=name, boxed=boxed)
        case _:
            raise UserError(
                f"rm_type {rollout.rm_type!r} is unknown: set one of {', '.join(BUILT_IN_REWARDS)}, or name your own "
                "function with custom_rm_path"
            )


def _custom(config: RunConfig, path: str, args: Any) -> Rewarder:
    rollout = config.rollout
    function = load_function(path, setting="custom_rm_path")
    if rollout.custom_rm_isolated:
        return _isolated(config, path)
    return Rewarder(
        function,
        args,
        name=path,
        timeout_seconds=rollout.reward_timeout_seconds,
        reward_key=rollout.reward_key,
        whole_groups=rollout.group_rm,
    )


def _evaluating(config: RunConfig, path: str, *, name: str, boxed: bool) -> Rewarder:
    """Return a rewarder for the built-in function at `path`, which evaluates text of the model in confined processes.

    The processes receive only the settings that they need, because settings can hold keys.
    """
    data, rollout = config.data, config.rollout
    graders = Graders(
        path=path,
        setting="rm_type",
        args={
            "reasoning_gym_task": data.reasoning_gym_task,
            "reasoning_gym_settings": data.reasoning_gym_settings,
        },
        processes=rollout.reward_processes,
        timeout_seconds=rollout.reward_timeout_seconds,
        memory_bytes=int(rollout.reward_memory_gb * 1e9),
    )

    async def grade(args: Any, samples: list[Sample]) -> list[Any]:
        return await graders.grade([_without_tokens(sample) for sample in samples])

    return _in_processes(graders, grade, name=name, reward_key=rollout.reward_key, boxed=boxed)


def _isolated(config: RunConfig, path: str) -> Rewarder:
    """Return a rewarder for the user's function at `path`, which runs in processes with the environment of this one."""
    rollout = config.rollout
    graders = Graders(
        path=path,
        setting="custom_rm_path",
        args={name: reduce(getattr, field.path, config) for name, field in SETTINGS.items()},
        processes=rollout.reward_processes,
        timeout_seconds=rollout.reward_timeout_seconds,
        whole_groups=rollout.group_rm,
    )

    async def grade(args: Any, samples: list[Sample]) -> list[Any]:
        return await graders.grade(samples)

    return _in_processes(graders, grade, name=path, reward_key=rollout.reward_key)


def _in_processes(
    graders: Graders, grade: RewardFunction, *, name: str, reward_key: str | None, boxed: bool = False
) -> Rewarder:
    # The graders enforce the deadline: a deadline here would count the time spent waiting for a free process.
    return Rewarder(
        grade,
        None,
        name=name,
        timeout_seconds=None,
        reward_key=reward_key,
        whole_groups=True,
        boxed=boxed,
        close=graders.close,
    )


def _without_tokens(sample: Sample) -> Sample:
    """Return a copy with text only: serialising tens of thousands of tokens for a text reward is wasted time."""
    return replace(sample, tokens=[], rollout_log_probs=[], sampling_mask=None, spans=[], loss_mask=None)


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
