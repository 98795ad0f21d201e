"""Renders chat messages, and converts text and messages to token ids and back, with the checkpoint's tokenizer.

This is the only place where a chat template is applied, so training, evaluation, warm start, supervised examples and
agents see the same tokens: those of transformers' `apply_chat_template(..., tokenize=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from miles_async.config.schema import Data
from miles_async.errors import TemplateError, UserError
from miles_async.types import Prompt


class CheckpointTokenizer:
    """Reads `tokenizer.json`. Loads transformers, which takes seconds, only if a chat template is used."""

    def __init__(
        self,
        model_path: str,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        prompts_are_rendered: bool = False,
    ) -> None:
        """`template_kwargs` are additional arguments of the chat template, for every chat.

        `prompts_are_rendered` means that the data source has rendered the prompts that are text, so that they contain
        their special tokens. Raises UserError if `tokenizer.json` is missing or broken.
        """
        self.folder = Path(model_path)
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} is missing; save the tokenizer there (tokenizer.save_pretrained)")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises only this class
            raise UserError(f"{file} is not a valid tokenizer ({error}); copy it again") from error
        _encode_whole_texts(self._tokenizer)
        self._template_kwargs = dict(template_kwargs or {})
        self._prompts_are_rendered = prompts_are_rendered

    @classmethod
    def of_run(cls, data: Data, checkpoint: str) -> Self:
        """The tokenizer of `checkpoint` with the settings of a run. Raises UserError as the constructor."""
        return cls(
            checkpoint,
            template_kwargs=data.apply_chat_template_kwargs,
            prompts_are_rendered=data.apply_chat_template,
        )

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the ids of a prompt: of chat messages, of text that was rendered from messages, or of verbatim text.

        Verbatim text gets the tokenizer's special tokens, but no second BOS token if the text begins with one. Raises
        as `render` if the prompt is a list of messages.
        """
        if not isinstance(prompt, str):
            return self.encode_text(self.render(prompt, tools))
        if self._prompts_are_rendered:
            return self.encode_text(prompt)
        encoding = self._tokenizer.encode(prompt)
        ids: list[int] = encoding.ids
        doubled = encoding.special_tokens_mask[:1] == [1] and ids[:1] == ids[1:2]
        return ids[1:] if doubled else ids

    def encode_text(self, text: str, *, after: str = "") -> list[int]:
        """Return the ids of a rendered chat, or of text that continues the text `after`, without added special tokens.

        Some tokenizers add a space to the beginning of a text. Text that continues other text does not get one, unless
        a token of both together would span the place where they meet: `text` is then encoded alone.
        """
        known = self._chat_ids(after)
        ids = self._chat_ids(after + text)
        return ids[len(known) :] if ids[: len(known)] == known else self._chat_ids(text)

    @property
    def end(self) -> str:
        """The end-of-sequence token as text. Raises UserError if the tokenizer defines none."""
        if (end := self._end) is None:
            raise UserError(
                f"the tokenizer in {self.folder} has no eos_token, which has to end every supervised example; set it"
            )
        return end

    @property
    def _end(self) -> str | None:
        token = self.transformers.eos_token
        return None if token is None else str(token)

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self.transformers.chat_template is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        answer_next: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render chat messages as text. `answer_next` appends what precedes the model's answer.

        `template_kwargs` override those of the run. Raises UserError if the checkpoint has no chat template, and
        TemplateError if the template fails for these messages or a message contains more than text.
        """
        if not self.has_template:
            raise UserError(
                f"the tokenizer of hf_checkpoint {self.folder} has no chat template, which prompts of chat messages "
                "need; set its chat_template"
            )
        if (medium := _medium(messages)) is not None:
            # The templates of models that also take images would write a token in place of the image.
            raise TemplateError(f"a message contains {medium}, but the model reads only text: leave it out")
        try:
            kwargs = {**self._template_kwargs, **(template_kwargs or {})}
            text = self._apply_template(messages, tools=tools, add_generation_prompt=answer_next, **kwargs)
        except Exception as error:
            # A template is code from the checkpoint and may raise any exception.
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        return str(text)

    def text_of(self, ids: list[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def transformers(self) -> Any:
        """The tokenizer object of the library transformers, which is loaded on first use.

        Raises UserError if transformers cannot load it.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:
            # The files of a tokenizer may contain anything, and the library raises many exceptions.
            raise unusable(self.folder, error) from error

    def _apply_template(self, messages: list[dict[str, Any]], **variables: Any) -> object:
        return self.transformers.apply_chat_template(messages, tokenize=False, **variables)

    def _chat_ids(self, text: str) -> list[int]:
        return list(self._chat_tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _chat_tokenizer(self) -> Tokenizer:
        """The tokenizer with which transformers encodes rendered chats.

        Some of its classes, such as that of Llama 2, split text differently from `tokenizer.json`. This is a copy,
        because user functions share `transformers`, where a call with `truncation` changes the original for later
        calls.
        """
        tokenizer = Tokenizer.from_str(self.transformers.backend_tokenizer.to_str())
        _encode_whole_texts(tokenizer)
        return tokenizer


def unusable(folder: Path, error: Exception) -> UserError:
    """Say that the files of a tokenizer are broken."""
    return UserError(
        f"the tokenizer of hf_checkpoint {folder} cannot be loaded ({type(error).__name__}: {error}); copy the "
        "checkpoint again"
    )


def _medium(messages: list[dict[str, Any]]) -> str | None:
    """The name of an image, video or sound in the messages, such as `image_url`; None if they are text only."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    parts = [part for content in contents for part in content if isinstance(part, Mapping)]
    names = [str(name) for part in parts for name in (part.get("type"), *part)]
    return next((name for name in names if re.search("image|video|audio", name)), None)


def _encode_whole_texts(tokenizer: Tokenizer) -> None:
    """Turn off truncation and padding that were saved with a tokenizer, as transformers does."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
