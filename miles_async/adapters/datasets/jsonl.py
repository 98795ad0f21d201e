"""Problems from a JSONL file, read row by row from disk: memory holds 16 bytes per row."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import msgspec

from miles_async.adapters.datasets.source import Problem
from miles_async.errors import UserError


class JsonlProblems:
    """Every line is checked once at the start, so that a broken one is known then and not after hours of training.

    A row's `metadata` object, where it has one, becomes the sample's metadata. Blank lines are skipped.
    """

    def __init__(self, path: str, *, input_key: str, label_key: str, chat: bool) -> None:
        """`chat` says that prompts which are lists of messages can be rendered.

        Raises UserError when the file cannot be read, and for a line that is no JSON object or lacks a key.
        """
        self._path = Path(path).expanduser()
        self._input_key = input_key
        self._label_key = label_key
        self._chat = chat
        self._offsets = array("Q")
        self._lines = array("Q")
        try:
            self._index()
        except OSError as error:
            raise UserError(f"prompt_data {path} cannot be read: {error.strerror}") from error
        if not self._offsets:
            raise UserError(f"prompt_data {path} holds no rows")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Problem:
        with self._path.open("rb") as file:
            file.seek(self._offsets[row])
            return self._parse(file.readline(), self._lines[row])

    def hold_out(self, size: int) -> list[Problem]:
        """`size` problems with different questions, the same whatever the seed of the run.

        Raises UserError when the file has no more different questions than that, so that none would be left to train.
        """
        rows = list(range(len(self)))
        random.Random("held out").shuffle(rows)
        held_out: dict[str, Problem] = {}
        for row in rows:
            problem = self[row]
            if len(held_out) == size and problem.question not in held_out:
                return list(held_out.values())
            held_out.setdefault(problem.question, problem)
        raise UserError(
            f"prompt_data {self._path} holds {len(held_out)} different prompts, too few to hold out {size} "
            f"and train on the rest: set eval_size below {len(held_out)}"
        )

    def _index(self) -> None:
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    self._parse(line, number)
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    def _parse(self, line: bytes, number: int) -> Problem:
        where = f"{self._path}, line {number}"
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a {type(row).__name__} where a JSON object is expected")
        for key, setting in ((self._input_key, "input_key"), (self._label_key, "label_key")):
            if key not in row:
                raise UserError(f"{where}: no key {key!r} ({setting}); the line has {', '.join(map(repr, row))}")
        prompt = row[self._input_key]
        return Problem(self._question(prompt, where), prompt, row[self._label_key], row.get("metadata", {}))

    def _question(self, prompt: Any, where: str) -> str:
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list):
            kind = type(prompt).__name__
            raise UserError(f"{where}: {self._input_key!r} is a {kind}, not a text or a list of messages")
        if not self._chat:
            raise UserError(f"{where}: {self._input_key!r} is a list of messages: set apply_chat_template")
        return msgspec.json.encode(prompt).decode()
