"""Roles that skip generation: `rollout` skips a batch per training step, `async_rollout` a group per feed position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miles_async.adapters.storage.recording_store import RecordingDamagedError, RecordingStore, StoreFullError
from miles_async.config.schema import RunConfig, SkipRole
from miles_async.errors import UserError
from miles_async.recording import Recording, SkipAction, choose_step, differences, feed_step, is_first_attempt
from miles_async.skip.base import BaseSkip, CannotSkipError, register_skip
from miles_async.types import Group

NEEDED_TO_REPEAT = ("tokenizer", "n_samples_per_prompt")
"""The action `repeat` accepts recordings with other settings, except for these: groups would not fit."""


@register_skip("rollout")
class RolloutSkip(BaseSkip):
    """Skips the generation of a batch. The decorated function returns a `Recording`; the step is the rollout ID."""

    def __init__(self, local_config: SkipRole, global_config: RunConfig) -> None:
        super().__init__(local_config, global_config)
        groups = self.groups_per_step(global_config)
        self.store = RecordingStore(
            recordings_folder(global_config, self.dump_dir, groups), max_bytes=global_config.skip.max_bytes
        )
        self._warned_topics: set[str] = set()
        if self.is_enabled():
            self._create_folder()

    @staticmethod
    def groups_per_step(config: RunConfig) -> int:
        return config.rollout.rollout_batch_size

    def meet_precondition(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        return self._recorded_step(step) is not None

    def warp_function(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Recording:
        """Load the recording that replaces the step.

        Raises UserError if the recording was made under other settings and `skip.mismatch` is `refuse`.
        """
        # Loading a damaged recording sets it aside, so the next iteration chooses another one or ends the loop.
        while (recorded := self._recorded_step(step)) is not None:
            try:
                loaded = self.store.load(recorded)
                # The identity comes first: a recording of another model must not be set aside as damaged.
                self._check_identity(loaded.identity, f"the recording {self.store.path(recorded)}")
                samples = self.global_config.rollout.n_samples_per_prompt
                self.store.check_samples(recorded, loaded.recording, self.context.limits, samples)
            except RecordingDamagedError as error:
                self.context.warn(f"recording {error}; the step is generated again")
                continue
            return loaded.recording
        raise CannotSkipError

    def prepare_data(self, step: int, result: Recording, *args: Any, **kwargs: Any) -> None:
        if not result.groups:
            return
        try:
            self.store.save(step, result, self.context.identity)
        except (OSError, StoreFullError, TypeError) as error:
            self._warn_once(f"nothing more is recorded for skip.{self.role}: {error}; generation continues", "save")

    def records(self, group: Group) -> bool:
        """Return whether this group is recorded when it is generated."""
        step = self.extract_step(group)
        return self.is_enabled() and step is not None and step in self.steps

    def compare_prompt(self, recorded: str, current: str, feed_index: str) -> None:
        """Check that a group was recorded for the current prompt; both arguments are hashes.

        The action `repeat` accepts any prompt. Raises UserError or CannotSkipError, as `warp_function` does.
        """
        if self.action is SkipAction.CACHE:
            self._reject(differences({"prompt": recorded}, {"prompt": current}), f"the recording of {feed_index}")

    def warn_of_other_sizes(self) -> None:
        """Warn if recordings exist, but only for other batch sizes or length limits."""
        folder = self.store.folder
        others = sorted(other.name for other in folder.parent.glob("GBS*") if other != folder)
        if others and not self.store.steps:
            text = f"there are no recordings of {folder.name} in {folder.parent}, only of {', '.join(others)}"
            self._warn_once(f"{text}; every step is generated", "sizes")

    def _recorded_step(self, step: int) -> int | None:
        return choose_step(self.action, step, self.store.steps)

    def _check_identity(self, recorded: Mapping[str, Any], subject: str) -> None:
        different = differences(recorded, self.context.identity)
        if self.action is SkipAction.REPEAT:
            different = {name: text for name, text in different.items() if name in NEEDED_TO_REPEAT}
        self._reject(different, subject)

    def _reject(self, different: Mapping[str, str], subject: str) -> None:
        """Raise if there are differences: UserError with `skip.mismatch` refuse, CannotSkipError otherwise."""
        if not different:
            return
        sentence = f"{subject} was made under other settings: {'; '.join(different.values())}"
        if self.action is SkipAction.CACHE and self.global_config.skip.mismatch == "refuse":
            raise UserError(
                f"{sentence}. Restore these settings, set another --experiment-name or dump_dir, remove the recordings "
                "(make skip-rm), or set --skip-mismatch generate"
            )
        self._warn_once(f"{sentence}; such steps are generated", " ".join(different))
        raise CannotSkipError

    def _create_folder(self) -> None:
        """Raises UserError if the folder cannot be created, so that the run fails at the start."""
        folder = self.store.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"skip.{self.role}.dump_dir {self.dump_dir}: {folder} cannot be created: {error.strerror}; "
                "set dump_dir to a writable folder"
            ) from None

    def _warn_once(self, text: str, topic: str) -> None:
        if topic not in self._warned_topics:
            self._warned_topics.add(topic)
            self.context.warn(text)


@register_skip("async_rollout")
class AsyncRolloutSkip(RolloutSkip):
    """Skips the generation of one group; the step is the position of the group in the data feed."""

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


def recordings_folder(config: RunConfig, dump_dir: str, groups: int) -> Path:
    """Return `{dump_dir}/{experiment}_{project}/GBS{groups}_N{samples}_in{prompt}_out{response}`, as verl does."""
    rollout, names = config.rollout, config.observability
    prompt = "any" if rollout.rollout_max_prompt_len is None else rollout.rollout_max_prompt_len
    sizes = f"GBS{groups}_N{rollout.n_samples_per_prompt}_in{prompt}_out{rollout.rollout_max_response_len}"
    root = Path(dump_dir).expanduser()
    return root / f"{names.experiment_name}_{names.project_name}" / sizes
