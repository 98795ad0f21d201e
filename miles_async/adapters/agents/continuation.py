"""Finds what a chat template renders between an answer and the next one: the end of the turn and the new messages.

The answer itself keeps its sampled tokens, so only the text after it is needed. The template renders the history with a
marker at the end of the answer: in the arguments of its tool calls, which it keeps because many templates refuse a
tool's result without a call, or in its content. The text after the marker begins with what closes the call and the
turn. The model has sampled most of this part. To find where the part ends, the history is also rendered without the new
messages.

A model may end its turn with another token than its template renders (gpt-oss: `<|return|>`, rendered as `<|end|>`),
with the token that begins the next message (GLM: `<|observation|>`), or, if it was cut off, not at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from miles_async.adapters.agents.messages import Message
from miles_async.errors import TrajectoryError

Render = Callable[[Sequence[Message], bool], Awaitable[str]]
"""Renders messages; the second argument says whether to open the next answer."""


async def tokens_after(
    answer: int,
    messages: Sequence[Message],
    end: int | None,
    *,
    marker: str,
    render: Render,
    encode: Callable[[str], Awaitable[list[int]]],
    is_special: Callable[[int], bool],
) -> list[int]:
    """Return the tokens between the sampled ones of `messages[answer]` and the next answer.

    `end` is the last sampled token of the answer if the model ended its turn, and None if the answer was cut off.
    `marker` is a text that no message contains, and `encode` returns the tokens of text that follows it. Raises
    TrajectoryError if the template omits the answer.
    """
    for field in ("tool_calls", "content") if messages[answer].get("tool_calls") else ("content",):
        before = [*messages[:answer], _marked(messages[answer], field, marker)]
        _, found, text = (await render([*before, *messages[answer + 1 :]], True)).rpartition(marker)
        if found:
            break
    else:
        raise TrajectoryError("the chat template omits the last answer, so it cannot be continued token by token")
    after = await encode(text)
    if after[:1] == [end]:
        return after[1:]

    async def follows(answer_next: bool) -> list[int]:
        return await encode((await render(before, answer_next)).rpartition(marker)[2])

    # The tokens that follow the answer both with and without the new messages: the end of its turn.
    alone = await follows(False)
    shorter = min(len(alone), len(after))
    turn = next((i for i in range(shorter) if alone[i] != after[i]), shorter)
    ended = end is not None and is_special(end)
    if ended and end in after[:turn]:
        return after[turn - after[:turn][::-1].index(end) :]
    if ended and after[turn : turn + 1] == [end]:
        return after[turn + 1 :]
    specials = [position for position in range(turn) if is_special(after[position])]
    differs = not specials or turn < len(alone)
    begun = after[turn : turn + 1]
    if differs and begun and is_special(begun[0]) and (await follows(True))[turn : turn + 1] == begun:
        # The template ends the last message of a chat with another token or with none. The end is the token that it
        # renders before any next message.
        specials = [turn]
    if specials and ended:
        # The template renders another end token. The sampled one takes its place.
        return after[specials[-1] + 1 :]
    if field == "content":
        return after
    return after[specials[-1] if specials else turn :]


def _marked(answer: Message, field: str, marker: str) -> Message:
    """Put the marker at the end of the arguments of each call, or in place of the content."""
    if field == "content":
        return {**answer, "content": marker}
    calls = []
    for call in answer["tool_calls"]:
        arguments = {**msgspec.json.decode(call["function"]["arguments"]), marker: marker}
        function = {**call["function"], "arguments": msgspec.json.encode(arguments).decode()}
        calls.append({**call, "function": function})
    return {**answer, "tool_calls": calls}
