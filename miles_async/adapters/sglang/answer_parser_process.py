"""The program that runs SGLang's parsers: `python -m miles_async.adapters.sglang.answer_parser_process`.

It reads one JSON object per line from standard input: first `Choice`, answered with `Chosen`, then one `Question` per
answer of the model, answered in order with `Parsed`, or with `null` if the parsers fail. It ends when its standard
input is closed.

SGLang's parsers need little, but `import sglang` loads torch and transformers, which takes ten seconds and 400 MB. So
this program replaces the package's `__init__` and the modules that the parsers import but do not use for parsing.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import msgspec

from miles_async.adapters.sglang.chat_template import chat_template
from miles_async.json_values import json_value, plain_text

PARSE_SECONDS = 2.0
"""Time limit for one answer. A pattern of a parser may need time that grows with the square of the length."""
MAX_MEMORY_BYTES = 8 << 30
"""Limit of the address space of this process."""
AUTO, NONE = "auto", "none"
_RECIPIENT_FIRST = re.compile(
    r"(^|<\|start\|>assistant)( to=[^\s<]+)<\|channel\|>commentary(?: ?(?:<\|constrain\|>)?json)?"
)
_UNUSED_MODULES = ("xgrammar", "xgrammar.structural_tag", "sglang.srt.arg_groups.overrides")


class Choice(msgspec.Struct):
    """The parsers by SGLang's names. `auto` chooses by the chat template of the checkpoint; `none` uses none."""

    checkpoint: str
    tool_calls: str
    reasoning: str


class Chosen(msgspec.Struct):
    """The parsers that are used, or the reason why there are none."""

    tool_calls: str | None = None
    reasoning: str | None = None
    error: str = ""


class Question(msgspec.Struct):
    text: str
    """An answer of the model, with special tokens."""
    context: str
    """The end of the text before the answer."""
    tools: str
    """The tools that the request offered, as a JSON list in the format of chat completions; empty if none."""


class Call(msgspec.Struct):
    name: str
    arguments: str
    """A JSON object without spaces."""


class Parsed(msgspec.Struct):
    """An answer without calls if one of them is malformed."""

    content: str
    calls: list[Call] = []
    reasoning: str = ""


class _TimeIsUpError(BaseException):
    """Not an Exception, because parsers catch those."""


class Parsers:
    def __init__(self, choice: Choice) -> None:
        """Raises ValueError if SGLang has no parser of a given name."""
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser
        from tokenizers import Tokenizer

        self._tool, self._function_call_parser, self._reasoning_parser = Tool, FunctionCallParser, ReasoningParser
        # Parsers and rules of detection read nothing but the vocabulary.
        self._tokenizer = Tokenizer.from_file(str(Path(choice.checkpoint) / "tokenizer.json"))
        tool_calls, reasoning = _detected(Path(choice.checkpoint), self._tokenizer)
        self.chosen = Chosen(
            _named("tool_call_parser", choice.tool_calls, tool_calls, FunctionCallParser.ToolCallParserEnum),
            _named("reasoning_parser", choice.reasoning, reasoning, ReasoningParser.DetectorMap),
        )
        self._tools = functools.lru_cache(maxsize=64)(self._read_tools)

    def parse(self, question: Question) -> Parsed:
        if self.chosen.tool_calls == "gpt-oss":
            question = msgspec.structs.replace(question, text=_in_one_form(question.text))
        reasoning, content = "", question.text
        if self.chosen.reasoning is not None:
            reasoning, content = self._split_reasoning(question)
        if question.tools and self.chosen.tool_calls is not None:
            # Parsers raise any exception for malformed calls. The agent then gets the text.
            with suppress(Exception):
                return Parsed(*self._split_calls(content, question.tools), reasoning=plain_text(reasoning))
        return Parsed(plain_text(content), [], plain_text(reasoning))

    def _split_calls(self, text: str, tools: str) -> tuple[str, list[Call]]:
        """Return the text without tool calls, and the calls. Raises ValueError if a call is malformed."""
        parser = self._function_call_parser(self._tools(tools), self.chosen.tool_calls, tokenizer=self._tokenizer)
        if not parser.has_tool_call(text):
            return text, []
        begun = text.count(parser.detector.bot_token) if parser.detector.bot_token else 1
        content, items = parser.parse_non_stream(text)
        # Some parsers leave out a call that they cannot read.
        if len(items) < begun:
            raise ValueError(f"{begun} calls begin, but {len(items)} can be read")
        return plain_text(content), [Call(plain_text(item.name), _object(item.parameters)) for item in items]

    def _split_reasoning(self, question: Question) -> tuple[str, str]:
        """Return the reasoning, and the text without it."""
        parser = self._reasoning_parser(
            self.chosen.reasoning,
            stream_reasoning=False,
            force_reasoning=False,
            tokenizer=self._tokenizer,
            tool_call_parser_active=bool(question.tools),
        )
        if question.context.rstrip().endswith(parser.detector.think_start_token):
            # The chat template has opened the reasoning for the model.
            question = Question(parser.detector.think_start_token + question.text, "", question.tools)
        reasoning, content = parser.parse_non_stream(question.text)
        return reasoning or "", content or ""

    def _read_tools(self, tools: str) -> list[Any]:
        return [self._tool.model_validate(tool) for tool in json.loads(tools)]


