"""Agents that call tools over several turns, in every dialect that SGLang's parsers read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import three_turns
from tests.processes.dialects import DIALECTS


@pytest.fixture(scope="module")
def played() -> dict[str, three_turns.Played]:
    command = [sys.executable, "-m", "tests.processes.three_turns"]
    return three_turns.read(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_turns_with_tools_are_the_sampled_tokens_and_what_the_template_renders_between_them(
    dialect: str, played: dict[str, three_turns.Played]
) -> None:
    assert three_turns.differences(played[dialect], DIALECTS[dialect]) == []


def test_every_parser_that_is_offered_is_played() -> None:
    program = (
        "from miles_async.adapters.sglang.answer_parser_process import prepare_imports; prepare_imports()\n"
        "from sglang.srt.function_call.function_call_parser import FunctionCallParser\n"
        "print(*FunctionCallParser.ToolCallParserEnum)"
    )
    offered = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert set(offered.split()) == set(DIALECTS)
