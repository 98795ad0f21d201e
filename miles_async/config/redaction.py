"""Removes secrets from what a run writes for people: configuration, report, logs and error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.section import Section

REDACTED = "<redacted>"
MIN_SECRET_LENGTH = 8

_SECRET_SETTINGS = frozenset({"sglang_router_api_key", "wandb_key"})
_SECRET_SOURCES = ("env:", "file:")
"""A secret setting that begins with one of these names the place of the secret instead of the secret."""
_SECRET_WORDS = frozenset(
    "secret password passwd pwd passphrase passcode credential auth authorization bearer cookie apikey webhook dsn pat "
    "authkey accesskey privatekey signature".split()
)
"""A name with one of these words, in the singular or plural, has a secret."""
_OFTEN_SECRET = frozenset("key token pass".split())
"""A name with one of these words has a secret unless the word before or behind it is one of `_ORDINARY`."""
_ORDINARY = frozenset(
    "bos cache cls column count dict eos field foreign id image index input keep label len length limit mask max "
    "metadata min multimodal name new next num output pad padding per prefill primary prompt ratio reward reasoning "
    "size sort special speculative stop think tokenizer total tool type unk value vocab window".split()
)
_FOLDERS = frozenset(("PWD", "OLDPWD"))
"""Variables in which shells keep the working directory."""
_NO_PLURALS = frozenset(("pass", "cls", "eos", "bos"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ENDINGS = re.compile(
    r"(?<=[a-z])(?:password|passwd|passphrase|secret|apikey|accesskey|webhook|credentials?|token|pwd)$"
)
"""Secret words at the end of names that are written in one word, such as PGPASSWORD."""
_USER_INFO = re.compile(r"(?<=://)(?:[^/\s'\"]+|[^/@:\[\s'\"]*:(?!\d+/)[^@\s'\"]+)(?=@)")
"""A password may have a slash that should be escaped; `host:80/name@2x` is a port and a path."""
_QUERY = re.compile(r"(?<=[?&#])([\w.-]+)=[^&\s'\"#]+")
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")
_ASSIGNED = re.compile(r"""([\w-]*[A-Za-z])(['"]?\s?[=:]\s?['"]?)([^\s'",;&<>]{8,})""")
_CREDENTIAL = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    # Prefixes with which providers mark their keys, so that they are found in texts.
    r"|\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|npm_\w{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{20,}|[rs]k_live_\w{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    # The path of a webhook is its key.
    r"|(?<=hooks\.slack\.com/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"
)
_RANDOM = re.compile(r"(?<![\w/.-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?=[\w-]*[0-9])[\w-]{32,}={0,2}(?![\w/.-])")
_MIXED = 0.4
"""Share of neighbours of different kinds (small, capital, digit) in a key. It is 0.6 on average in random characters,
and less in names, which consist of words."""


def redacted_values(config: RunConfig) -> dict[str, Any]:
    """The settings of a run by section, as JSON types, without secrets.

    A secret is the value of an entry of a free-form dict (environment variables, SGLang arguments) whose name contains
    a word such as key, token or password, the key of an external router, and any credentials in a URL.
    """
    return _redact_section(config)


def redact_text(text: str, secrets: Collection[str] = ()) -> str:
    """The text without credentials: in URLs, in headers, behind names that mark a secret, and what looks like a key.

    `secrets` are further strings to remove.
    """
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    if "://" in text:
        text = _USER_INFO.sub(REDACTED, text)
        text = _QUERY.sub(lambda match: f"{match[1]}={REDACTED}" if is_secret(match[1]) else match[0], text)
    text = _CREDENTIAL.sub(REDACTED, text)
    text = _AUTHORIZATION.sub(lambda match: f"{match[1]} {REDACTED}", text)
    text = _ASSIGNED.sub(_without_assigned, text)
    return _RANDOM.sub(lambda match: REDACTED if _mixture(match[0]) >= _MIXED else match[0], text)


def is_secret(name: str) -> bool:
    """Whether the name of a variable or an argument says that its value is a secret.

    The words of the name count, however they are joined: HF_TOKEN, api-key, clientSecret and PGPASSWORD are secrets;
    max_total_tokens, eos_token and tokenizer_path are not.
    """
    if name in _FOLDERS:
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    singular = [word if word in _NO_PLURALS else word.removesuffix("s") for word in words]
    for position, word in enumerate(singular):
        if word in _SECRET_WORDS or _ENDINGS.search(word):
            return True
        # An `id_token` is a secret, and a `token_id` is not.
        before = [name for name in singular[max(position - 1, 0) : position] if name != "id"]
        if word in _OFTEN_SECRET and _ORDINARY.isdisjoint([*before, *singular[position + 1 : position + 2]]):
            return True
    return False


def secret_values(variables: Mapping[str, str], command: Sequence[str] = ()) -> set[str]:
    """The secrets among environment variables and the arguments of a command (`--api-key VALUE`).

    Values of fewer than `MIN_SECRET_LENGTH` characters are left out, because words such as `true` are not secrets.
    """
    arguments = {flag.removeprefix("--"): value for flag, value in pairwise(command) if flag.startswith("--")}
    named = (*variables.items(), *arguments.items())
    return {value for name, value in named if is_secret(name) and len(value) >= MIN_SECRET_LENGTH}


def read_secret(setting: str, value: str | None) -> str | None:
    """The secret that a setting has or names: `env:NAME` for an environment variable, `file:PATH` for a file.

    Raises UserError if there is no such variable or file.
    """
    source, _, name = (value or "").partition(":")
    try:
        if source == "env":
            return os.environ[name]
        if source == "file":
            return Path(name).expanduser().read_text().strip()
    except KeyError as error:
        raise UserError(f"{setting} {value}: set the environment variable {name}") from error
    except OSError as error:
        raise UserError(f"{setting} {value}: the file cannot be read ({error.strerror})") from error
    return value


def contains_redacted(value: Any) -> bool:
    """Whether a value was read from a file that leaves out its secrets."""
    if isinstance(value, dict):
        return any(map(contains_redacted, value.values()))
    if isinstance(value, list):
        return any(map(contains_redacted, value))
    return isinstance(value, str) and REDACTED in value


def _without_assigned(match: re.Match[str]) -> str:
    """Redact the value of `name=value` or `name: value` if the name marks a secret."""
    name, between, value = match.groups()
    if value.isdigit() or not is_secret(name):
        return match[0]
    # A text may call many things a key or a token.
    if name.lower() in _OFTEN_SECRET and (value.isalpha() or len(value) < 16):
        return match[0]
    return f"{name}{between}{REDACTED}"


def _mixture(text: str) -> float:
    """The share of neighbouring characters of different kinds."""
    kinds = ["digit" if character.isdigit() else character.isupper() for character in text]
    return sum(left != right for left, right in pairwise(kinds)) / len(text)


def _redact_section(section: Section) -> dict[str, Any]:
    """The settings of one section. Few of their own names mark a secret: `input_key`, for example, does not."""
    values = section.model_dump(mode="json")
    shown = {
        name: _redact_section(value) if isinstance(value, Section) else redacted(values[name])
        for name, value in section
    }
    return {name: _without_secret(name, value) for name, value in shown.items()}


def redacted_setting(setting: str, value: Any) -> Any:
    """The value of a setting, such as `observability.wandb_key`, without secrets."""
    return _without_secret(setting.rpartition(".")[2], redacted(value))


def _without_secret(name: str, value: Any) -> Any:
    if name not in _SECRET_SETTINGS or value is None or str(value).startswith(_SECRET_SOURCES):
        return value
    return REDACTED


def redacted(value: Any) -> Any:
    """A JSON value without the secrets in it: entries of a dict whose names mark a secret, and credentials in texts."""
    match value:
        case dict():
            return {name: _hidden(entry) if is_secret(str(name)) else redacted(entry) for name, entry in value.items()}
        case list():
            return [redacted(entry) for entry in value]
        case str():
            return redact_text(value)
        case _:
            return value


def _hidden(value: Any) -> Any:
    """A secret value. Only its structure is left."""
    match value:
        case dict():
            return {name: _hidden(entry) for name, entry in value.items()}
        case list():
            return [_hidden(entry) for entry in value]
        case None | bool() | "":
            return value
        case _:
            return REDACTED