def _in_one_form(text: str) -> str:
    """Write calls in Harmony in the form that SGLang's parser knows.

    The recipient of a call may stand on either side of its channel, and the chat template has written the header of the
    first message.
    """
    text = _RECIPIENT_FIRST.sub(r"\1<|channel|>commentary\2 <|constrain|>json", text)
    return f"<|start|>assistant{text}" if text.startswith("<|channel|>commentary to=") else text


def _named(setting: str, name: str, detected: str | None, known: dict[str, Any]) -> str | None:
    if name == AUTO:
        return detected
    if name == NONE:
        return None
    if name not in known:
        raise ValueError(f"{setting} {name!r} is unknown: set it to auto, none or one of {', '.join(sorted(known))}")
    return name


def _detected(checkpoint: Path, tokenizer: Any) -> tuple[str | None, str | None]:
    """Return the parsers of tool calls and of reasoning for a chat template, by SGLang's rules.

    SGLang knows no rule for templates without reasoning that show tool calls as JSON, such as those of Qwen2.5. They
    use the format of Hermes, as do models that learn to call tools only by training.
    """
    from sglang.srt.parser import template_detection as rules

    template = chat_template(checkpoint)
    always, toggle = rules.detect_reasoning_pattern(template)
    tool_calls = rules.detect_tool_call_parser(template, tokenizer, toggle, always)
    return tool_calls or "hermes", rules.detect_reasoning_parser(template, tokenizer, toggle, always)


def _object(arguments: str) -> str:
    """Return a JSON object without spaces. Raises ValueError if the text is none, or is nested too deep for clients."""
    decoded = msgspec.json.decode(arguments, type=dict[str, Any])
    json_value(decoded)
    return msgspec.json.encode(decoded).decode()


class _UnusedModule(ModuleType):
    """A module from which any class can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from pydantic import BaseModel

        return type(name, (BaseModel,), {})


def prepare_imports() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError("SGLang is not installed: run make setup")
    package = ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["sglang"] = package
    for name in _UNUSED_MODULES:
        sys.modules[name] = _UnusedModule(name)


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise _TimeIsUpError


def _answer(parsers: Parsers, line: bytes) -> bytes:
    try:
        signal.setitimer(signal.ITIMER_REAL, PARSE_SECONDS)
        try:
            return msgspec.json.encode(parsers.parse(msgspec.json.decode(line, type=Question)))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (_TimeIsUpError, Exception):
        # The text comes from a model: a parser may raise anything.
        return b"null"


def main() -> None:
    # What SGLang prints must not be mixed with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    choice = msgspec.json.decode(sys.stdin.buffer.readline(), type=Choice)
    # Otherwise parsers leave out calls of tools that do not exist, and the agent could not tell the model so.
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"
    logging.disable()
    # An answer that needs more memory is refused, and takes none from other programs.
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        prepare_imports()
        parsers = Parsers(choice)
    except Exception as error:
        answers.write(msgspec.json.encode(Chosen(error=str(error) or repr(error))) + b"\n")
        return
    answers.write(msgspec.json.encode(parsers.chosen) + b"\n")
    signal.signal(signal.SIGALRM, _time_is_up)
    for line in sys.stdin.buffer:
        answers.write(_answer(parsers, line) + b"\n")


if __name__ == "__main__":
    main()
