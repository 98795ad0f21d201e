"""Prompt text to ids and back, with the checkpoint's own tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles_async.errors import UserError


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
        text: str = self._chat.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
