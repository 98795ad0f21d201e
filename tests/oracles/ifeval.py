"""Records the verdicts of IFEval's own implementation, which `tests/stack/test_ifeval.py` compares with ours.

    python -m tests.oracles.ifeval FOLDER

FOLDER holds `instruction_following_eval` of google-research; `ifeval.json` names the commit. The implementation needs
absl-py, immutabledict, langdetect, and nltk with its data `punkt` and `punkt_tab`. The inputs are those of
`generated_inputs`. The inputs of the tests in FOLDER are not stored: the program compares the verdicts on them too,
and prints how many are equal.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_async.rewards.instructions import follows

VERDICTS = Path(__file__).with_name("ifeval.json")
SOURCE = "google-research/google-research instruction_following_eval 83282e4ec6e140949e0f51d04e279be7949409ff"

SENTENCES = (
    "The cat sat on the mat.",
    "Dr. Smith went to the U.S. in 1999!",
    "Is it true that 3.5 is less than 4?",
    "I paid $5, e.g. for bread and milk.",
    "HELLO WORLD, this is the NON-STOP show.",
    "Wait... what did he say?",
    '"Stop it!" she cried.',
    "We use C++ and Python at work.",
    "A category of cats: tabby, siamese, etc.",
    "I CAN'T believe it, he said; NASA's rocket CANNOT fly.",
    "My answer is yes.",
    "P.S. I love you.",
    "Mr. and Mrs. Jones met J. R. Miller at 5 p.m. yesterday.",
)
LANGUAGES = {
    "en": "The weather in London is often rainy, and people always carry an umbrella with them.",
    "de": "Das Wetter in Berlin ist heute sehr schön, und viele Leute gehen im Park spazieren.",
    "fr": "Le temps à Paris est souvent gris, mais les gens aiment se promener le long de la Seine.",
    "es": "El tiempo en Madrid suele ser muy caluroso en verano, y la gente sale por la noche.",
    "it": "Il tempo a Roma è spesso soleggiato e la gente ama mangiare il gelato in piazza.",
    "pt": "O tempo em Lisboa costuma ser agradável e as pessoas gostam de passear junto ao rio.",
    "ru": "Погода в Москве зимой очень холодная, и люди надевают тёплую одежду.",
    "hi": "दिल्ली में गर्मियों में मौसम बहुत गर्म होता है और लोग ठंडा पानी पीते हैं।",
    "bn": "ঢাকায় বর্ষাকালে অনেক বৃষ্টি হয় এবং মানুষ ছাতা নিয়ে বের হয়।",
    "ko": "서울의 겨울은 매우 춥고 사람들은 두꺼운 옷을 입습니다.",
    "th": "อากาศในกรุงเทพร้อนมากและผู้คนชอบดื่มน้ำเย็น",
    "vi": "Thời tiết ở Hà Nội vào mùa hè rất nóng và mọi người thích uống trà đá.",
    "ar": "الطقس في القاهرة حار جدا في الصيف والناس يشربون الماء البارد.",
    "fi": "Sää Helsingissä on talvella kylmä ja ihmiset käyttävät paksuja vaatteita.",
    "bg": "Времето в София през зимата е студено и хората носят дебели дрехи.",  # noqa: RUF001
}
BLOCKS = (
    "* one\n* two\n- three", "*\n* odd", "---\n* x", "-no space", " * indented\n\n* b", "**bold** and *italic*",
    "** **",
    "*a b*", "* a\n*b*", "***", "a\n***\nb", "***\na\n***\nb\n***", "a\n***\n***\nb", "a******b",
    "******\na\n******\nb",
    "a\n******\na", "a******b******c", "a******\n******b", "<<Title>>", "<< >>", "<<a> >b>>", "<<<x>>>", "<<a\nb>>",
    "[name] and [address]", "[[x]]", "[a\nb]", "[]", "] [", "SECTION 1\na\nSECTION 2\nb", "SECTION  3",
    "Section1 Section 2",
    '{"a": 1}', "```json\n[1, 2]\n```", "```\nNaN\n```", "```JSON {} ```", "{a: 1}", '"quoted"', '"', '"half',
    "'single'",
    "p.s. bye", "P. S. bye", "P.P.S. bye", "p. p. s more", "PS: bye", "one\n\ntwo\n\nthree", "one\n\n\n\ntwo",
    "'Tis, so\n\n\"Yes!\"",
    "12 34", "...", "ALL CAPS IN THIS ENGLISH SENTENCE, AS YOU CAN SEE.", "all small letters in this english sentence.",
)  # fmt: skip

HINTS = {
    "combination:two_responses": "***",
    "detectable_content:number_placeholders": "[",
    "detectable_content:postscript": "s",
    "detectable_format:constrained_response": "answer",
    "detectable_format:json_format": "`",
    "detectable_format:multiple_sections": "ection",
    "detectable_format:number_bullet_lists": "\n",
    "detectable_format:number_highlighted_sections": "*",
    "detectable_format:title": "<",
    "length_constraints:number_paragraphs": "***",
    "startend:quotation": '"',
}
"""What a block contains that matters for the instruction, compared without case."""

DIFFERENT: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("a keyword is a literal text", "keywords:existence", {"keywords": ["C++"]}, "We use the language C."),
    ("a keyword is a literal text", "keywords:existence", {"keywords": ["a.c"]}, "We know the abc."),
    ("a keyword is a literal text", "keywords:forbidden_words", {"forbidden_words": ["a.c"]}, "We know the abc."),
    ("a mark is a literal text", "detectable_content:postscript", {"postscript_marker": "N.B."}, "nobody"),
    ("a mark is a literal text", "detectable_format:multiple_sections",
     {"section_spliter": "Part (A)", "num_sections": 1}, "Part (A) 1"),
    *(("sentences are counted without Punkt's tables", "length_constraints:number_sentences",
       {"num_sentences": count, "relation": "at least"}, text)
      for count, text in (
          (3, "See version v. 2.0 of it. It is new."), (3, "Plan B. (See below.) It works."), (2, "A vs. B. The end."),
          (2, "Text.[1] More text."), (2, 'End."Next one.'), (2, "Prof. Dr. Who is in."))),
    ("langid takes the text for another language", "language:response_language", {"language": "en"}, "Hello there"),
)  # fmt: skip
"""Inputs on which the verdicts differ, each with the reason."""


def inputs_of(name: str, text: str, draw: random.Random) -> dict[str, Any]:
    """Draws arguments of the instruction for this response, so that about half of the verdicts are true."""
    few, relation = draw.randint(1, 3), draw.choice(["less than", "at least"])
    words = text.split() or ["none"]
    word = draw.choice([draw.choice(words).strip('.,:;!?*"[](){}<>') or "x", "cat", "Python", "the", "go"])
    # The implementation reads keywords as regular expressions; `test_ifeval.py` has keywords such as C++.
    word = "".join(filter(str.isalnum, word)) or "x"
    match name:
        case "keywords:existence":
            return {"keywords": [word, draw.choice(["a", "i", "cat"])]}
        case "keywords:forbidden_words":
            return {"forbidden_words": [word, "zebra"]}
        case "keywords:frequency":
            return {"keyword": word, "frequency": few, "relation": relation}
        case "keywords:letter_frequency":
            return {"letter": draw.choice("aeitzAS"), "let_frequency": few + 1, "let_relation": relation}
        case "length_constraints:number_words":
            return {"num_words": max(1, len(words) + draw.randint(-2, 2)), "relation": relation}
        case "length_constraints:number_sentences":
            return {"num_sentences": few + 1, "relation": relation}
        case "length_constraints:number_paragraphs":
            return {"num_paragraphs": few}
        case "length_constraints:nth_paragraph_first_word":
            count = len([part for part in text.split("\n\n") if part.strip()])
            first = draw.choice([*words[:1], "two", "yes"]).strip('."!,').lower()
            return {"num_paragraphs": count, "nth_paragraph": draw.randint(1, count), "first_word": first}
        case "language:response_language":
            return {"language": draw.choice([*LANGUAGES, "en", "en"])}
        case "detectable_content:number_placeholders":
            return {"num_placeholders": few}
        case "detectable_content:postscript":
            return {"postscript_marker": draw.choice(["P.S.", "P.P.S"])}
        case "detectable_format:number_bullet_lists":
            return {"num_bullets": draw.choice([1, 2, 3, 3])}
        case "detectable_format:number_highlighted_sections":
            return {"num_highlights": few}
        case "detectable_format:multiple_sections":
            return {"section_spliter": draw.choice(["SECTION", "Section"]), "num_sections": few}
        case "combination:repeat_prompt":
            return {"prompt_to_repeat": " ".join(words[: draw.choice([2, 3])]).upper() + draw.choice(["", "", "?"])}
        case "startend:end_checker":
            return {"end_phrase": draw.choice([" ".join(words[-2:]).strip('"'), "the end"])}
        case "change_case:capital_word_frequency":
            return {"capital_frequency": few, "capital_relation": relation}
        case _:
            return {}


def generated_inputs(names: list[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields `(instruction, arguments, response)`, about 30 of each instruction, the same ones in every call."""
    draw = random.Random(30)
    for name in names:
        for number in range(30):
            if name == "language:response_language":
                yield (name, *_about_language(number, draw))
                continue
            pool = BLOCKS if number % 2 else SENTENCES
            pieces = [draw.choice(pool) for _ in range(draw.randint(1, 3))]
            if number % 3 and name in HINTS:
                near = [block for block in BLOCKS + SENTENCES if HINTS[name] in block.lower()]
                pieces = [draw.choice(near) for _ in range(draw.randint(1, 2))]
            text = draw.choice(["\n", "\n\n", " "]).join(pieces)
            if name.startswith("change_case:english"):
                text = _cased(draw.choice(["\n", " "]).join(draw.sample(SENTENCES, 3)), name, number)
            yield name, inputs_of(name, text, draw), text


