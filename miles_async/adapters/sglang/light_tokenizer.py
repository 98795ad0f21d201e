"""The checkpoint's tokenizer without transformers, which takes seconds to import: for checks of the settings.

Chat templates are rendered in the same environment of Jinja as in transformers
(`transformers/utils/chat_template_utils.py`). Only the tokens of a run come from transformers itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from miles_async.adapters.sglang.chat_template import chat_template
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer, unusable

_BROKEN = (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError)
"""What the settings of a tokenizer raise if they are not JSON or contain other values than those of a tokenizer."""


class LightTokenizer(CheckpointTokenizer):
    """Renders and encodes as `CheckpointTokenizer`.

    The tokens of a few models differ slightly, because their classes in transformers change `tokenizer.json`.
    """

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def _end(self) -> str | None:
        return self._special_tokens.get("eos_token")

    def _apply_template(
        self, messages: list[dict[str, Any]], chat_template: str | None = None, **variables: Any
    ) -> object:
        template = self._compiled if chat_template is None else self._environment.from_string(chat_template)
        return template.render({**self._special_tokens, "documents": None, **variables, "messages": messages})

    @cached_property
    def _chat_tokenizer(self) -> Tokenizer:
        # As transformers does, except that it changes a copy, which takes long for a large vocabulary.
        tokens = self._special_tokens.values()
        self._tokenizer.add_special_tokens([token for token in tokens if self._tokenizer.token_to_id(token) is None])
        return self._tokenizer

    @cached_property
    def _template(self) -> str | None:
        try:
            return chat_template(self.folder)
        except _BROKEN as error:
            raise unusable(self.folder, error) from error

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """The text of each special token by the name that templates use, such as `bos_token`."""
        file = self.folder / "tokenizer_config.json"
        settings = json.loads(file.read_bytes()) if file.is_file() else {}
        named = {name: value for name, value in settings.items() if name.endswith("_token")}
        texts = {name: value["content"] if isinstance(value, Mapping) else value for name, value in named.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._environment.from_string(self._template or "")

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        return environment


class _Generation(jinja2.ext.Extension):
    """Accepts blocks that mark what the model generates, and renders what they contain."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
