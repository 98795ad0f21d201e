"""Finding the answer in a response, and the one that is expected. Pure text, no mathematics."""

from __future__ import annotations

import re

from miles_async.types import Sample

_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` of the text holds, nested braces included; None where none is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


def after_thinking(response: str) -> str | None:
    """What follows the reasoning, None where it never ended (DeepScaleR's format)."""
    for mark in ("</think>", "###Response"):
        if mark in response:
            return response.rpartition(mark)[2]
    return None


def answer_line(response: str) -> str | None:
    """What the last `Answer: ...` line of the last 300 characters says (DAPO's format, 2503.14476)."""
    lines = _ANSWER_LINE.findall(response[-300:])
    return lines[-1].strip().strip("$").strip() if lines else None


def label_of(sample: Sample) -> str:
    """Raises TypeError for a label that is no answer."""
    if not isinstance(sample.label, (str, int, float)):
        raise TypeError(f"the label is {sample.label!r}, a {type(sample.label).__name__}, not a text or a number")
    return str(sample.label)
