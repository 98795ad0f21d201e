"""Parses an answer of each dialect of tool calls: `python -m tests.processes.parse_dialects FOLDER`.

It is a process, because modules are replaced when SGLang's parsers are imported.
"""
# ruff: noqa: RUF001

from __future__ import annotations

import json
import sys

import msgspec

from miles_async.adapters.sglang.answer_parser_process import Choice, Parsed, Parsers, Question, prepare_imports

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_JSON = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
_XML = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
DIALECTS = {
    "hermes": f"Let me see.<tool_call>{_JSON}</tool_call>",
    "qwen25": f"Let me see.<tool_call>\n{_JSON}\n</tool_call>",
    "qwen3_coder": f"Let me see.<tool_call>\n{_XML}\n</tool_call>",
    "mistral": f"[TOOL_CALLS] [{_JSON}]",
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "pythonic": '[get_weather(city="Rome")]',
    "glm45": ("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
        '<|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    ),
}
"""An answer that calls the tool, by the name of the parser."""


def read(output: str) -> dict[str, Parsed | None]:
    """Read what this program has printed."""
    return msgspec.json.decode(output, type=dict[str, Parsed | None])


def main() -> None:
    prepare_imports()
    found = {}
    for name, text in DIALECTS.items():
        harmony = name == "gpt-oss"
        parsers = Parsers(Choice(sys.argv[1], name, name if harmony else "qwen3"))
        found[name] = parsers.parse(Question(text if harmony else f"<think>hm</think>{text}", "", json.dumps(TOOLS)))
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
