"""Skips a stage on chosen steps and replays its recorded result; the names are those of verl's SkipManager."""

from miles_async.compat.verl.skip import (
    AsyncRolloutSkip,
    BaseSkip,
    CannotSkipError,
    RolloutSkip,
    SkipAction,
    SkipContext,
    SkipManager,
    SkipManagerConfig,
    base,
    register_skip,
)

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