def _about_language(number: int, draw: random.Random) -> tuple[dict[str, Any], str]:
    language = list(LANGUAGES)[number % len(LANGUAGES)]
    asked = language if number < len(LANGUAGES) else draw.choice(list(LANGUAGES))
    return {"language": asked}, LANGUAGES[language]


def _cased(text: str, name: str, number: int) -> str:
    return text if number % 3 == 0 else (text.upper() if name.endswith("capital") else text.lower())


def record(folder: str) -> dict[str, Any]:
    """Returns the inputs and verdicts of the implementation in `folder`."""
    sys.path.insert(0, folder)
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    registry: dict[str, Any] = importlib.import_module(
        "instruction_following_eval.instructions_registry"
    ).INSTRUCTION_DICT
    _compare_own_tests(registry)
    generated = generated_inputs(sorted(registry))
    return {
        "source": SOURCE,
        "generated": [[*case, _verdict(registry, *case)] for case in generated],
        "different": [
            [reason, name, arguments, text, _verdict(registry, name, arguments, text)]
            for reason, name, arguments, text in DIFFERENT
        ],
    }


def _verdict(registry: dict[str, Any], name: str, arguments: dict[str, Any], text: str) -> bool:
    checker = registry[name](name)
    checker.build_description(**arguments)
    return bool(text.strip()) and bool(checker.check_following(text))


