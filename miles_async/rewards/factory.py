"""The rewarder that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

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

QUICK: dict[str, RewardFunction] = {"exact": exact, "f1": f1, "gpqa": gpqa, "ifeval": ifeval}
MATHEMATICS = "math", "dapo", "deepscaler"
"""They may hang on an unlucky answer, so they run in grader processes."""


def open_rewarder(config: RunConfig, args: Any) -> Rewarder:
    """The reward that the configuration names; `args` is the flat view handed to it.

    Raises UserError when there is none, or the user's function cannot be imported.
    """
    rollout = config.rollout
    if not generates(config):
        # Saved batches bring their rewards and lessons need none, so nobody asks this one.
        return Rewarder(exact, args, name="none", timeout_seconds=None)
    if rollout.custom_rm_path is not None:
        return _custom(config, rollout.custom_rm_path, args)
    name = str(rollout.rm_type)
    kind, boxed = name.removeprefix("boxed_"), name.startswith("boxed_")
    timeout = rollout.reward_timeout_seconds
    match kind, config.data.reasoning_gym_task:
        case quick, _ if quick in QUICK:
            return Rewarder(QUICK[quick], args, name=name, timeout_seconds=timeout, boxed=boxed)
        case slow, _ if slow in MATHEMATICS:
            path = f"miles_async.rewards.mathematics.{slow}"
            return _graded(config, path, "rm_type", only_words, name=name, boxed=boxed)
        case "remote_rm", _:
            return _remote(config, args, name=name, boxed=boxed)
        case "reasoning_gym", None:
            raise UserError("rm_type reasoning_gym needs reasoning_gym_task")
        case "reasoning_gym", str(task):
            reward = ReasoningGymReward(task, config.data.reasoning_gym_settings)
            return Rewarder(reward, args, name=name, timeout_seconds=timeout, boxed=boxed)
        case _:
            raise UserError(
                f"rm_type {rollout.rm_type!r} is unknown: set reasoning_gym or exact, or your own by custom_rm_path"
            )


def _custom(config: RunConfig, path: str, args: Any) -> Rewarder:
    rollout = config.rollout
    function = load_function(path, setting="custom_rm_path")
    if rollout.custom_rm_isolated:
        return _graded(config, path, "custom_rm_path", lambda whole: whole, name=path, whole_groups=rollout.group_rm)
    return Rewarder(
        function,
        args,
        name=path,
        timeout_seconds=rollout.reward_timeout_seconds,
        reward_key=rollout.reward_key,
        whole_groups=rollout.group_rm,
    )


def only_words(sample: Sample) -> Sample:
    """What a text is graded by: tens of thousands of tokens and log-probabilities need not travel."""
    return replace(sample, tokens=[], rollout_log_probs=[], spans=[], loss_mask=None)


def _graded(
    config: RunConfig, path: str, setting: str, shown: Callable[[Any], Any], *, name: str, **how: bool
) -> Rewarder:
    """In processes, which see what `shown` makes of a sample.

    The deadline is each call's own: groups that wait for a process have not begun.
    """
    graders = Graders(
        path=path,
        setting=setting,
        args={name: reduce(getattr, field.path, config) for name, field in SETTINGS.items()},
        processes=config.rollout.reward_processes,
        timeout_seconds=config.rollout.reward_timeout_seconds,
    )

    async def grade(args: Any, given: Any) -> Any:
        return await graders.grade(shown(given))

    return Rewarder(
        grade, None, name=name, timeout_seconds=None, reward_key=config.rollout.reward_key, close=graders.close, **how
    )


def _remote(config: RunConfig, args: Any, *, name: str, boxed: bool) -> Rewarder:
    rollout = config.rollout
    if rollout.rm_url is None:
        raise UserError("rm_type remote_rm asks a server for rewards: set rm_url to its address")
    reward = RemoteReward(
        rollout.rm_url,
        concurrency=rollout.remote_rm_concurrency,
        retries=rollout.remote_rm_retries,
        timeout_seconds=rollout.reward_timeout_seconds,
    )
    # A group may wait for its turn and for retries; every request has its own deadline.
    return Rewarder(
        reward,
        args,
        name=name,
        timeout_seconds=None,
        reward_key=rollout.reward_key,
        boxed=boxed,
        close=reward.close,
    )
