"""Plays three turns with tools in each dialect: `python -m tests.processes.three_turns [FOLDER]`.

SGLang's parsers read the answers, and transformers renders the messages in one piece for comparison. It is a process,
because modules are replaced when SGLang's parsers are imported. With a folder of chat templates in files
`PARSER@NAME.jinja`, these are used instead of those of `dialects.py`: so real templates are checked that are not part
of the repository. `ends.json` in this folder may have the ends of a turn by `PARSER@NAME`.
"""
# ruff: noqa: RUF001

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from miles_async.adapters.agents.conversation import Conversation
from miles_async.adapters.agents.messages import Message
from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.answer_parser_process import Choice, Parsed, Parsers, Question, prepare_imports
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.processes.dialects import DIALECTS, Dialect

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CITIES = (("Rome",), ("Oslo", "Lima"))
"""The cities that the answers with calls ask for."""
ANSWER = "It is warm."
_TOKENS = re.compile(
    r"<\|[^|<>]+\|?>|<[a-z_]+\|>|<｜[^｜<>]+｜>|<(?:bos|eos|sop)>|</?s>|\]~!?b[\[\]]|\[e~\[|\[[A-Zg_/]+\]"
)
"""Special tokens in a template."""


class Played(msgspec.Struct):
    """The texts of a sample, and the same messages as transformers renders them."""

    prompt: str
    sampled: list[str]
    between: list[str]
    """The text after each answer but the last one."""
    rendered: list[str]
    """What the template renders for the messages before each answer but the first one."""
    calls: list[list[str]]
    said: list[str]
    """The content of the answers without calls."""
    in_one_piece: str = ""
    """The prompt of an agent that sends all these messages with its first request."""
    error: str = ""


def differences(played: Played, dialect: Dialect) -> list[str]:
    """How the sample differs from what transformers renders, apart from the ends that the model samples otherwise."""
    if played.error:
        return [played.error]
    found = []
    cities = [list(cities if dialect.parallel else cities[:1]) for cities in CITIES]
    if (played.calls, played.said) != (cities, [ANSWER, ANSWER]):
        found.append(f"the agent received {played.calls} and {played.said}")
    sampled, rendered = dialect.ends, dialect.rendered or dialect.ends
    text = played.prompt
    for turn, (between, whole) in enumerate(zip(played.between, played.rendered, strict=True)):
        after_call = int(turn >= len(CITIES))
        text += played.sampled[turn].removesuffix(sampled[after_call]) + rendered[after_call] + between
        if text != whole:
            found.append(f"turn {turn}: {text!r} is rendered as {whole!r}")
    if played.in_one_piece != played.rendered[-1]:
        found.append(f"in one piece: {played.in_one_piece!r} is rendered as {played.rendered[-1]!r}")
    return found


def wrong_turns(played: Played, dialect: Dialect) -> list[str]:
    """The turns after which the sample has another text than the template renders.

    Unlike `differences`, it does not compare the answers: real templates render calls with other spaces than those of
    `dialects.py`, and reasoning that the sample does not have.
    """
    found = []
    for turn, (between, whole) in enumerate(zip(played.between, played.rendered, strict=True)):
        end = (dialect.rendered or dialect.ends)[int(turn >= len(CITIES))]
        if not whole.endswith(end + between):
            found.append(f"turn {turn}: {between!r} is rendered as {whole[-len(between) - 40 :]!r}")
    return found