def _compare_own_tests(registry: dict[str, Any]) -> None:
    cases = _inputs_of_own_tests(registry)
    different = [case for case in cases if follows(case[2], case[0], case[1]) != _verdict(registry, *case)]
    equal = len(cases) - len(different)
    print(f"{equal} of {len(cases)} verdicts on the inputs of the tests in FOLDER are equal", *different)


def _inputs_of_own_tests(registry: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Runs the tests of the implementation, and returns what they check."""
    tests = importlib.import_module("instruction_following_eval.instructions_test")
    seen: list[tuple[str, dict[str, Any], str]] = []
    for name, kind in registry.items():
        _listen(kind, name, seen)
    unittest.TextTestRunner(stream=sys.stderr).run(unittest.defaultTestLoader.loadTestsFromModule(tests))
    for kind in registry.values():
        kind.build_description, kind.check_following = kind.unheard
    return seen


def _listen(kind: Any, name: str, seen: list[tuple[str, dict[str, Any], str]]) -> None:
    build, check = kind.build_description, kind.check_following
    kind.unheard = build, check

    def build_description(self: Any, **arguments: Any) -> Any:
        self.given = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
        return build(self, **arguments)

    def check_following(self: Any, text: str) -> Any:
        seen.append((name, self.given, text))
        return check(self, text)

    kind.build_description, kind.check_following = build_description, check_following


if __name__ == "__main__":
    recorded = record(sys.argv[1])
    lines = [f'"source": {json.dumps(recorded["source"])}']
    for key in ("generated", "different"):
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in recorded[key])
        lines.append(f'"{key}": [\n{rows}\n]')
    VERDICTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
