"""The reward `code`."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from io import BytesIO, TextIOWrapper
from types import CodeType, ModuleType
from typing import Any

from miles_async.json_values import shown_error
from miles_async.rewards.answers import after_reasoning
from miles_async.rewards.plugin import Reward, RewardFunction, RunsIn
from miles_async.types import Sample

MAX_OUTPUT_BYTES = 10_000_000
"""A program that prints more in one test fails the test."""
_RECURSION_LIMIT = 600_000
"""As in ROLL: solutions that search a graph need more than Python's 1,000. Memory remains limited."""
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Code finds the names of these modules without an import, as on the sites that its problems come from."""
_BLOCK = re.compile(r"```([\w+#.-]*)[^\S\n]*\n(.*?)```", re.DOTALL)
_PYTHON = "", "py", "python", "python3"


class Code(Reward):
    """A dictionary with `score`, 1 if the Python code of the response passes all tests and 0 otherwise, and `passed`,
    the share of the tests that it passes.

    The label has the tests, as a list or as JSON. A test is text with assertions or functions `test_…`, or an object:
    `stdin` and `expected_stdout`, or `assert_code`, beside which `entry_point` may name the function that its `check`
    receives (ROLL). `inputs`, `outputs` and, for functions, `fn_name` are lists in one object (verl). The last code
    block that defines something counts, or else the last one, or the whole response if there is none.
    """

    name = "code"
    runs_in = RunsIn.CHILD
    compares = True
    may_be_dictionary = True
    wrong = {"score": 0.0, "passed": 0.0}

    def open(self, settings: object) -> RewardFunction:
        names: dict[str, Any] = {}
        exec("".join(f"import {name}\nfrom {name} import *\n" for name in _MODULES), names)

        def score(args: Any, sample: Sample) -> dict[str, Any]:
            sys.setrecursionlimit(_RECURSION_LIMIT)
            return tested(sample.response, sample.label, names)

        return score


def tested(response: str, label: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Run the tests of `label`. Returns `score`, `passed`, and `error`, which says what failed first, or is empty.

    `names` is what the code finds without an import. This process must be confined.
    """
    text = after_reasoning(response)
    try:
        # The code could change the parsers, so they come first.
        tests = _tests(label)
        program = _Program(compile(_code(text), "<response>", "exec"), text, names)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return {**Code.wrong, "error": str(error) if type(error) is ValueError else shown_error(error)}
    failures = [failure for number, test in enumerate(tests) if (failure := _failure(test, program, number))]
    score, passed = float(not failures), 1.0 - len(failures) / len(tests)
    return {"score": score, "passed": passed, "error": failures[0] if failures else ""}


@dataclass(frozen=True)
class _Program:
    """The code of a response."""

    code: CodeType
    response: str
    """The text that the code is from."""
    names: Mapping[str, Any]

    def run(self, module: str, prefix: str = "", **names: Any) -> dict[str, Any]:
        """Run the code as a new module after the statements of `prefix`. Returns the names in the module."""
        # Tests may import the module, and dataclasses look their module up.
        sys.modules[module] = ModuleType(module)
        found = vars(sys.modules[module])
        found |= {**self.names, **names, "__name__": module}
        exec(prefix, found)
        exec(self.code, found)
        return found


_Test = Callable[[_Program], None]
"""Raises an error if the program fails the test."""


def _failure(test: _Test, program: _Program, number: int) -> str | None:
    kept = sys.stdin, sys.stdout
    try:
        test(program)
    except BaseException as error:
        # A program may raise anything, and `sys.exit` before the assertions passes no test.
        return f"test {number}: {shown_error(error)}"
    finally:
        sys.stdin, sys.stdout = kept
    return None


def _code(text: str) -> str:
    """Return the code of a response. Raises ValueError if there is none."""
    blocks: list[tuple[str, str]] = _BLOCK.findall(text)
    if not blocks and "```" in text:
        raise ValueError("the response has no complete code block")
    if not blocks:
        blocks = [("", text)]
    codes = [code for language, code in blocks if language.lower() in _PYTHON and code.strip()]
    if not codes:
        raise ValueError("the response has no Python code")
    return next((code for code in reversed(codes) if re.search(r"\b(?:def|class) ", code)), codes[-1])


def _tests(label: Any) -> list[_Test]:
    """Raises ValueError if the label has no tests."""
    parsed = _from_json(label)
    match parsed:
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            name = parsed.get("fn_name")
            make = partial(_calls, name) if name else _prints
            tests = [make(*pair) for pair in zip(inputs, outputs, strict=True)]
        case list():
            tests = list(map(_test, parsed))
        case str() if not parsed.strip():
            tests = []
        case _:
            tests = [_test(parsed)]
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _test(case: Any) -> _Test:
    match case:
        case str():
            return partial(_asserts, case, None, "")
        case {"assert_code": str(statements)}:
            return partial(_asserts, statements, case.get("entry_point"), case.get("import_prefix") or "")
        case {"stdin": given, "expected_stdout": expected} | {"input": given, "output": expected}:
            return _prints(given, expected)
    raise ValueError("the row has a test without assert_code, or stdin and expected_stdout")


def _prints(given: Any, expected: Any) -> _Test:
    """The program gets `given` as its standard input, and prints `expected`, apart from white space and the notation of
    numbers."""
    given, expected = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (given, expected))

    def test(program: _Program) -> None:
        source, output = TextIOWrapper(BytesIO(given.encode())), _Output()
        sys.stdin, sys.stdout = source, TextIOWrapper(output, write_through=True)

        def opened(file: Any, *rest: Any, **more: Any) -> Any:
            return source if file == 0 else open(file, *rest, **more)

        with suppress(SystemExit):  # a program may end so
            program.run("__main__", open=opened)
        printed = output.getvalue().decode()
        if not _same_text(printed, expected):
            raise AssertionError(f"{printed[:80]!r} was printed, not {expected[:80]!r}")

    return test


class _Output(BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > MAX_OUTPUT_BYTES:
            raise MemoryError(f"more than {MAX_OUTPUT_BYTES} bytes were printed")
        return super().write(data)


def _calls(name: str, given: Any, expected: Any) -> _Test:
    """The function, or the method of a class `Solution`, returns `expected`. Text has an argument in each line."""
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    expected = _from_json(expected)

    def test(program: _Program) -> None:
        names = program.run("solution")
        function = getattr(names["Solution"](), name) if "Solution" in names else names[name]
        # JSON has no tuples.
        returned = json.loads(json.dumps(function(*arguments), default=list))
        if expected not in (returned, [returned]):
            raise AssertionError(f"{returned!r:.80} was returned, not {expected!r:.80}")

    return test


def _asserts(statements: str, entry_point: str | None, prefix: str, program: _Program) -> None:
    """The statements and their functions `test_…` raise nothing. `{response}` in them is the text of the response."""
    if "{response}" in statements:
        exec(statements.replace("{response}", repr(program.response)), dict(program.names))
        return
    names = program.run("solution", prefix)
    exec(statements, names)
    for defined in ast.parse(statements).body:
        if isinstance(defined, ast.FunctionDef) and defined.name.startswith("test"):
            names[defined.name]()
    if entry_point:
        names["check"](names[entry_point])


def _same_text(printed: str, expected: str) -> bool:
    lines, right = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return list(map(len, lines)) == list(map(len, right)) and all(
        a == b or _same_number(a, b)
        for one, other in zip(lines, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def _same_number(printed: str, expected: str) -> bool:
    try:
        return Decimal(printed) == Decimal(expected)
    except InvalidOperation:
        return False


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
