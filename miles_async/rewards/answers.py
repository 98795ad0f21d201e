"""Extracts the answer from a response, and the expected answer from a label. Text only, no mathematics."""

from __future__ import annotations

import re

from miles_async.types import Sample

_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{...}`, nested braces included; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def after_thinking(response: str) -> str | None:
    """Return the text after the reasoning, or None if the reasoning never ended (the format of DeepScaleR)."""
    for mark in ("</think>", "###Response"):
        if mark in response:
            return response.rpartition(mark)[2]
    return None


def answer_line(response: str) -> str | None:
    """Return the text of the last `Answer: ...` line in the last 300 characters (DAPO, arXiv 2503.14476)."""
    lines = _ANSWER_LINE.findall(response[-300:])
    return lines[-1].strip().strip("$").strip() if lines else None


def label_of(sample: Sample) -> str:
    """Return the label as text. Raises TypeError if the label is neither a string nor a number."""
    if not isinstance(sample.label, (str, int, float)):
        raise TypeError(f"the label is {sample.label!r}, a {type(sample.label).__name__}, not a string or a number")
    return str(sample.label)
