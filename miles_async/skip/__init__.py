"""Skips a stage on chosen steps and replays its recorded result, modelled on the SkipManager of verl.

A role is the name of a stage that can be skipped. The class registered for the role decides when a call can be skipped,
what it returns then, and how results are recorded; the decorator connects the role to a function:

    @register_skip("reward")
    class RewardSkip(BaseSkip): ...

    @SkipManager.annotate(role="reward")
    async def reward(args, sample): ...

The settings of a role are `skip.<role>` in the configuration (`SkipManagerConfig`), such as `skip.reward.enable=True`.
See docs/how-to/replay.md.
"""

from miles_async.config.schema import Skip as SkipManagerConfig
from miles_async.recording import SkipAction
from miles_async.skip.base import BaseSkip, CannotSkipError, SkipContext, register_skip
from miles_async.skip.manager import SkipManager
from miles_async.skip.rollout_skip import AsyncRolloutSkip, RolloutSkip

__all__ = [
    "AsyncRolloutSkip",
    "BaseSkip",
    "CannotSkipError",
    "RolloutSkip",
    "SkipAction",
    "SkipContext",
    "SkipManager",
    "SkipManagerConfig",
    "register_skip",
]
