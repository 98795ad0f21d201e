"""Whether a response keeps verifiable instructions (IFEval, 2311.07911), under that benchmark's own names.

`metadata["instruction_id_list"]` names them, `metadata["kwargs"]` has the arguments of each, in the same order. All 25
of the benchmark are here; an unknown name is an error, never a pass. Languages are told by langid (Lui and Baldwin,
2012), which gives the same answer every time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from miles_async.types import Sample


def ifeval(args: Any, sample: Sample) -> float:
    """The share of the instructions that the response keeps; 1 is all of them. Raises KeyError for an unknown one."""
    names: list[str] = sample.metadata["instruction_id_list"]
    arguments: list[dict[str, Any] | None] = sample.metadata.get("kwargs") or [{}] * len(names)
    if len(arguments) != len(names):
        raise ValueError(f"{len(names)} instructions come with {len(arguments)} kwargs")
    kept = [keeps(sample.response, name, given or {}) for name, given in zip(names, arguments, strict=True)]
    return sum(kept) / len(kept)


def keeps(response: str, name: str, arguments: dict[str, Any]) -> bool:
    if name not in _INSTRUCTIONS:
        raise KeyError(f"instruction {name!r} is unknown; known are {', '.join(sorted(_INSTRUCTIONS))}")
    given = {key: value for key, value in arguments.items() if value is not None}
    return bool(response.strip()) and _INSTRUCTIONS[name](response, **given)


def _compare(number: int, relation: str, limit: int) -> bool:
    return number < limit if relation == "less than" else number >= limit


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _word(text: str, word: str) -> int:
    return _count(rf"(?i)\b{re.escape(word)}\b", text)


def _is_json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return True


def _paragraphs(text: str) -> int:
    return len([part for part in re.split(r"\s*\*\*\*\s*", text) if part.strip()])


def _two_different(text: str) -> bool:
    answers = [part.strip() for part in text.split("******")]
    return len(answers) == 2 and all(answers) and answers[0] != answers[1]


def _unchanged_start(text: str, start: str) -> bool:
    return text.strip().lower().startswith(start.strip().lower())


def _in_language(text: str, language: str) -> bool:
    # Half a second to load: only runs that ask for it pay.
    import py3langid

    return bool(py3langid.classify(text)[0] == language.partition("-")[0].lower())


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    found = re.match(r"\W*([\w'-]+)", paragraphs[nth_paragraph - 1])
    return found is not None and found[1].lower() == first_word.lower()


_CONSTRAINED = "My answer is yes.", "My answer is no.", "My answer is maybe."

_INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_word(text, word) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: not any(_word(text, word) for word in forbidden_words),
    "keywords:frequency": lambda text, keyword, frequency, relation="at least": _compare(
        _word(text, keyword), relation, frequency
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
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: _paragraphs(text) == num_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "language:response_language": _in_language,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        _count(r"\[[^\[\]]+\]", text) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: postscript_marker.lower() in text.lower(),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        _count(r"(?m)^\s*(?:\*(?!\*)|-)\s*\S", text) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        _count(r"\*\*?[^*\n]+\*\*?", text) >= num_highlights
    ),
    "detectable_format:title": lambda text: bool(re.search(r"<<[^\n>]+>>", text)),
    "detectable_format:json_format": _is_json,
    "detectable_format:constrained_response": lambda text: any(choice in text for choice in _CONSTRAINED),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        _count(rf"{re.escape(section_spliter.strip())}\s*\d+", text) >= num_sections
    ),
    "combination:two_responses": _two_different,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: _unchanged_start(text, prompt_to_repeat),
    "startend:end_checker": lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.lower()),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "punctuation:no_comma": lambda text: "," not in text,
    "change_case:english_lowercase": lambda text: text == text.lower(),
    "change_case:english_capital": lambda text: text == text.upper(),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation="at least": _compare(
        _count(r"\b[A-Z]{2,}\b", text), capital_relation, capital_frequency
    ),
}
