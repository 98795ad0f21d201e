"""The state that the loops share beside the groups: weight versions, the time of the last progress, and the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from miles_async.pipeline.journal import Journal
from miles_async.pipeline.tasks import ChangeSignal
from miles_async.ports import Clock
from miles_async.scheduling.durations import GroupDurations
from miles_async.scheduling.lineage import Lineage
from miles_async.types import Group


class RunState:
    """Weight versions and progress of one run."""

    def __init__(self, clock: Clock, journal: Journal, adapters: Sequence[str] = ("",)) -> None:
        """`adapters` are the names of the adapters that the run trains, if there are several."""
        self.changed = ChangeSignal()
        """Notified at every transition and publish. No loop waits for anything else inside the run."""
        self.clock = clock
        self.journal = journal
        self.announced_version = 0
        """Newest weight version that was staged or is about to be. Stored before it is staged, so that no version is
        ever used for two different weights."""
        self.trainer_version = 0
        """Newest weight version that was staged, live or not."""
        self.changed_adapter: str | None = None
        """The adapter whose weights are newer than its newest staged version; see `LearnerProgress.changed`."""
        self.live_version = -1
        """Newest weight version on every routed engine; -1 before the first publish."""
        self.evaluation_requests = 0
        """Problems of evaluations that are at the engines."""
        self.lineages = {name: Lineage(versions=None if len(adapters) == 1 else ()) for name in adapters}
        """Which versions the current weights of each adapter descend from."""
        self.durations = GroupDurations()
        """How long the groups took that ended in this process."""
        self.publish_aborts = 0
        """Publishes that have aborted the requests at the engines (`pause_generation_mode` abort)."""
        self.publish_is_aborting = False
        """Whether a publish is aborting the requests at the engines now."""
        self.waits_for_groups = False
        """Whether the training loop waits for a batch, an evaluation or the last groups, and not for the learner or a
        publish."""
        self._last_progress = self._last_moved = clock.monotonic()
        """When the run made progress last: of any kind, and of another kind than tokens of the engines."""
        self._evaluation_seconds = 0.0
        """The limit of the evaluation that runs now; 0 while none runs."""

    def age_of(self, group: Group) -> int:
        """Staleness of the group now: the age of its oldest token in weight updates.

        Raises TrajectoryError if the group has no age, like `Group.versions`.
        """
        return self.lineages[self.adapter_of(group)].oldest_age(group.versions, self.trainer_version)

    def adapter_of(self, group: Group) -> str:
        """Return the adapter that a group trains; the name is empty unless the run trains several."""
        # Functions of users may put anything into the metadata.
        return group.adapter if group.adapter in self.lineages else next(iter(self.lineages))

    def announce(self, version: int, adapter: str) -> None:
        """Use a version number for an adapter, before it is staged."""
        self.announced_version = max(self.announced_version, version)
        self.lineages[adapter].announce(version)

    def owner_of(self, version: int) -> str | None:
        """Return the adapter to which a version belongs; None if it belongs to none."""
        return next((name for name, one in self.lineages.items() if version in one.newest(version)), None)

    def mark_progress(self) -> None:
        """Restart the clock that detects stalls: a group was collected, a problem of an evaluation has ended, a step
        ended or the learner has worked."""
        self._last_progress = self._last_moved = self.clock.monotonic()

    def mark_tokens(self, within: float) -> None:
        """Restart the clock because the engines generate, up to `within` seconds after progress of another kind.

        A request may take no longer. So a run whose requests are lost or repeated again and again ends.
        """
        if (now := self.clock.monotonic()) - self._last_moved < within:
            self._last_progress = now

    @contextmanager
    def evaluating(self, within: float) -> Iterator[None]:
        """Count the time inside the block as progress, up to `within` seconds after progress of another kind.

        Nothing shows whether functions of users in an evaluation advance. A run in which one never returns ends.
        """
        self._evaluation_seconds = within
        try:
            yield
        finally:
            self._evaluation_seconds = 0.0

    def exclude_pause(self, seconds: float) -> None:
        """Leave out of `idle_seconds` the last `seconds`, in which this process did not run."""
        now = self.clock.monotonic()
        self._last_progress = min(self._last_progress + seconds, now)
        self._last_moved = min(self._last_moved + seconds, now)

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation runs."""
        return self._evaluation_seconds > 0

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last progress."""
        now = self.clock.monotonic()
        return now - max(self._last_progress, min(now, self._last_moved + self._evaluation_seconds))
