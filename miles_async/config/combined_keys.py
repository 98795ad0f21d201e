"""Keys of another project that mean something only together: what their values must be, and what they set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.config.translation import Translator

_MOST = 10**18
"""Larger numbers are mistakes, and would not fit into a float."""


@dataclass
class CombinedKeys:
    """The keys of a file or a command line with the rule `Combined`, and the translator that gets what they mean.

    A value that is not valid is reported once, however often it is read.
    """

    translator: Translator
    values: Mapping[str, Any]
    """The value of each key, without references to other keys."""

    def given(self, *keys: str) -> Sequence[str]:
        """Those of the keys that have a value."""
        return [key for key in keys if key in self.values]

    def section(self, key: str) -> Mapping[str, Any]:
        """The keys below a key; none if the key is not given."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(f"{key} is a section, but its value is {value!r:.80}: put settings below it")
            return {}
        return value or {}

    def switch(self, key: str) -> bool | None:
        """The value of a key, which must be true or false; None if the key is not given.

        Other projects read YAML 1.1, in which `yes`, `on`, `no` and `off` are true and false, too.
        """
        value = self.values.get(key)
        if isinstance(value, str):
            value = {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(f"{key} {value!r:.80} is neither true nor false: set it to true or false")
        return None

    def whole_number(self, key: str) -> int | None:
        """The value of a key, which must be a whole number from 1 on; None if the key is not given."""
        value = self.values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        self.refuse(f"{key} {value!r:.80} is not a number of 1 or more: write a whole number")
        return None

    def number(self, key: str) -> float | None:
        """The value of a key, which must be a number from 0 on; None if the key is not given."""
        value = self.values.get(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST):
            return value
        self.refuse(f"{key} {value!r:.80} is not a number of 0 or more: write a number")
        return None

    def size(self, setting: str) -> int:
        """A size that other keys have set; 1 if none has, or if the value is invalid, which is reported later."""
        translated = self.translator.translation.get(setting)
        value = 1 if translated is None else translated.value
        return value if isinstance(value, int) and value > 0 else 1

    def set(self, setting: str, value: Any, *keys: str) -> None:
        """Set one of our settings, which follows from those of the keys that are given."""
        self.translator.set(setting, value, " ".join(self.given(*keys) or keys))

    def note(self, why: str, *keys: str) -> None:
        """Say why those of the keys that are given have no effect."""
        self.translator.idle.update(dict.fromkeys(self.given(*keys), why))

    def refuse(self, sentence: str) -> None:
        """Add a problem."""
        if sentence not in self.translator.problems:
            self.translator.problems.append(sentence)
