"""The tokens between an answer and the next one, for templates that end a turn in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
import pytest

from miles_async.adapters.agents.continuation import tokens_after
from miles_async.adapters.agents.messages import Message, for_template
from miles_async.errors import TrajectoryError

SPECIAL = {"<end>": 1, "<return>": 2, "<user>": 3, "<tool>": 4, "<model>": 5, "<close>": 6}
CALLS = "{% for c in m.tool_calls %}call({{ c.function.arguments | tojson }})<close>{% endfor %}"
PLAIN = (
    "{% for m in messages %}<{{ m.role | replace('assistant', 'model') }}>{{ m.content }}" + CALLS + "<end>\n"
    "{% endfor %}{% if answer_next %}<model>{% endif %}"
)
OPEN = PLAIN.replace("<end>\n", "")
"""No turn has an end: the first token of the next message is sampled."""
RETURN = PLAIN.replace("<end>\n", "{{ '<return>' if loop.last and not answer_next else '<end>' }}")
UNENDED = PLAIN.replace("<end>\n", "{% if answer_next or not loop.last %}<end>\n{% endif %}")
CONTENT_ONLY = PLAIN.replace(CALLS, "")

USER = {"role": "user", "content": "hi"}
TEXT: Message = {"role": "assistant", "content": "ok"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}


async def follows(template: str, answer: Message, new: Sequence[dict[str, Any]], end: str | None) -> str:
    """What follows the answer whose sampled tokens end with `end`."""

    async def render(messages: Sequence[Message], answer_next: bool) -> str:
        shown = [for_template(message) for message in messages]
        return jinja2.Environment().from_string(template).render(messages=shown, answer_next=answer_next)

    async def encode(text: str) -> list[int]:
        ids = []
        while text:
            special = next((word for word in SPECIAL if text.startswith(word)), None)
            ids.append(SPECIAL[special] if special else ord(text[0]))
            text = text[len(special or text[0]) :]
        return ids

    found = await tokens_after(
        1,
        [USER, answer, *new],
        (await encode(end))[-1] if end else None,
        marker="MARKER",
        render=render,
        encode=encode,
        is_special=lambda token: token in SPECIAL.values(),
    )
    words = {number: word for word, number in SPECIAL.items()}
    return "".join(words.get(token) or chr(token) for token in found)


@pytest.mark.parametrize(
    "template, answer, end, expected",
    [
        (PLAIN, TEXT, "<end>", "\n<user>hi<end>\n<model>"),
        (PLAIN, CALL, "<end>", "\n<user>hi<end>\n<model>"),
        (PLAIN, TEXT, "<return>", "\n<user>hi<end>\n<model>"),
        (PLAIN, CALL, "<return>", "\n<user>hi<end>\n<model>"),
        (OPEN, TEXT, "<user>", "hi<model>"),
        (OPEN, CALL, "<user>", "hi<model>"),
        (OPEN, TEXT, "<end>", "<user>hi<model>"),
        (OPEN, CALL, "<tool>", "<user>hi<model>"),
        (RETURN, TEXT, "<return>", "<user>hi<end><model>"),
        (RETURN, CALL, "<return>", "<user>hi<end><model>"),
        (UNENDED, TEXT, "<end>", "\n<user>hi<end>\n<model>"),
        (UNENDED, TEXT, "<return>", "\n<user>hi<end>\n<model>"),
        (CONTENT_ONLY, CALL, "<end>", "\n<user>hi<end>\n<model>"),
    ],
)
async def test_the_sampled_end_takes_the_place_of_the_rendered_one(
    template: str, answer: Message, end: str, expected: str
) -> None:
    assert await follows(template, answer, [USER], end) == expected


@pytest.mark.parametrize("template, end", [(PLAIN, "<end>\n"), (OPEN, ""), (RETURN, "<end>"), (UNENDED, "<end>\n")])
async def test_an_answer_that_was_cut_off_gets_the_end_of_its_turn(template: str, end: str) -> None:
    closing = end if end else ""
    assert await follows(template, TEXT, [USER], None) == f"{end}<user>hi{closing}<model>"


async def test_a_call_that_was_cut_off_after_its_last_token_gets_the_end_of_its_turn() -> None:
    assert await follows(PLAIN, CALL, [RESULT], None) == "<end>\n<tool>42<end>\n<model>"


async def test_a_stop_string_does_not_end_the_turn_although_its_last_character_occurs_in_the_template() -> None:
    assert await follows(PLAIN, TEXT, [USER], "n") == "<end>\n<user>hi<end>\n<model>"


async def test_a_template_may_render_nothing_after_an_answer() -> None:
    without_end = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    note = {"role": "system", "content": "be brief"}
    assert await follows(without_end, TEXT, [note], "<end>") == ""
    # The end of the last message belongs to none that follows.
    with_end = without_end + "{% if not answer_next %}<end>{% endif %}"
    assert await follows(with_end, TEXT, [note], "<return>") == ""


async def test_a_template_without_answers_cannot_be_continued() -> None:
    with pytest.raises(TrajectoryError, match="the chat template omits the last answer"):
        await follows("{{ messages[0].content }}", CALL, [USER], "<end>")
