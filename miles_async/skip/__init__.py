"""Skip a stage on chosen steps and replay what it gave before (seed `skip-manager`; docs/skip.md).

@register_skip("reward")
class RewardSkip(BaseSkip): ...

@SkipManager.annotate(role="reward")
async def reward(args, sample): ...
"""

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
    "register_skip",
]
