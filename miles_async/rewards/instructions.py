"""Checks whether a response follows verifiable instructions (IFEval, arXiv 2311.07911).

`metadata["instruction_id_list"]` holds the names of the instructions as in the benchmark, and `metadata["kwargs"]` the
arguments of each instruction, in the same order. All 25 instructions of the benchmark are implemented, and follow the
strict mode of its implementation (google-research, `instruction_following_eval`); an unknown name is an error, never a
pass. Three things differ. Keywords, section marks and postscript marks are literal texts, not regular expressions.
langid (Lui and Baldwin, 2012) identifies languages. `rewards/english.py` counts sentences without Punkt's tables.

Responses are read in linear time, because these checks share a process with the event loop: a pattern must not be able
to read the same text again from many starting points.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from miles_async.rewards.english import count_capital_words, count_sentences, is_in_language


def follows(response: str, name: str, arguments: dict[str, Any]) -> bool:
    """Return whether the response follows the instruction `name`; an empty response follows none.

    Arguments that are None count as missing. Raises KeyError if the name is unknown, and ValueError if an argument is
    missing, unknown or invalid.
    """
    if name not in _INSTRUCTIONS:
        raise KeyError(f"instruction {name!r} is unknown; known are {', '.join(sorted(_INSTRUCTIONS))}")
    check = _INSTRUCTIONS[name]
    given = {key: value for key, value in arguments.items() if value is not None}
    expected = list(inspect.signature(check).parameters)[1:]
    if sorted(given) != sorted(expected):
        # The benchmark draws an argument at random that a row does not have, which the prompt cannot have asked for.
        raise ValueError(f"instruction {name} takes {expected or 'no arguments'}, but kwargs has {sorted(given)}")
    return bool(response.strip()) and check(response, **given)


def _compare(number: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"relation {relation!r} is unknown: write 'less than' or 'at least'")
    return number < limit if relation == "less than" else number >= limit


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _contains_word(text: str, word: str) -> bool:
    # Unlike \b, the conditions also hold beside C++.
    return re.search(rf"(?i)(?<!\w){re.escape(word)}(?!\w)", text) is not None


def _count_letter(text: str, letter: str) -> int:
    if len(letter) != 1 or letter.isspace():
        raise ValueError(f"letter {letter!r} is not one visible character")
    return text.lower().count(letter.lower())


def count_placeholders(text: str) -> int:
    return sum(map(_count_bracketed, text.split("\n")))


def _count_bracketed(line: str) -> int:
    """Count `[...]` from left to right. A regular expression would read a line of opening brackets again from each."""
    count, end = 0, -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
    return count


def _has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    # Only these two marks may contain spaces.
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker) or re.escape(marker.lower())
    return re.search(pattern, text.lower()) is not None


def _count_bullets(text: str) -> int:
    return _count(r"(?m)^[^\S\n]*+\*[^*].*$", text) + _count(r"(?m)^[^\S\n]*+-.*$", text)


def _count_highlights(text: str) -> int:
    parts = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in parts)


def _has_title(text: str) -> bool:
    """Whether a line has text between the first `<<` and the last `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].strip("<>").strip():
            return True
    return False


def _is_json(text: str) -> bool:
    body = text.strip()
    for mark in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(mark)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _parts(text: str, divider: str) -> list[str]:
    """Return the texts between dividers, or nothing if two dividers have only white space between them."""
    parts = [part.strip() for part in text.split(divider)]
    return [part for part in parts if part] if all(parts[1:-1]) else []


def _has_two_different_answers(text: str) -> bool:
    answers = _parts(text, "******")
    return len(answers) == 2 and answers[0] != answers[1]


def _paragraph_starts_with(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if count != num_paragraphs or not 1 <= nth_paragraph <= count or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


_ALLOWED_ANSWERS = "My answer is yes.", "My answer is no.", "My answer is maybe."

_INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(
        re.search(f"(?i){re.escape(word)}", text) is not None for word in keywords
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_contains_word(text, word) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        _count(f"(?i){re.escape(keyword.strip())}", text), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        _count_letter(text, letter), let_relation, let_frequency
    ),
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        _count(r"\w+", text), relation, num_words
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: len(_parts(text, "***")) == num_paragraphs,
    "length_constraints:nth_paragraph_first_word": _paragraph_starts_with,
    "language:response_language": is_in_language,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        count_placeholders(text) >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: _count_bullets(text) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        _count_highlights(text) >= num_highlights
    ),
    "detectable_format:title": _has_title,
    "detectable_format:json_format": _is_json,
    "detectable_format:constrained_response": lambda text: any(choice in text for choice in _ALLOWED_ANSWERS),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        _count(rf"{re.escape(section_spliter.strip())}\s?\d+", text) >= num_sections
    ),
    "combination:two_responses": _has_two_different_answers,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "punctuation:no_comma": lambda text: "," not in text,
    "change_case:english_lowercase": lambda text: text.islower() and is_in_language(text, "en"),
    "change_case:english_capital": lambda text: text.isupper() and is_in_language(text, "en"),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compare(
        count_capital_words(text), capital_relation, capital_frequency
    ),
}
