"""Supervised examples: which tokens are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from miles_async.errors import UserError
from miles_async.rollout.sft_rollout import fill_example
from miles_async.types import Prompt, Sample, VersionSpan
from tests.unit.byte_tokenizer import Bytes

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "tool", "content": "fine"},
    {"role": "assistant", "content": "So 2."},
]


class Template(Bytes):
    """One token per byte; prompts begin with `^`, turns end with `$` and a line break, `>` announces an answer."""

    end = "$"

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        assert isinstance(prompt, str)
        return self.encode_text("^" + prompt)

    def encode_text(self, text: str, *, after: str = "") -> list[int]:
        return list(text.encode())

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        answer_next: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        turns = "".join(f"{'>' if m['role'] == 'assistant' else '<'}{m['content']}$\n" for m in messages)
        return turns + (">" if answer_next else "")


class Forgetful(Template):
    """Leaves out earlier messages of the assistant, like templates that strip reasoning."""

    def render(self, messages: list[dict[str, Any]], *rest: Any, **more: Any) -> str:
        shown = [m if m["role"] != "assistant" or m is messages[-1] else {**m, "content": ""} for m in messages]
        return super().render(shown, *rest, **more)


def filled(sample: Sample, tokenizer: Template | None = None) -> tuple[str, str]:
    """All of its text, and below it a 1 under every trained byte."""
    fill_example(sample, tokenizer or Template(), version=4)
    assert sample.loss_mask is not None
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    marks = " " * sample.prompt_length + "".join("1" if entry else " " for entry in sample.loss_mask)
    return bytes(sample.tokens).decode().replace("\n", "/"), marks.rstrip()


def test_only_assistant_tokens_and_the_end_of_each_turn_are_trained() -> None:
    text, marks = filled(Sample(metadata={"messages": CHAT}))
    assert text == "<1+1?$/>2$/<fine$/>So 2.$"
    assert marks == "        11         111111"


@pytest.mark.parametrize("turn, trained", [(1, "                   111111"), (3, "        11")])
def test_an_assistant_turn_with_step_loss_mask_0_is_context_only(turn: int, trained: str) -> None:
    chat = [{**message, "step_loss_mask": int(number != turn)} for number, message in enumerate(CHAT)]
    text, marks = filled(Sample(metadata={"messages": chat}))
    assert text.startswith("<1+1?$/>2$")
    assert marks == trained


def test_a_prompt_that_is_a_list_of_messages_is_an_sft_example_too() -> None:
    assert filled(Sample(prompt=CHAT[:2])) == ("<1+1?$/>2$", "        11")


def test_a_plain_prompt_is_trained_on_its_label_and_the_end_token() -> None:
    sample = Sample(prompt="1+1=", label=2)
    assert filled(sample) == ("^1+1=2$", "     11")
    assert sample.spans == [VersionSpan(4, 0, 2)]


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    with pytest.raises(UserError, match="changes turn 1 of an example when other turns follow"):
        fill_example(Sample(metadata={"messages": CHAT}), Forgetful(), version=0)


@pytest.mark.parametrize("prompt", [CHAT[:1], "1+1=", [CHAT[0], {**CHAT[1], "step_loss_mask": 0}]])
def test_an_sft_example_without_an_answer_is_reported(prompt: Prompt) -> None:
    with pytest.raises(UserError, match="sample 3: its example has no text to train on"):
        fill_example(Sample(index=3, prompt=prompt), Template(), version=0)


class Merging(Template):
    """Turns the first letter of an answer and the `>` before it into one token, 0."""

    def encode_text(self, text: str, *, after: str = "") -> list[int]:
        return list(text.replace(">S", "\0").encode())


def test_a_prompt_has_the_tokens_of_generation_also_if_the_whole_chat_has_others() -> None:
    text, marks = filled(Sample(metadata={"messages": CHAT}), Merging())
    assert text == "<1+1?$/>2$/<fine$/>So 2.$"
    assert marks == "        11         111111"
