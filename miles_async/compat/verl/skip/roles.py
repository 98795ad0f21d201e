"""verl's roles that skip generation: `rollout` skips a batch per training step, `async_rollout` a group per position.

A run records and replays its own generation without these classes (`miles_async/rollout/recording_generator.py`). They
do the same for functions of users that have the annotation of a role and return a `Recording`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_async.compat.verl.skip.base import BaseSkip, CannotSkipError, register_skip
from miles_async.config.schema import RunConfig, SkipRole
from miles_async.recording import Recording, feed_step, is_first_attempt
from miles_async.rollout.recordings import RecordingContext, Recordings, groups_per_batch
from miles_async.types import Group


@register_skip("rollout")
class RolloutSkip(BaseSkip):
    """Skips the generation of a batch. The step is the rollout ID."""

    def __init__(self, local_config: SkipRole, global_config: RunConfig) -> None:
        super().__init__(local_config, global_config)
        self._settings = local_config
        self.recordings: Recordings

    @staticmethod
    def groups_per_step(config: RunConfig) -> int:
        return groups_per_batch(config)

    def attach(self, context: RecordingContext) -> None:
        super().attach(context)
        groups = self.groups_per_step(self.global_config)
        self.recordings = Recordings(self.role, self._settings, self.global_config, context, groups_per_step=groups)

    def meet_precondition(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        return self.recordings.has(step)

    def warp_function(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Recording:
        if (recording := self.recordings.load(step)) is None:
            raise CannotSkipError
        return recording

    def prepare_data(self, step: int, result: Recording, *args: Any, **kwargs: Any) -> None:
        self.recordings.save(step, result)


@register_skip("async_rollout")
class AsyncRolloutSkip(RolloutSkip):
    """Skips the generation of one group. The step is the position of the group in the data feed."""

    support_online_step = True

    @staticmethod
    def groups_per_step(config: RunConfig) -> int:
        return 1

    def extract_step(self, *args: Any, **kwargs: Any) -> int | None:
        """Return the feed position of the group among the arguments, or None for a later attempt.

        A later attempt is always generated: its prompt was recycled because the recorded tokens became too stale.
        """
        group = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Group))
        return feed_step(group.feed_index) if is_first_attempt(group) else None