class LocalParser(AnswerParserProcess):
    """The parsers of SGLang in this process."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._parsers = Parsers(choice)
        self.chosen = self._parsers.chosen

    async def ask(self, question: Question) -> Parsed | None:
        return self._parsers.parse(question)


class Engine(SGLangGenerator):
    """Samples given texts."""

    def __init__(self, tokenizer: CheckpointTokenizer) -> None:
        super().__init__(
            "http://127.0.0.1:1", tokenizer, SamplingParams(max_new_tokens=9**9), limit=lambda: 64, engines=list
        )
        self._encode = tokenizer.encode_text
        self.text = ""

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        [sample] = group
        ids, start = self._encode(self.text), sample.response_length
        sample.tokens += ids
        sample.response_length += len(ids)
        sample.rollout_log_probs += [-1.0] * len(ids)
        sample.spans = [*sample.spans, VersionSpan(0, start, start + len(ids))]
        if sample.loss_mask is not None:
            sample.loss_mask += [1] * len(ids)
        sample.status = SampleStatus.COMPLETED


def read(output: str) -> dict[str, Played]:
    """Read what this program has printed."""
    return msgspec.json.decode(output, type=dict[str, Played])


def checkpoint(folder: Path, dialect: Dialect, template: str) -> None:
    # The test that reads the output of this program needs no torch.
    from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer

    tokenizer = byte_tokenizer()
    texts = template + dialect.chat_template + "".join(dialect.ends)
    tokenizer.add_tokens(sorted(set(_TOKENS.findall(texts)) | set(dialect.ends)), special_tokens=True)
    tokenizer.add_tokens([*dialect.words])
    tokenizer.eos_token = dialect.ends[1]
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def written(tokenizer: Any, dialect: Dialect, cities: Sequence[str], ids: Sequence[str]) -> str:
    """The answer that calls the tool for each city."""
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for name, city in zip(ids, cities, strict=True)
    ]
    frame = "{% set m = messages[0] %}{% if m.tool_calls %}" + dialect.calls + "{% endif %}"
    message = for_transformers({"role": "assistant", "content": "", "tool_calls": calls}, frame)
    text = tokenizer.apply_chat_template([message], chat_template=frame, tokenize=False)
    end = "" if text.endswith(dialect.ends[0]) else dialect.ends[0]
    return dialect.leading + str(text) + end


async def play(name: str, dialect: Dialect, template: str, folder: Path) -> Played:
    checkpoint(folder, dialect, template)
    tokenizer = CheckpointTokenizer(str(folder))
    engine = Engine(tokenizer)
    await engine.close()  # it sends no requests
    parser = LocalParser(Choice(str(folder), name, dialect.reasoning))
    sample = Sample()
    talk = Conversation(sample, MultiTurnSampler(engine, tokenizer), {"max_new_tokens": 9**9}, parser)
    messages: list[Message] = [{"role": "user", "content": "How is the weather?"}]
    played = Played("", [], [], [], [], [])
    made = 0

    async def ask(text: str) -> Message:
        engine.text = text
        before = len(sample.tokens)
        completion = await talk.complete({"messages": messages, "tools": TOOLS})
        if played.sampled:
            played.between.append(tokenizer.text_of(list(sample.tokens[before : completion.context])))
            shown = [for_transformers(message, template) for message in messages]
            played.rendered.append(
                str(tokenizer.transformers.apply_chat_template(
                    shown, tools=TOOLS, tokenize=False, add_generation_prompt=True
                ))
            )  # fmt: skip
        else:
            played.prompt = tokenizer.text_of(list(sample.tokens[: completion.context]))
        played.sampled.append(tokenizer.text_of(completion.tokens))
        messages.append(completion.message)
        return completion.message

    for cities in CITIES:
        cities = cities if dialect.parallel else cities[:1]
        ids = [f"functions.get_weather:{made + i}" for i in range(len(cities))]
        answer = await ask(written(tokenizer.transformers, dialect, cities, ids))
        calls = answer.get("tool_calls", [])
        played.calls.append([msgspec.json.decode(call["function"]["arguments"])["city"] for call in calls])
        made += len(calls)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"} for call in calls]
    for question in ("Thanks.", "Bye."):
        answer = await ask(dialect.final.format(ANSWER) + dialect.ends[1])
        played.said.append(answer["content"])
        messages.append({"role": "user", "content": question})
    await ask(dialect.final.format("Bye.") + dialect.ends[1])
    other = Sample()
    agent = Conversation(other, MultiTurnSampler(engine, tokenizer), {"max_new_tokens": 9**9}, parser)
    await agent.complete({"messages": messages[:-1], "tools": TOOLS})
    played.in_one_piece = tokenizer.text_of(list(other.tokens[: other.prompt_length]))
    if len(talk.segments) != 1:
        played.error = f"{len(talk.segments)} segments"
    return played


def for_transformers(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The form of the arguments that the template was written for: a text if it appends or prints them."""
    if "tool_calls" not in message:
        return dict(message)
    text = re.search(r"[+}{]\s*(?:\w+\.)*arguments\s*(?:\+|}})|\['arguments'\]\s*(?:\+|}})", template)
    calls = []
    for call in message["tool_calls"]:
        arguments = msgspec.json.decode(call["function"]["arguments"])
        shown = json.dumps(arguments) if text else arguments
        calls.append({**call, "function": {**call["function"], "arguments": shown}})
    return {**message, "tool_calls": calls}


def main() -> None:
    prepare_imports()
    games = [(name, dialect, dialect.chat_template) for name, dialect in DIALECTS.items()]
    if len(sys.argv) > 1:
        games, source = [], Path(sys.argv[1])
        ends = json.loads((source / "ends.json").read_text())
        for file in sorted(source.glob("*@*.jinja")):
            dialect = DIALECTS[file.stem.partition("@")[0]]
            if file.stem in ends:
                dialect = replace(dialect, ends=tuple(ends[file.stem]), rendered=None)
            games.append((file.stem, dialect, file.read_text()))
    found = {}
    for title, dialect, template in games:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[title] = asyncio.run(play(title.partition("@")[0], dialect, template, Path(folder)))
            except Exception as error:
                found[title] = Played("", [], [], [], [], [], error=f"{error!r}")
    if len(sys.argv) > 1:
        for title, dialect, _ in games:
            print(title, found[title].error or wrong_turns(found[title], dialect) or "same")
        return
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
