"""Problems: the rows of a data file in a common form, and the problems that are held out of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from miles_async.adapters.datasets.permutation import Permutation
from miles_async.adapters.datasets.rows import Rows
from miles_async.config.schema import Data
from miles_async.errors import DataRowError, UserError
from miles_async.json_values import UnrepresentableError, json_value
from miles_async.types import Prompt

CHECKED_AT_START = 1000
"""How many rows are parsed before the run starts, so that a file with the wrong format fails early."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data."""

    question: str
    """Identifies the problem: two rows with the same question are the same problem."""
    prompt: Prompt
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    """Descriptions of the tools that the model may call, in the format of the chat template."""


class Problems(Protocol):
    """A sequence of problems with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Problem:
        """Raises DataRowError if the row is invalid."""
        ...


class FileProblems:
    """The rows of a data file as problems. A prompt is text or a list of chat messages."""

    def __init__(
        self,
        rows: Rows,
        data: Data,
        *,
        complaint: Callable[[Mapping[str, Any], Any], str | None] = lambda metadata, label: None,
        indices: bool = False,
    ) -> None:
        """Raises UserError if one of the first `CHECKED_AT_START` rows is invalid.

        A later invalid row raises DataRowError when it is read. `data` names the keys of a row, which may lack those of
        metadata and tools. `complaint` returns what is wrong with the metadata and the label of a row. With
        `indices`, a prompt may be a whole number, such as the index of a task. A function of the user gets it as text.
        """
        self._rows = rows
        self._data = data
        self._complaint = complaint
        self._indices = indices
        self.has_chats = False
        """Whether a prompt of the first `CHECKED_AT_START` rows is a list of messages."""
        for row in range(min(len(rows), CHECKED_AT_START)):
            try:
                self.has_chats |= not isinstance(self[row].prompt, str)
            except DataRowError as error:
                raise UserError(f"prompt_data {error}; correct or remove the row, or set other keys") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Problem:
        values, data = self._rows[row], self._data
        metadata, tools = values.get(data.metadata_key), values.get(data.tool_key)
        for key, value, kind in ((data.metadata_key, metadata, dict), (data.tool_key, tools, list)):
            if not isinstance(value, (kind, type(None))):
                raise self._invalid(row, f"{key!r} is a {type(value).__name__}, not a {kind.__name__}")
        metadata = metadata or {}
        if isinstance(source := values.get("data_source"), str):
            metadata = {"data_source": source, **metadata}
        keys = {"input_key": data.input_key} | ({} if data.label_key is None else {"label_key": data.label_key})
        found = {setting: _value(values, key) for setting, key in keys.items()}
        wrong = [f"no key {keys[setting]!r} ({setting})" for setting in keys if found[setting] is _MISSING]
        names_keys = bool(wrong) or data.label_key is None
        label = found.get("label_key")
        if label is not _MISSING and (complaint := self._complaint(metadata, label)) is not None:
            wrong.append(complaint)
        if wrong:
            has = f"; the row has {', '.join(map(repr, values))}" if names_keys else ""
            raise self._invalid(row, f"{' and '.join(wrong)}{has}")
        prompt = _with_messages(found["input_key"])
        if self._indices and type(prompt) is int:
            prompt = str(prompt)
        return Problem(self._question(prompt, row), prompt, label, metadata, tools)

    def hold_out(self, size: int) -> list[Problem]:
        """Return `size` problems with different questions; they do not depend on the seed of the run.

        Raises UserError if the file has at most `size` different questions, because none would be left for training.
        """
        held_out: dict[str, Problem] = {}
        for problem in self._valid_problems(Permutation(len(self), "held out")):
            if len(held_out) == size and problem.question not in held_out:
                return list(held_out.values())
            held_out.setdefault(problem.question, problem)
        raise UserError(
            f"prompt_data holds {len(held_out)} different prompts, too few to hold out {size} "
            f"and train on the rest: set eval_size below {len(held_out)}"
        )

    def _valid_problems(self, order: Permutation) -> Iterator[Problem]:
        for row in order:
            try:
                yield self[row]
            except DataRowError:
                # The source reports the row when it is fed.
                continue

    def _question(self, prompt: Any, row: int) -> str:
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list):
            kind = type(prompt).__name__
            raise self._invalid(row, f"{self._data.input_key!r} is a {kind}, not a string or a list of messages")
        if not prompt or not all(isinstance(message, dict) and "role" in message for message in prompt):
            raise self._invalid(row, f"{self._data.input_key!r} is not a list of messages, each with a role")
        try:
            return msgspec.json.encode(json_value(prompt)).decode()
        except UnrepresentableError as error:
            raise self._invalid(row, f"{self._data.input_key!r} {error}") from error

    def _invalid(self, row: int, complaint: str) -> DataRowError:
        return DataRowError(f"{self._rows.where(row)}: {complaint}")


_MISSING = object()


def _value(row: dict[str, Any], key: str) -> Any:
    """The value of a key, or `_MISSING`. `outer.inner` is a key of an object in the row, as in rows of verl."""
    found: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(found, dict) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _with_messages(prompt: Any) -> Any:
    """The messages of a text such as `[{"role": "user", "content": "1 + 1"}]`, in which data sets of ROLL have them.

    Anything else stays as it is.
    """
    if not isinstance(prompt, str) or not prompt.startswith("[{"):
        return prompt
    try:
        messages = msgspec.json.decode(prompt)
    except msgspec.DecodeError:
        return prompt
    return messages if all(isinstance(message, dict) and "role" in message for message in messages) else prompt


class BlankProblems:
    """Empty problems for `disable_rollout_global_dataset`: the rollout function fills the samples with its own data."""

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, row: int) -> Problem:
        return Problem("", "", None)
