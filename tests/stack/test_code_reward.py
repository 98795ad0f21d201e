"""The reward `code` runs the tests of a row in a confined process: what passes, and what a hostile program costs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from miles_async.rewards.factory import RunRewards
from miles_async.types import REWARD_ERROR, Group, Sample
from tests.configuration import run_config

ADD = "def add(a, b):\n    return a + b"
ASSERTED = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
WRONG = {"score": 0.0, "passed": 0.0}


def block(code: str, language: str = "python") -> str:
    return f"I think.\n```{language}\n{code}\n```\nDone."


async def scored(label: Any, *responses: str, **settings: Any) -> list[Any]:
    """Return the samples of a group with these responses after they were scored."""
    group = Group((Sample(index=i, response=text, label=label) for i, text in enumerate(responses)), feed_index="a_0_0")
    rewarder = RunRewards(run_config(rm_type="code", **settings), args=None)
    try:
        await rewarder.score(group)
    finally:
        await rewarder.close()
    return list(group)


async def scores(label: Any, *responses: str) -> list[float]:
    return [sample.reward["score"] for sample in await scored(label, *responses)]


async def scored_by_one_process(rows: Sequence[tuple[Any, Sequence[str]]]) -> list[list[Any]]:
    """The same for several rows, with their labels and responses. One process, which takes a second to start, is
    enough for all, because each response is evaluated in a separate child."""
    rewarder = RunRewards(run_config(rm_type="code"), args=None)
    groups = [
        Group(
            (Sample(index=i, response=text, label=label) for i, text in enumerate(responses)), feed_index=f"a_0_{row}"
        )
        for row, (label, responses) in enumerate(rows)
    ]
    try:
        for group in groups:
            await rewarder.score(group)
    finally:
        await rewarder.close()
    return [list(group) for group in groups]


async def test_the_rewards_are_whether_all_tests_pass_and_the_share_that_passes() -> None:
    half = "def add(a, b):\n    return 0"
    right, wrong = await scored(ASSERTED, block(ADD), block(half))
    assert (right.reward, right.reward_key) == ({"score": 1.0, "passed": 1.0, "error": ""}, "score")
    assert wrong.reward == {"score": 0.0, "passed": 0.5, "error": "test 0: AssertionError: "}
    [share] = await scored(ASSERTED, block(half), reward_key="passed")
    assert (share.reward["passed"], share.reward_key) == (0.5, "passed")


TEST_FUNCTIONS = "from solution import add\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
CHECK = {"assert_code": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}
READS = "a, b = map(int, input().split())\nprint(a + b)"
SOLUTION = "class Solution:\n    def add(self, a: int, rest: List[int]) -> tuple:\n        return a, sum(rest)"


FORMATS: list[tuple[Any, str]] = [
    (ASSERTED, ADD),
    ("assert add(1, 2) == 3", ADD),
    (json.dumps([{"assert_code": text} for text in ASSERTED]), ADD),
    ([{"assert_code": TEST_FUNCTIONS}], ADD),
    ([CHECK], ADD),
    ([{**CHECK, "import_prefix": "import numbers as n\n"}], ADD.replace("a, b", "a: n.Number, b")),
    ([{"stdin": "1 2\n", "expected_stdout": "3\n"}], READS),
    (
        [{"input": "1 2\n", "output": "3"}],
        f"if __name__ == '__main__':\n    {READS.replace(chr(10), chr(10) + '    ')}",
    ),
    ({"inputs": ["1 2", "2 3"], "outputs": ["3", "5.0"]}, f"{READS}\nexit()"),
    ({"inputs": [["1", "2"]], "outputs": ["1  2"]}, "print(*open(0).read().split())"),
    ({"inputs": ["1"], "outputs": ["1"]}, "sys.stdout.buffer.write(sys.stdin.buffer.read())"),
    ({"inputs": ["1\n[2, 3]"], "outputs": ["[1, 5]"], "fn_name": "add"}, SOLUTION),
    ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, ADD),
    ({"inputs": ["3000"], "outputs": ["0"]}, "def f(n):\n    return n and f(n - 1)\nprint(f(int(input())))"),
    ([{"assert_code": "assert 'Done.' in {response}"}], ADD),
]


async def test_right_code_passes_each_format_of_tests_and_wrong_code_fails() -> None:
    wrong = block("def add(a, b):\n    return -9\nprint(-9)")
    rows = [(label, (block(code), "I think." if "{response}" in str(label) else wrong)) for label, code in FORMATS]
    for (label, code), samples in zip(FORMATS, await scored_by_one_process(rows), strict=True):
        assert [sample.reward["score"] for sample in samples] == [1.0, 0.0], (label, code)


async def test_the_last_code_block_that_defines_something_is_run() -> None:
    usage = block("print(add(1, 2))")
    after_thinking = f"{block('def add(a, b): return 7')}</think>{block(ADD)}"
    assert await scores(ASSERTED, block(ADD) + usage, after_thinking, ADD, block(ADD, "")) == [1.0] * 4
    assert await scores(ASSERTED, block(ADD) + block("def add(a, b): return 7")) == [0.0]


REFUSED: list[tuple[Any, str, str]] = [
    ("", block(ADD), "the row has no tests"),
    ([], block(ADD), "the row has no tests"),
    ([{}], block(ADD), "the row has a test without assert_code, or stdin and expected_stdout"),
    (ASSERTED, "", "the response has no Python code"),
    (ASSERTED, "```python\ndef add", "the response has no complete code block"),
    (ASSERTED, block("int main() {}", "cpp"), "the response has no Python code"),
    (ASSERTED, "I do not know.", "SyntaxError: invalid syntax"),
    (ASSERTED, block("x = '\0'"), "null bytes"),
    (ASSERTED, block("import os\nwhile True: os.fork()"), "test 0: (PermissionError|BlockingIOError)"),
    (ASSERTED, block(f"{ADD}\nexit(0)"), "test 0: SystemExit: 0"),
    (ASSERTED, block("class Stop(BaseException): pass\nraise Stop('here')"), "test 0: Stop: here"),
    (ASSERTED, block("x = bytes(8 * 10**9)"), "test 0: MemoryError"),
    (
        [{"stdin": "", "expected_stdout": "1"}],
        block("while True: print('1' * 10**6)"),
        "test 0: MemoryError: more than 10000000 bytes were printed",
    ),
]


async def test_what_cannot_pass_gets_nothing_and_the_reason() -> None:
    rows = [(label, (response,)) for label, response, _ in REFUSED]
    for (label, response, reason), [sample] in zip(REFUSED, await scored_by_one_process(rows), strict=True):
        assert {name: sample.reward[name] for name in WRONG} == WRONG, (label, response)
        assert re.search(reason, sample.reward["error"]), (label, response)


@pytest.mark.parametrize(
    "code, reason",
    [
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", "took longer than 2 s"),
        ("import time; time.sleep(600)", "took longer than 2 s"),
        ("import os; os._exit(0)", "ended its process with exit code 0"),
        ("import os; os._exit(7)", "ended its process with exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "ended its process by signal 11"),
    ],
)
async def test_a_program_that_gives_no_answer_counts_as_wrong_beside_others(code: str, reason: str) -> None:
    right, hostile = await scored(ASSERTED, block(ADD), block(code), reward_timeout_seconds=2)
    assert (right.reward["score"], hostile.reward) == (1.0, WRONG)
    assert reason in hostile.metadata[REWARD_ERROR]
