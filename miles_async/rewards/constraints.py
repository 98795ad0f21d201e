"""The constraints of RLVR-IFeval (Tülu 3, arXiv 2411.15124), whose rows name one function and its arguments.

They differ from IFEval's instructions (`rewards/instructions.py`) in their names, their arguments and what they count.
The rules are those of ROLL's reward. Two things differ: the frequency of a keyword counts the keyword, not all words,
and langid identifies languages. Responses are read in linear time, as there.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from miles_async.rewards.english import is_in_language
from miles_async.rewards.instructions import count_placeholders

_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?])\s")


def satisfies(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the text satisfies the constraint `name`; an empty text satisfies none.

    Arguments that the constraint does not have are ignored, because rows have those of all constraints. Raises KeyError
    if the name is unknown, and ValueError if an argument is missing.
    """
    if name not in _CONSTRAINTS:
        raise KeyError(f"constraint {name!r} is unknown; known are {', '.join(sorted(_CONSTRAINTS))}")
    check = _CONSTRAINTS[name]
    expected = list(inspect.signature(check).parameters)[1:]
    if missing := [key for key in expected if arguments.get(key) is None]:
        raise ValueError(f"constraint {name} needs {', '.join(missing)}")
    return bool(text.strip()) and check(text, *(arguments[key] for key in expected))


def _compare(count: int, quantifier: str, number: int, tolerance: int) -> bool:
    match quantifier:
        case "at least":
            return count >= number
        case "at most":
            return count <= number
        case "around":
            return abs(count - number) <= tolerance
    raise ValueError(f"quantifier {quantifier!r} is unknown: write 'at least', 'at most' or 'around'")


def _has_paragraphs(text: str, number: int) -> bool:
    parts = "\n".join(map(str.strip, text.splitlines())).split("* * *")
    return len(parts) == number and all(map(str.strip, parts))


def _starts_paragraph(text: str, number: int, first_word: str, position: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == number and 1 <= position <= number and parts[position - 1].strip().startswith(first_word)


def _has_sections(text: str, number: int, splitter: str) -> bool:
    parts = text.split(splitter)
    return len(parts[1:] if parts[0] == "" else parts) == number


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _are_two(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1]


# The names of parameters are those of the rows.
_CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "verify_keywords": lambda text, keyword_list: all(word.lower() in text.lower() for word in keyword_list),
    "verify_keyword_frequency": lambda text, word, N: re.findall(r"\w+", text.lower()).count(word.lower()) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "validate_response_language": lambda text, language: is_in_language(text, language),
    "verify_paragraph_count": lambda text, N: _has_paragraphs(text, N),
    "validate_word_constraint": lambda text, N, quantifier: _compare(
        len(text.split()), quantifier, N, max(round(N * 0.1), 1)
    ),
    "verify_sentence_constraint": lambda text, N, quantifier: _compare(
        len(_SENTENCE_END.split(text)), quantifier, N, 1
    ),
    "validate_paragraphs": lambda text, N, first_word, i: _starts_paragraph(text, N, first_word, i),
    "verify_postscript": lambda text, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "validate_placeholders": lambda text, N: count_placeholders(text) >= N,
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": lambda text: any(">>" in line.partition("<<")[2] for line in text.split("\n")),
    "validate_choice": lambda text, options: any(
        text in option for option in ([options] if isinstance(options, str) else options)
    ),
    "validate_highlighted_sections": lambda text, N: sum(line.count("*") // 2 for line in text.split("\n")) >= N,
    "validate_sections": lambda text, N, section_splitter: _has_sections(text, N, section_splitter),
    "validate_json_format": _is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": _are_two,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: _compare(
        len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, 0
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}
