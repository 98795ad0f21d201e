"""What the source feeds from: rows made into problems, and what is held out of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from miles_async.adapters.datasets.permutation import Permutation
from miles_async.adapters.datasets.rows import Rows
from miles_async.errors import DataRowError, UserError

Prompt = str | list[dict[str, Any]]
CHECKED_AT_START = 1000
"""Rows that are parsed before anything starts, so that a file of the wrong shape is known then."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data."""

    question: str
    """What tells problems apart: two rows with one question are the same problem."""
    prompt: Prompt
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    """Descriptions of the tools that the model may call, as the chat template wants them."""


class Problems(Protocol):
    """Problems that can be read in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Problem:
        """Raises DataRowError for one that cannot be used."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where a row has what. `label` None: rows have no answers. Metadata and tools may be absent from a row."""

    prompt: str
    label: str | None
    metadata: str
    tools: str


class FileProblems:
    """`rows` as problems; `chats` says that prompts which are lists of messages are understood."""

    def __init__(self, rows: Rows, keys: Keys, *, chats: bool) -> None:
        """Raises UserError for a broken row among the first; a later one is DataRowError when it is met."""
        self._rows = rows
        self._keys = keys
        self._chats = chats
        for row in range(min(len(rows), CHECKED_AT_START)):
            try:
                self[row]
            except DataRowError as error:
                raise UserError(str(error)) from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Problem:
        values, keys = self._rows[row], self._keys
        prompt = self._required(values, keys.prompt, "input_key", row)
        label = None if keys.label is None else self._required(values, keys.label, "label_key", row)
        metadata, tools = values.get(keys.metadata), values.get(keys.tools)
        for key, value, kind in ((keys.metadata, metadata, dict), (keys.tools, tools, list)):
            if not isinstance(value, (kind, type(None))):
                raise self._bad(row, f"{key!r} is a {type(value).__name__}, not a {kind.__name__}")
        return Problem(self._question(prompt, row), prompt, label, metadata or {}, tools)

    def hold_out(self, size: int) -> list[Problem]:
        """`size` problems with different questions, the same whatever the seed of the run.

        Raises UserError when the file has no more different questions than that, so that none would be left to train.
        """
        held_out: dict[str, Problem] = {}
        for problem in self._sound(Permutation(len(self), "held out")):
            if len(held_out) == size and problem.question not in held_out:
                return list(held_out.values())
            held_out.setdefault(problem.question, problem)
        raise UserError(
            f"prompt_data holds {len(held_out)} different prompts, too few to hold out {size} "
            f"and train on the rest: set eval_size below {len(held_out)}"
        )

    def _sound(self, order: Permutation) -> Iterator[Problem]:
        for row in order:
            try:
                yield self[row]
            except DataRowError:
                # It is counted when the feed meets it.
                continue

    def _required(self, values: dict[str, Any], key: str, setting: str, row: int) -> Any:
        if key not in values:
            raise self._bad(row, f"no key {key!r} ({setting}); the line has {', '.join(map(repr, values))}")
        return values[key]

    def _question(self, prompt: Any, row: int) -> str:
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list):
            kind = type(prompt).__name__
            raise self._bad(row, f"{self._keys.prompt!r} is a {kind}, not a text or a list of messages")
        if not self._chats:
            raise self._bad(row, f"{self._keys.prompt!r} is a list of messages: set apply_chat_template")
        return msgspec.json.encode(prompt).decode()

    def _bad(self, row: int, complaint: str) -> DataRowError:
        return DataRowError(f"{self._rows.where(row)}: {complaint}")


class BlankProblems:
    """No data at all (`disable_rollout_global_dataset`): a rollout function that brings its own fills the samples."""

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, row: int) -> Problem:
        return Problem("", "", None)
