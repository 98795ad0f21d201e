"""Removes secrets from what a run writes for people: configuration, report, logs and error messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from miles_async.config.schema import RunConfig
from miles_async.config.schema.section import Section

REDACTED = "<redacted>"
MIN_SECRET_LENGTH = 8

_SECRET_SETTINGS = frozenset({"sglang_router_api_key"})
_SECRET_SOURCES = ("env:", "file:")
"""A secret setting that begins with one of these names the place of the secret instead of the secret."""
_SECRET_WORDS = frozenset("key apikey token secret password passwd passphrase credential credentials auth".split())
_USER_INFO = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=[^&\s'\"#]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")


def redacted_values(config: RunConfig) -> dict[str, Any]:
    """The settings of a run by section, as JSON types, without secrets.

    A secret is the value of an entry of a free-form dict (environment variables, SGLang arguments) whose name contains
    a word such as key, token or password, the key of an external router, and any credentials in a URL.
    """
    return _redact_section(config)


def redact_text(text: str, secrets: Collection[str] = ()) -> str:
    """The text without user names and passwords in URLs, secret query parameters, and Authorization headers.

    `secrets` are further strings to remove.
    """
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _USER_INFO.sub(REDACTED, text)
    text = _QUERY.sub(lambda match: f"{match[1]}={REDACTED}" if is_secret(match[1]) else match[0], text)
    return _BEARER.sub(lambda match: f"{match[1]} {REDACTED}", text)


def is_secret(name: str) -> bool:
    """Whether the name of a variable or an argument says that its value is a secret.

    Whole words are compared: HF_TOKEN and api-key are secrets, max_total_tokens and tokenizer_path are not.
    """
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name.lower()))


def secret_values(variables: Mapping[str, str], command: Sequence[str] = ()) -> set[str]:
    """The secrets among environment variables and the arguments of a command (`--api-key VALUE`).

    Values of fewer than `MIN_SECRET_LENGTH` characters are left out, because words such as `true` are no secrets.
    """
    arguments = {flag.removeprefix("--"): value for flag, value in pairwise(command) if flag.startswith("--")}
    named = (*variables.items(), *arguments.items())
    return {value for name, value in named if is_secret(name) and len(value) >= MIN_SECRET_LENGTH}


def contains_redacted(value: Any) -> bool:
    """Whether a value was read from a file that leaves out its secrets."""
    if isinstance(value, dict):
        return any(map(contains_redacted, value.values()))
    if isinstance(value, list):
        return any(map(contains_redacted, value))
    return isinstance(value, str) and REDACTED in value


def _redact_section(section: Section) -> dict[str, Any]:
    """The settings of one section. Few of their own names mark a secret: `input_key`, for example, does not."""
    values = section.model_dump(mode="json")
    shown = {
        name: _redact_section(value) if isinstance(value, Section) else redacted(values[name])
        for name, value in section
    }
    for name in _SECRET_SETTINGS & shown.keys():
        if shown[name] is not None and not str(shown[name]).startswith(_SECRET_SOURCES):
            shown[name] = REDACTED
    return shown


def redacted(value: Any) -> Any:
    """A JSON value without the secrets in it: entries of a dict whose names mark a secret, and credentials in texts."""
    match value:
        case dict():
            return {
                name: REDACTED if isinstance(entry, str) and is_secret(str(name)) else redacted(entry)
                for name, entry in value.items()
            }
        case list():
            return [redacted(entry) for entry in value]
        case str():
            return redact_text(value)
        case _:
            return value
