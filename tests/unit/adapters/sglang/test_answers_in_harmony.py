"""What an agent receives of an answer in Harmony, the format of gpt-oss, that contains neither calls nor reasoning."""

from __future__ import annotations

import pytest

from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.answer_parser_process import Choice, Chosen, Parsed, Question

CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"


class Given(AnswerParserProcess):
    """Has a result of SGLang's parsers."""

    def __init__(self, parsed: Parsed) -> None:
        super().__init__(Choice("", "gpt-oss", "gpt-oss"))
        self.chosen = Chosen("gpt-oss", "gpt-oss")
        self._parsed = parsed

    async def ask(self, question: Question) -> Parsed | None:
        return self._parsed


async def read(text: str, end: str, parsed: Parsed) -> dict[str, object] | None:
    return await Given(parsed).parse(text, end=end, context="<|start|>assistant", tools=None, calls_before=0)


async def test_an_answer_has_no_name_of_its_channel() -> None:
    message = await read("<|channel|>final<|message|>Hi", "<|return|>", Parsed("Hi"))
    assert message == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    "text, end, parsed",
    [
        # The results of SGLang 0.5 for each text.
        ("Hi", "<|return|>", ""),
        ("<|channel|>commentary<|message|>Hi", "", ""),
        (CALL, "", ""),
        (CALL, "<|call|>", f"<|start|>assistant{CALL}<|call|>"),
    ],
)
async def test_an_answer_that_cannot_be_read_remains_text(text: str, end: str, parsed: str) -> None:
    assert await read(text, end, Parsed(parsed)) is None


async def test_the_token_that_ends_an_answer_is_not_reasoning() -> None:
    message = await read("<|channel|>analysis<|message|>hm", "<|return|>", Parsed("", [], "hm<|return|>"))
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm"}
