"""Decides what follows after an attempt that cannot be trained: the prompt is fed again or becomes a dead letter."""

from __future__ import annotations

from miles_async.errors import UserError
from miles_async.events import WarningRaised
from miles_async.pipeline.run_state import RunState
from miles_async.ports import DataSource, DeadLetters
from miles_async.scheduling.quarantine import ALONE_LOSSES, CULPRIT_LOSSES
from miles_async.types import DropReason, Group, SampleStatus


class Recycler:
    """Feeds prompts again after failed attempts. Attempts are limited, so that no prompt is recycled forever."""

    def __init__(
        self,
        run_state: RunState,
        data: DataSource,
        dead_letters: DeadLetters,
        max_attempts: int,
        *,
        first_attempts: int,
    ) -> None:
        """The run ends if `first_attempts` attempts fail before one succeeds: the fault is then not in the prompts."""
        self._run_state = run_state
        self._data = data
        self._dead_letters = dead_letters
        self._max_attempts = max_attempts
        self._first_attempts = first_attempts
        self._failures = 0
        """Failed attempts before the first success."""
        self._faults = 0
        """Those of them whose cause was not infrastructure."""
        self._succeeded = False
        self.recycled = 0
        """Number of groups recycled as stale since the run began."""

    def fail(self, group: Group, error: str, *, keeps_finished: bool = False, may_pass: bool = False) -> None:
        """End an attempt whose generation, reward or filter failed, as `retry` does.

        `may_pass` means that the cause is infrastructure, which may recover. Raises UserError if `first_attempts`
        attempts have failed for other causes, and no sample has succeeded.
        """
        self._succeeded |= self._run_state.ledger.has_finished or (keeps_finished and group.finished_tokens > 0)
        self.retry(group, DropReason.FAILED, error, keeps_finished=keeps_finished)
        if self._succeeded:
            return
        if not self._failures:
            then = "" if may_pass else f"; the run ends if the first {self._first_attempts} attempts fail"
            text = f"every sample of the first group failed: {error}{then}"
            self._run_state.journal.emit(WarningRaised(time=self._run_state.clock.time(), text=text))
        self._failures += 1
        self._faults += not may_pass
        if self._faults >= self._first_attempts:
            raise UserError(
                f"all of the first {self._failures} attempts to generate a group failed; correct the function or the "
                f"setting that the last error names: {error}"
            )

    def retry(self, group: Group, reason: DropReason, error: str, *, keeps_finished: bool = False) -> None:
        """End the attempt and count it. The prompt is fed again, or dead-lettered after its last attempt.

        With `keeps_finished`, the next attempt generates only the samples that are not finished.
        """
        self.recycled += reason is DropReason.STALE
        if group.attempt + 1 >= self._max_attempts:
            self.dead_letter(group, reason, error)
            return
        self._end(group, reason, keeps_finished)
        group.attempt += 1
        self._return(group)

    def requeue(self, group: Group, reason: DropReason, *, keeps_finished: bool = False) -> None:
        """End the attempt without counting it, because the prompt did not cause the end. The prompt is fed again.

        `keeps_finished` is as in `retry`.
        """
        self._end(group, reason, keeps_finished)
        self._return(group)

    def salvage(self, group: Group, reason: DropReason) -> None:
        """End the attempt but keep its tokens, which the next attempt continues; their weight versions stay."""
        self._run_state.drop(group, reason, kept_tokens=group.response_tokens)
        group.put_back()
        for sample in group:
            if sample.status is SampleStatus.FAILED:
                sample.reset()
        group.sequence = None
        self._return(group)

    def handle_engine_loss(self, group: Group, error: str) -> None:
        """Requeue a group whose engine was lost, or dead-letter a prompt that is proven to crash engines."""
        losses = self._run_state.quarantine.count_loss(group)
        if losses < CULPRIT_LOSSES:
            self.requeue(group, DropReason.ENGINE_LOST, keeps_finished=True)
            return
        alone = CULPRIT_LOSSES - ALONE_LOSSES
        sentence = f"its engine was lost {losses} times, {alone} of them while nothing else was generated: {error}"
        self.dead_letter(group, DropReason.ENGINE_LOST, sentence)

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        """End the attempt and dead-letter the prompt, because every further attempt would fail the same way."""
        self._run_state.drop(group, reason)
        self._dead_letters.dead_letter(group, reason, error)

    def _end(self, group: Group, reason: DropReason, keeps_finished: bool) -> None:
        self._run_state.drop(group, reason, kept_tokens=group.finished_tokens if keeps_finished else 0)
        group.reset(keeps_finished=keeps_finished)

    def _return(self, group: Group) -> None:
        """Put the prompt first in line; a prompt that may crash engines waits for its trial instead."""
        self._run_state.owe(group)
        if self._run_state.quarantine.suspects(group):
            self._run_state.quarantine.hold(group)
        else:
            self._data.add_samples([group])
