"""A Python calculator: arithmetic as Python writes it, and nothing else of Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 200
"""Characters of an expression."""
LARGEST = 10.0**100
"""Numbers beyond this are refused, so that no model can keep a core busy with `9**9**9`."""

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
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": round, "sqrt": math.sqrt, "gcd": math.gcd,
}  # fmt: skip


def calculate(expression: str) -> str:
    """The value as Python prints it, or `error: …`: what went wrong is for the model to read."""
    if len(expression) > LONGEST:
        return f"error: longer than {LONGEST} characters"
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
    if abs(number) > LARGEST:
        raise ValueError("the number is too large")
    return number
