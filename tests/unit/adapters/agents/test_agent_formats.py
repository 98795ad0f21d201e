"""The wire formats of the endpoint: what a client sends back is the message that it received."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.adapters.agents.conversation import Completion, InvalidRequestError
from miles_async.adapters.agents.formats.anthropic import Messages
from miles_async.adapters.agents.formats.chat import Chat
from miles_async.adapters.agents.formats.responses import Responses
from miles_async.adapters.agents.messages import Message, for_template, plain
from miles_async.wire_formats import WireFormat

Body = Mapping[str, Any]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=5,
)


chat, responses, anthropic = Chat(), Responses(), Messages()


def asks_in_chat(answer: Body) -> Body:
    return {"messages": [{"role": "user", "content": "Q"}, answer["choices"][0]["message"]]}


def asks_in_responses(answer: Body) -> Body:
    return {"input": [{"role": "user", "content": "Q"}, *answer["output"]]}


def asks_in_anthropic(answer: Body) -> Body:
    turn = {"role": "assistant", "content": answer["content"]}
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "Q"}, turn]}


WIRES: list[tuple[WireFormat, Callable[[Body], Body]]] = [
    (chat, asks_in_chat),
    (responses, asks_in_responses),
    (anthropic, asks_in_anthropic),
]
each_wire = pytest.mark.parametrize("wire, ask", WIRES, ids=["chat", "responses", "anthropic"])


@st.composite
def answers(draw: st.DrawFn) -> Message:
    message: Message = {"role": "assistant", "content": draw(TEXT)}
    if reasoning := draw(TEXT):
        message["reasoning_content"] = reasoning
    named = st.tuples(st.text("ab", min_size=1, max_size=3), st.dictionaries(TEXT, JSON, max_size=2))
    if calls := draw(st.lists(named, max_size=2)):
        message["tool_calls"] = [
            {"id": f"id{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return plain(message)


def completed(message: Message, *, finish_reason: str = "stop", stop: str | None = None) -> Completion:
    return Completion(message, finish_reason, [1, 2, 3], [-0.1, -0.2, -0.3], 5, stop)


@each_wire
@settings(max_examples=40)
@given(message=answers())
def test_an_answer_that_is_sent_back_is_the_same_message(
    wire: WireFormat, ask: Callable[[Body], Body], message: Message
) -> None:
    # Clients decode and encode JSON with another library, which writes numbers and characters in another way.
    received = json.loads(json.dumps(json.loads(json.dumps(wire.answer(completed(message), {})))))
    [_, sent] = wire.read(ask(received))["messages"]
    assert plain(sent) == message
    for_template(plain(sent))


def events(
    wire: WireFormat, message: Message, request: Body | None = None, **more: Any
) -> list[tuple[str | None, Any]]:
    """The names and data of the events of a streamed answer."""
    found: list[tuple[str | None, Any]] = []
    for part in b"".join(wire.stream(completed(message, **more), request or {})).decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in part.split("\n"))
        data = lines["data"]
        found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


ANSWER: Message = plain(
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
)


def test_a_stream_of_chat_completions_ends_with_the_reason_and_done() -> None:
    stream = [data for _, data in events(chat, ANSWER, finish_reason="tool_calls")]
    deltas = [chunk["choices"][0]["delta"] for chunk in stream[:-1]]
    assert [list(delta) for delta in deltas] == [
        ["role", "content"], ["reasoning_content"], ["content"], ["tool_calls"], [],
    ]  # fmt: skip
    assert stream[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert stream[-1] == "[DONE]"


def test_a_stream_of_chat_completions_reports_the_usage_on_request() -> None:
    stream = events(chat, ANSWER, {"stream_options": {"include_usage": True}})
    assert stream[-2][1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def test_chat_completions_contain_log_probabilities_on_request() -> None:
    [choice] = chat.answer(completed(ANSWER), {"logprobs": True})["choices"]
    assert [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]] == [
        ("1", -0.1), ("2", -0.2), ("3", -0.3),
    ]  # fmt: skip
    assert chat.answer(completed(ANSWER), {})["choices"][0]["logprobs"] is None


def test_a_stream_of_responses_numbers_its_events_and_ends_with_the_whole_response() -> None:
    stream = events(responses, ANSWER)
    assert [data["sequence_number"] for _, data in stream] == list(range(len(stream)))
    assert all(name == data["type"] for name, data in stream)
    assert [item["type"] for item in stream[-1][1]["response"]["output"]] == ["reasoning", "message", "function_call"]


def test_a_stream_of_anthropic_opens_and_closes_each_block() -> None:
    names = [name for name, _ in events(anthropic, ANSWER)]
    thinking = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *thinking, *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize("stop", [None, "</search>"])
def test_a_chat_completion_names_the_stop_string_as_sglang_does(stop: str | None) -> None:
    [choice] = chat.answer(completed(ANSWER, stop=stop), {})["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)


@pytest.mark.parametrize(
    "finish_reason, stop, expected",
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_anthropic_names_the_reason_of_the_end(finish_reason: str, stop: str | None, expected: str) -> None:
    answer = anthropic.answer(completed(ANSWER, finish_reason=finish_reason, stop=stop), {})
    assert (answer["stop_reason"], answer["stop_sequence"]) == (expected, stop)


def test_a_response_that_reached_the_limit_is_incomplete() -> None:
    answer = responses.answer(completed(ANSWER, finish_reason="length"), {})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events(responses, ANSWER, finish_reason="length")[-1][0] == "response.incomplete"


def test_anthropic_requests_become_chat_messages() -> None:
    request = {
        "max_tokens": 7,
        "system": [{"type": "text", "text": "Be brief."}],
        "stop_sequences": ["END"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]},
                    {"type": "tool_result", "tool_use_id": "2", "content": "43", "is_error": True},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
    }
    read = anthropic.read(request)
    assert [(message["role"], message["content"]) for message in read["messages"]] == [
        ("system", "Be brief."), ("user", "Q"), ("assistant", ""), ("tool", "42"), ("tool", "43"), ("user", "Go on."),
    ]  # fmt: skip
    assert (read["max_tokens"], read["stop"]) == (7, ["END"])
    assert read["tools"][0]["function"]["parameters"] == {"type": "object"}


def test_responses_requests_become_chat_messages() -> None:
    request = {
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "id": "f", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call", "id": "g", "call_id": "2", "name": "f", "arguments": ""},
            {"type": "function_call_output", "call_id": "1", "output": "42"},
            {"role": "developer", "content": "Go on."},
        ],
    }
    read = responses.read(request)
    messages = [plain(message) for message in read["messages"]]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "system"]
    assert messages[2]["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in messages[2]["tool_calls"]] == ['{"a":1}', "{}"]
    assert read["tools"][0]["function"]["name"] == "f"
    assert responses.read({"input": "Q"})["messages"] == [{"role": "user", "content": "Q"}]


def test_tool_choice_none_offers_no_tools() -> None:
    tool = {"type": "function", "name": "f", "input_schema": {}, "function": {"name": "f"}}
    for wire, choice in ((chat, "none"), (responses, "none"), (anthropic, {"type": "none"})):
        read: Any = wire.read
        request = {"max_tokens": 1, "input": "Q", "messages": [], "tools": [tool]}
        assert read(request)["tools"]
        assert not read({**request, "tool_choice": choice})["tools"]


@each_wire
def test_arguments_of_the_chat_template_are_read_in_every_format(wire: WireFormat, ask: Any) -> None:
    request = {"input": "Q", "messages": [{"role": "user", "content": "Q"}], "max_tokens": 9}
    for sent in ({"enable_thinking": False}, {"reasoning_effort": "high", "documents": []}):
        assert wire.read({**request, "chat_template_kwargs": sent})["template_kwargs"] == sent
    assert wire.read(request)["template_kwargs"] == {}
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs: expected object"):
        wire.read({**request, "chat_template_kwargs": "enable_thinking"})
    with pytest.raises(InvalidRequestError, match="may not contain chat_template, which the endpoint sets"):
        wire.read({**request, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}})


@pytest.mark.parametrize(
    "wire, request_, complaint",
    [
        (responses, {"input": "Q", "previous_response_id": "resp_1"}, "send the whole history as input"),
        (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "items of type 'item_reference'"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads only text"),
        (responses, {"input": [{"type": "function_call"}]}, "input[0]: object missing required field call_id"),
        (responses, {"input": "Q", "tools": [{"type": "web_search"}]}, "tool 'web_search' needs a name"),
        (responses, {"input": "Q", "max_output_tokens": 0}, "max_output_tokens: expected int >= 1"),
        (responses, {"input": "Q", "background": True}, "background is not available: the endpoint keeps no responses"),
        (chat, {"messages": [], "functions": [{"name": "f"}]}, "functions is not available: describe them in tools"),
        (chat, {"messages": [], "function_call": "auto"}, "function_call is not available"),
        (chat, {"messages": [], "continue_final_message": True}, "every answer is a separate message"),
        (chat, {"messages": [], "web_search_options": {"a": 1}}, "the endpoint runs no tools"),
        (chat, {"messages": [], "audio": {"voice": "x"}}, "the model answers with text"),
        (chat, {"messages": [], "stream_options": "usage"}, "stream_options: expected object | null, got str"),
        (anthropic, {"messages": [], "max_tokens": 1, "mcp_servers": [{}]}, "the endpoint runs no tools"),
        (
            anthropic,
            {"messages": [], "max_tokens": 1, "tool_choice": "none"},
            "tool_choice: expected object",
        ),
        (anthropic, {"messages": []}, "max_tokens is missing"),
        (
            anthropic,
            {"max_tokens": 1, "messages": [{"role": "user"}]},
            "messages[0]: object missing required field",
        ),
        (anthropic, {"max_tokens": 1, "messages": "Q"}, "messages: expected array, got str"),
        (anthropic, {"max_tokens": 1, "system": 5, "messages": []}, "system: expected str | array | null, got int"),
        (
            anthropic,
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: invalid value 'image'",
        ),
    ],
)
def test_what_the_model_cannot_read_is_refused_with_an_explanation(
    wire: WireFormat, request_: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        wire.read(request_)
    assert complaint in str(refused.value)
