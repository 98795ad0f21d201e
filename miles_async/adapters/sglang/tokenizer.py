"""Converts text and chat messages to token ids and back, with the checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles_async.errors import TrajectoryError, UserError


class CheckpointTokenizer:
    """Reads `tokenizer.json`. Loads transformers, which takes seconds, only if chat messages are used."""

    def __init__(self, model_path: str) -> None:
        self._folder = Path(model_path)
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} is missing; save the tokenizer there (tokenizer.save_pretrained)")
        self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Return the ids of a text prompt, or of chat messages rendered by the checkpoint's chat template."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt).ids)
        return self.encode_text(self.render(prompt))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of text that continues other text: no special token is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def end(self) -> str:
        """The end-of-sequence token as text. Raises UserError if the tokenizer defines none."""
        if self.transformers.eos_token is None:
            raise UserError(
                f"the tokenizer in {self._folder} has no eos_token, which has to end every supervised example; set it"
            )
        return str(self.transformers.eos_token)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        answer_next: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render chat messages as text. `answer_next` appends what precedes the model's answer.

        Raises UserError if the checkpoint has no chat template, and TrajectoryError if the template fails for these
        messages.
        """
        if self.transformers.chat_template is None:
            raise UserError(
                f"the tokenizer in {self._folder} has no chat template, which prompts of chat messages need; "
                "set its chat_template"
            )
        try:
            text = self.transformers.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=answer_next, **(template_kwargs or {})
            )
        except Exception as error:
            # A template is code from the checkpoint and may raise any exception.
            raise TrajectoryError(f"the chat template refused the messages: {error}") from error
        return str(text)

    def text_of(self, ids: list[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def transformers(self) -> Any:
        """The tokenizer object of the library transformers, which is loaded when it is used first."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
