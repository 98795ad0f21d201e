"""A tokenizer without a checkpoint, for tests of generate functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.types import Prompt


class Bytes:
    """One token per byte."""

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        return list(str(prompt).encode())

    def encode_text(self, text: str, *, after: str = "") -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    text_of = decode

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        answer_next: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return text + "assistant: " * answer_next
