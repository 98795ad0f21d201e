"""verl's SkipManager: skips a stage on chosen steps and replays its recorded result.

A role is the name of a stage that can be skipped. The class registered for the role decides when a call can be skipped,
what it returns then, and how results are recorded; the decorator connects the role to a function:

    @register_skip("reward")
    class RewardSkip(BaseSkip): ...

    @SkipManager.annotate(role="reward")
    async def reward(args, sample): ...

The settings of a role are `skip.<role>` in the configuration (`SkipManagerConfig`), such as `skip.reward.enable=True`.
See docs/how-to/replay.md.
"""

from miles_async.compat.verl.skip import base
from miles_async.compat.verl.skip.base import BaseSkip, CannotSkipError, register_skip
from miles_async.compat.verl.skip.manager import SkipManager
from miles_async.compat.verl.skip.roles import AsyncRolloutSkip, RolloutSkip
from miles_async.config.schema import Skip as SkipManagerConfig
from miles_async.recording import SkipAction
from miles_async.rollout.recordings import RecordingContext as SkipContext

__all__ = [
    "AsyncRolloutSkip",
    "BaseSkip",
    "CannotSkipError",
    "RolloutSkip",
    "SkipAction",
    "SkipContext",
    "SkipManager",
    "SkipManagerConfig",
    "base",
    "register_skip",
]
