"""Checks whether a response follows verifiable instructions (IFEval, arXiv 2311.07911).

`metadata["instruction_id_list"]` holds the names of the instructions as in the benchmark, and `metadata["kwargs"]` the
arguments of each instruction, in the same order. All 25 instructions of the benchmark are implemented; an unknown name
is an error, never a pass. langid (Lui and Baldwin, 2012) identifies languages, because its answers are deterministic.

Responses are read in linear time, because these checks share a process with the event loop: a pattern must not be able
to read the same text again from many starting points.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from miles_async.types import Sample


def ifeval(args: Any, sample: Sample) -> float:
    """Return the fraction of instructions that the response follows, from 0 to 1.

    Raises KeyError for an unknown instruction, and ValueError if names and arguments differ in number.
    """
    names: list[str] = sample.metadata["instruction_id_list"]
    arguments: list[dict[str, Any] | None] = sample.metadata.get("kwargs") or [{}] * len(names)
    if len(arguments) != len(names):
        raise ValueError(f"metadata has {len(names)} instructions, but {len(arguments)} kwargs")
    followed = [follows(sample.response, name, given or {}) for name, given in zip(names, arguments, strict=True)]
    return sum(followed) / len(followed)


def follows(response: str, name: str, arguments: dict[str, Any]) -> bool:
    """Return whether the response follows the instruction `name`. Raises KeyError if the name is unknown."""
    if name not in _INSTRUCTIONS:
        raise KeyError(f"instruction {name!r} is unknown; known are {', '.join(sorted(_INSTRUCTIONS))}")
    given = {key: value for key, value in arguments.items() if value is not None}
    return bool(response.strip()) and _INSTRUCTIONS[name](response, **given)


def _compare(number: int, relation: str, limit: int) -> bool:
    return number < limit if relation == "less than" else number >= limit


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _count_word(text: str, word: str) -> int:
    return _count(rf"(?i)\b{re.escape(word)}\b", text)


def _is_json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _count_paragraphs(text: str) -> int:
    return len([part for part in text.split("***") if part.strip()])


def _has_two_different_answers(text: str) -> bool:
    answers = [part.strip() for part in text.split("******")]
    return len(answers) == 2 and all(answers) and answers[0] != answers[1]


def _starts_with(text: str, start: str) -> bool:
    return text.strip().lower().startswith(start.strip().lower())


def _is_in_language(text: str, language: str) -> bool:
    # Loading the model takes half a second, so only runs that need it import it.
    import py3langid

    return bool(py3langid.classify(text)[0] == language.partition("-")[0].lower())


def _paragraph_starts_with(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    found = re.match(r"\W*([\w'-]+)", paragraphs[nth_paragraph - 1])
    return found is not None and found[1].lower() == first_word.lower()


_TITLE = re.compile(r"(?m)(?:^|>)(?>[^\n>]*?<<)[^\n>]++>>")
"""A title such as `<<Poem>>`. Each stretch of text between two `>` is read once: thousands of `<` take linear time."""
_ALLOWED_ANSWERS = "My answer is yes.", "My answer is no.", "My answer is maybe."

_INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_count_word(text, word) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_count_word(text, word) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation="at least": _compare(
        _count_word(text, keyword), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation="at least": _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_words": lambda text, num_words, relation="at least": _compare(
        _count(r"\w+", text), relation, num_words
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation="at least": _compare(
        _count(r"[^.!?\s][^.!?]*(?:[.!?]+|$)", text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: _count_paragraphs(text) == num_paragraphs,
    "length_constraints:nth_paragraph_first_word": _paragraph_starts_with,
    "language:response_language": _is_in_language,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        _count(r"\[[^\[\]]+\]", text) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: postscript_marker.lower() in text.lower(),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        _count(r"(?m)^[^\S\n]*+(?:\*(?!\*)|-)\s*\S", text) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        _count(r"\*\*?[^*\n]+\*\*?", text) >= num_highlights
    ),
    "detectable_format:title": lambda text: _TITLE.search(text) is not None,
    "detectable_format:json_format": _is_json,
    "detectable_format:constrained_response": lambda text: any(choice in text for choice in _ALLOWED_ANSWERS),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        _count(rf"{re.escape(section_spliter.strip())}\s*\d+", text) >= num_sections
    ),
    "combination:two_responses": _has_two_different_answers,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: _starts_with(text, prompt_to_repeat),
    "startend:end_checker": lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.lower()),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "punctuation:no_comma": lambda text: "," not in text,
    "change_case:english_lowercase": lambda text: text == text.lower(),
    "change_case:english_capital": lambda text: text == text.upper(),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation="at least": _compare(
        _count(r"\b[A-Z]{2,}\b", text), capital_relation, capital_frequency
    ),
}
