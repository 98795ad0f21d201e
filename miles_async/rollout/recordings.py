"""The recordings of a run: which steps are replayed, which recordings match the run, and where they are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import structlog

from miles_async.adapters.storage.checksum import checksum
from miles_async.adapters.storage.recording_store import RecordingDamagedError, RecordingStore, StoreFullError
from miles_async.columns.column import NO_LIMITS, SampleLimits
from miles_async.config.fields import SETTINGS, values_of
from miles_async.config.redaction import redacted
from miles_async.config.schema import RunConfig, SkipRole
from miles_async.errors import UserError
from miles_async.guests import GUESTS
from miles_async.json_values import json_value
from miles_async.models.lora import CONFIG, TENSORS
from miles_async.recording import Recording, SkipAction, Steps, choose_step, differences
from miles_async.types import Group

NEEDED_TO_REPEAT = ("tokenizer", "n_samples_per_prompt")
"""The action `repeat` accepts recordings with other settings, except for these: groups would not fit."""
_RECORDED_IF_CHANGED = (
    "apply_chat_template_kwargs",
    "environment",
    "environment_settings",
    "reasoning_parser",
    "rollout_sample_hook_path",
    "tool_call_parser",
    "tool_max_turns",
    "tool_search_corpus",
)
"""Settings that are part of the identity only if they differ from the default: older recordings have none of them."""
_OF_DATASETS = {"apply_chat_template_kwargs", "max_prompt_len", "max_response_len"}
"""What a data set may set of this kind."""
_MODEL = "config.json", "generation_config.json", "*.safetensors"
_TOKENIZER = "tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "added_tokens.json"
_CHAT_TEMPLATE = "chat_template*", "tokenizer_config.json", "special_tokens_map.json"
"""The files of a checkpoint on which responses depend. Those that it lacks do not count."""
_FINGERPRINT_BYTES = 1 << 20
"""Bytes read from each end of a weight file: reading all of a large checkpoint would take minutes."""


def _warn(text: str) -> None:
    structlog.get_logger("miles_async.skip").warning(text)


@dataclass(frozen=True, kw_only=True)
class RecordingContext:
    """What all recordings of one run share."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    """The conditions that a recording depends on. A recording with other conditions is not replayed."""
    limits: SampleLimits = NO_LIMITS
    """The limits that recorded samples must keep."""
    warn: Callable[[str], None] = _warn
    offload: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread
    """Runs blocking work outside the event loop."""


class Recordings:
    """The recordings of one role: of whole batches (`skip.rollout`), or of single groups (`skip.async_rollout`).

    `load` and `save` block, because they read and write files.
    """

    def __init__(
        self, role: str, settings: SkipRole, config: RunConfig, context: RecordingContext, *, groups_per_step: int
    ) -> None:
        """Raises UserError if the role is enabled and its folder cannot be created."""
        self.role = role
        self.context = context
        self.steps = Steps.parse(settings.steps)
        self.action = SkipAction(settings.action)
        folder = recordings_folder(config, settings.dump_dir, groups_per_step)
        self.store = RecordingStore(folder, max_bytes=config.skip.max_bytes)
        self._config = config
        self._warned_topics: set[str] = set()
        if settings.enable:
            _create_folder(folder, f"skip.{role}.dump_dir {settings.dump_dir}")

    def has(self, step: int) -> bool:
        """Whether a recording can replace the step."""
        return self._recorded_step(step) is not None

    def load(self, step: int) -> Recording | None:
        """Load the recording that replaces the step; None if the step has to be generated.

        Raises UserError if the recording was made under other settings and `skip.mismatch` is `refuse`.
        """
        # Loading a damaged recording sets it aside, so the next iteration chooses another one or ends the loop.
        while (recorded := self._recorded_step(step)) is not None:
            try:
                loaded = self.store.load(recorded)
                # The identity comes first: a recording of another model must not be set aside as damaged.
                if not self._matches_identity(loaded.identity, f"the recording {self.store.path(recorded)}"):
                    return None
                samples = self._config.rollout.n_samples_per_prompt
                self.store.check_samples(recorded, loaded.recording, self.context.limits, samples)
            except RecordingDamagedError as error:
                self.context.warn(f"recording {error}; the step is generated again")
                continue
            return loaded.recording
        return None

    def save(self, step: int, recording: Recording) -> None:
        """Store what a step has generated. If that fails, the run continues with one warning."""
        if not recording.groups:
            return
        try:
            self.store.save(step, recording, self.context.identity)
        except (OSError, StoreFullError, TypeError) as error:
            self._warn_once(f"nothing more is recorded for skip.{self.role}: {error}; generation continues", "save")

    def matches_prompt(self, recorded: str, current: str, feed_index: str) -> bool:
        """Whether a group was recorded for the current prompt; both prompts are hashes.

        The action `repeat` accepts any prompt. Raises UserError as `load` does.
        """
        if self.action is not SkipAction.CACHE:
            return True
        return self._accepts(differences({"prompt": recorded}, {"prompt": current}), f"the recording of {feed_index}")

    def warn_of_other_sizes(self) -> None:
        """Warn if recordings exist, but only for other batch sizes or length limits."""
        folder = self.store.folder
        others = sorted(other.name for other in folder.parent.glob("GBS*") if other != folder)
        if others and not self.store.steps:
            text = f"there are no recordings of {folder.name} in {folder.parent}, only of {', '.join(others)}"
            self._warn_once(f"{text}; every step is generated", "sizes")

    def _recorded_step(self, step: int) -> int | None:
        return choose_step(self.action, step, self.store.steps)

    def _matches_identity(self, recorded: Mapping[str, Any], subject: str) -> bool:
        different = differences(recorded, self.context.identity)
        if self.action is SkipAction.REPEAT:
            different = {name: text for name, text in different.items() if name in NEEDED_TO_REPEAT}
        return self._accepts(different, subject)

    def _accepts(self, different: Mapping[str, str], subject: str) -> bool:
        """Whether a recording can be replayed. Raises UserError if it differs and `skip.mismatch` is `refuse`."""
        if not different:
            return True
        sentence = f"{subject} was made under other settings: {'; '.join(different.values())}"
        if self.action is SkipAction.CACHE and self._config.skip.mismatch == "refuse":
            raise UserError(
                f"{sentence}. Restore these settings, set another --experiment-name or dump_dir, remove the recordings "
                "(make skip-rm), or set --skip-mismatch generate"
            )
        self._warn_once(f"{sentence}; such steps are generated", " ".join(different))
        return False

    def _warn_once(self, text: str, topic: str) -> None:
        if topic not in self._warned_topics:
            self._warned_topics.add(topic)
            self.context.warn(text)


def recordings_of(config: RunConfig, context: RecordingContext, *, stream: bool) -> Recordings:
    """The recordings of single groups in a stream, whose step is the position of the group in the data
    (`recording.feed_step`); else those of whole batches, whose step is the rollout ID."""
    if stream:
        return Recordings("async_rollout", config.skip.async_rollout, config, context, groups_per_step=1)
    size = groups_per_batch(config)
    return Recordings("rollout", config.skip.rollout, config, context, groups_per_step=size)


def groups_per_batch(config: RunConfig) -> int:
    """The groups that are generated for a batch, by which verl names the folder of a recording."""
    return config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size


def check_recordings(config: RunConfig) -> None:
    """Raises UserError if recordings are enabled and their folder cannot be created."""
    for stream in (False, True):
        recordings_of(config, RecordingContext(), stream=stream)


def recordings_folder(config: RunConfig, dump_dir: str, groups: int) -> Path:
    """Return `{dump_dir}/{experiment}_{project}/GBS{groups}_N{samples}_in{prompt}_out{response}`."""
    rollout, names = config.rollout, config.observability
    prompt = "any" if rollout.rollout_max_prompt_len is None else rollout.rollout_max_prompt_len
    sizes = f"GBS{groups}_N{rollout.n_samples_per_prompt}_in{prompt}_out{rollout.rollout_max_response_len}"
    root = Path(dump_dir).expanduser()
    return root / f"{names.experiment_name}_{names.project_name}" / sizes


def _create_folder(folder: Path, setting: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{setting}: {folder} cannot be created: {error.strerror}; set dump_dir to a writable folder"
        ) from None


def identity_of(config: RunConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Return the conditions that a recording depends on: model, tokenizer, chat template, sampling settings and seed.

    With `checkpoint`, the folder of the checkpoint, the first three are identified by their contents; without it, by
    the setting `hf_checkpoint`. Secrets are left out, because recordings are files.
    """
    rollout = config.rollout
    folder = None if checkpoint is None else Path(checkpoint)
    of_guests = chain.from_iterable(guest.recorded for guest in GUESTS.usable().values())
    names = [*_RECORDED_IF_CHANGED, *of_guests]
    if rollout.custom_generate_function_path is not None or rollout.rollout_sample_hook_path:
        names.append("custom_args")  # otherwise only functions read them that a replay calls again
    changed = values_of(config, names).items()
    further = {name: redacted(json_value(value)) for name, value in changed if value != SETTINGS[name].default}
    of_datasets = {
        name: dataset.model_dump(include=_OF_DATASETS, exclude_none=True)
        for name, dataset in config.data.datasets.items()
    }
    if any(of_datasets.values()):
        further["datasets"] = of_datasets
    if (adapter := config.learner.lora_load) is not None:
        further["lora_load"] = adapter if folder is None else _fingerprint(Path(adapter).expanduser(), CONFIG, TENSORS)
    return {
        "model": str(config.model.hf_checkpoint) if folder is None else _fingerprint(folder, *_MODEL),
        "tokenizer": None if folder is None else _fingerprint(folder, *_TOKENIZER),
        "chat_template": None if folder is None else _fingerprint(folder, *_CHAT_TEMPLATE),
        "n_samples_per_prompt": rollout.n_samples_per_prompt,
        "rollout_max_prompt_len": rollout.rollout_max_prompt_len,
        "rollout_max_response_len": rollout.rollout_max_response_len,
        "rollout_temperature": rollout.rollout_temperature,
        "rollout_top_p": rollout.rollout_top_p,
        "rollout_top_k": rollout.rollout_top_k,
        "rollout_stop": list(rollout.rollout_stop),
        "rollout_stop_token_ids": list(rollout.rollout_stop_token_ids),
        "rollout_skip_special_tokens": rollout.rollout_skip_special_tokens,
        "custom_generate_function_path": rollout.custom_generate_function_path,
        "rollout_seed": config.data.rollout_seed,
        **further,
    }


def prompt_hash(group: Group) -> str:
    """Return the checksum of the prompt of a group, and of the tools that the chat template shows with its messages."""
    prompt, tools = group[0].prompt, group[0].metadata.get("tools")
    parts = [prompt, tools] if tools and not isinstance(prompt, str) else [prompt]
    return checksum(map(orjson.dumps, parts))


def _fingerprint(folder: Path, *patterns: str) -> str:
    files = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return checksum(chunk for path in files for chunk in _excerpts(path))


def _excerpts(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{path.name} {size}".encode()
    with path.open("rb") as file:
        yield file.read(_FINGERPRINT_BYTES)
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        yield file.read()
