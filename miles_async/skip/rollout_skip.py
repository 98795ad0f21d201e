"""Skipping generation: the roles `rollout` (a batch by trainer step) and `async_rollout` (a group by feed order)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_async.adapters.storage.recording_store import RecordingDamagedError, RecordingStore, StoreFullError
from miles_async.config.schema import RunConfig, SkipRole
from miles_async.errors import UserError
from miles_async.recording import Recording, SkipAction, choose_step, differences, feed_step, is_first_attempt
from miles_async.skip.base import BaseSkip, CannotSkipError, SkipContext, register_skip
from miles_async.types import Group

NEEDED_TO_REPEAT = ("tokenizer", "n_samples_per_prompt")
"""`repeat` takes recordings made under other settings, as long as these are the same."""


@register_skip("rollout")
class RolloutSkip(BaseSkip):
    """The annotated function returns a `Recording`; the step is the trainer's."""

    def __init__(self, role: str, settings: SkipRole, context: SkipContext) -> None:
        super().__init__(role, settings, context)
        groups = self.groups_per_step(context.config)
        self.store = RecordingStore(
            recordings_folder(context.config, settings, groups), max_bytes=context.config.skip.max_bytes
        )
        self._warned: set[str] = set()
        if self.is_enabled:
            self._check_folder()

    @staticmethod
    def groups_per_step(config: RunConfig) -> int:
        return config.rollout.rollout_batch_size

    def meet_precondition(self, step: int, *args: Any, **kwargs: Any) -> bool:
        return self._source(step) is not None

    def warp_function(self, step: int, *args: Any, **kwargs: Any) -> Recording:
        """Raises UserError for a recording made under other settings, if `skip.mismatch` says so."""
        while (source := self._source(step)) is not None:
            try:
                loaded = self.store.load(source)
            except RecordingDamagedError as damage:
                self.context.warn(f"recording {damage}; the step is generated anew")
                continue
            self._compare(loaded.identity, f"the recording {self.store.path(source)}")
            return loaded.recording
        raise CannotSkipError

    def prepare_data(self, result: Recording, step: int, *args: Any, **kwargs: Any) -> None:
        if not result.groups:
            return
        try:
            self.store.save(step, result, self.context.identity)
        except (OSError, StoreFullError, TypeError) as error:
            self._warn_once(f"nothing more is recorded for skip.{self.role}: {error}; generation goes on", "save")

    def records(self, group: Group) -> bool:
        """Whether what is generated for a group of the stream is kept."""
        step = self.extract_step(group)
        return self.is_enabled and step is not None and self.is_eligible(step)

    def compare_prompt(self, recorded: str, current: str, feed_index: str) -> None:
        """Raises as `warp_function` does when a group was recorded for another prompt. `repeat` takes any."""
        if self.action is SkipAction.CACHE:
            self._refuse(differences({"prompt": recorded}, {"prompt": current}), f"the recording of {feed_index}")

    def note_other_sizes(self) -> None:
        """Warn where a user who looks for recordings will find them under other sizes only."""
        folder = self.store.folder
        others = sorted(other.name for other in folder.parent.glob("GBS*") if other != folder)
        if others and not self.store.steps:
            text = f"there are no recordings of {folder.name} in {folder.parent}, only of {', '.join(others)}"
            self._warn_once(f"{text}; every step is generated", "sizes")

    def _source(self, step: int) -> int | None:
        return choose_step(self.action, step, self.store.steps)

    def _compare(self, recorded: Mapping[str, Any], what: str) -> None:
        found = differences(recorded, self.context.identity)
        if self.action is SkipAction.REPEAT:
            found = {name: text for name, text in found.items() if name in NEEDED_TO_REPEAT}
        self._refuse(found, what)

    def _refuse(self, found: Mapping[str, str], what: str) -> None:
        if not found:
            return
        sentence = f"{what} was made under other settings: {'; '.join(found.values())}"
        if self.action is SkipAction.CACHE and self.context.config.skip.mismatch == "refuse":
            raise UserError(
                f"{sentence}. Set them as they were, name another --experiment-name or dump_dir, remove the recordings "
                "(make skip-rm), or set --skip-mismatch generate"
            )
        self._warn_once(f"{sentence}; such steps are generated", " ".join(found))
        raise CannotSkipError

    def _check_folder(self) -> None:
        """Raises UserError where nothing can ever be recorded."""
        folder = self.store.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"skip.{self.role}.dump_dir {self.settings.dump_dir}: {folder} cannot be created: {error.strerror}; "
                "name a folder that can be written"
            ) from None

    def _warn_once(self, text: str, topic: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self.context.warn(text)


@register_skip("async_rollout")
class AsyncRolloutSkip(RolloutSkip):
    """One group per step; the step is the group's place in the feed, told by each call."""

    support_online_step = True

    @staticmethod
    def groups_per_step(config: RunConfig) -> int:
        return 1

    def extract_step(self, *args: Any, **kwargs: Any) -> int | None:
        """Of the one group among the arguments. Attempts after the first always go live."""
        group = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Group))
        return feed_step(group.feed_index) if is_first_attempt(group) else None


def recordings_folder(config: RunConfig, settings: SkipRole, groups: int) -> Path:
    """`{dump_dir}/{experiment}_{project}/GBS{gbs}_N{n}_in{prompt}_out{response}`, as the seed lays it out."""
    rollout, names = config.rollout, config.observability
    prompt = "any" if rollout.rollout_max_prompt_len is None else rollout.rollout_max_prompt_len
    sizes = f"GBS{groups}_N{rollout.n_samples_per_prompt}_in{prompt}_out{rollout.rollout_max_response_len}"
    root = Path(settings.dump_dir).expanduser()
    return root / f"{names.experiment_name}_{names.project_name}" / sizes
