"""A calculator for arithmetic in Python syntax. No other Python code is executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200
"""Longer expressions are refused."""
MAX_NUMBER = 10.0**100
"""Larger numbers are refused, so that a model cannot occupy a core with `9**9**9`."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _round(number: Any, digits: int | None = None) -> Any:
    if digits is not None and abs(digits) > 100:
        # Python computes 10 ** -digits to round an integer.
        raise ValueError("round takes at most 100 digits")
    return round(number, digits)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": _round, "sqrt": math.sqrt, "gcd": math.gcd,
}  # fmt: skip


def calculate(expression: str) -> str:
    """Return the value as Python prints it, or `error: …` with the reason, which the model reads."""
    if len(expression) > MAX_CHARACTERS:
        return f"error: longer than {MAX_CHARACTERS} characters"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left), _value(right)
            if base and abs(exponent) * math.log10(max(abs(base), 1.0) + 1) > 100:
                raise ValueError("the power is too large")
            return _bounded(base**exponent)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _bounded(number: Any) -> Any:
    if isinstance(number, complex):
        raise ValueError("the result is not real")
    if abs(number) > MAX_NUMBER:
        raise ValueError("the number is too large")
    return number
