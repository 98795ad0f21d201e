"""Prompt text to ids and back, with the checkpoint's own tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles_async.errors import TrajectoryError, UserError


class CheckpointTokenizer:
    """Reads `tokenizer.json`; loads transformers (seconds) only for chat messages."""

    def __init__(self, model_path: str) -> None:
        self._folder = Path(model_path)
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} is missing; save the tokenizer beside the model (tokenizer.save_pretrained)")
        self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Ids of a plain prompt, or of chat messages through the checkpoint's template."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt).ids)
        return self.encode_text(self.render(prompt))

    def encode_text(self, text: str) -> list[int]:
        """Ids of text that stands behind other text: no special token is put in front of it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def end(self) -> str:
        """What ends a turn, as text. Raises UserError where the tokenizer names none."""
        if self._chat.eos_token is None:
            raise UserError(f"the tokenizer in {self._folder} has no eos_token: lessons could not end")
        return str(self._chat.eos_token)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, answer_next: bool = True
    ) -> str:
        """Chat messages as text; with `answer_next`, up to where the model begins to answer.

        Raises UserError where the checkpoint has no template, TrajectoryError where its template refuses these."""
        if self._chat.chat_template is None:
            raise UserError(
                f"the tokenizer in {self._folder} has no chat template: agents that speak in messages need one"
            )
        try:
            return str(
                self._chat.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer_next)
            )
        except Exception as error:
            # A template is code of the checkpoint's and may raise anything.
            raise TrajectoryError(f"the chat template refused the messages: {error}") from error

    def text_of(self, ids: list[int]) -> str:
        """Text with its special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
