"""Words that were replaced by standard terms do not come back (`retired_words.txt`), and pages have short sentences."""

from __future__ import annotations

import io
import json
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("retired_words.txt")
ENTRIES = [line.split(" ", 1) for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
FOLDERS = ("miles_async", "workers", "tests", "benchmarks", "dashboards", "docs", "configs", "examples", "requirements")
SUFFIXES = {".py", ".md", ".ipynb", ".toml", ".yaml", ".yml", ".sh", ".js", ".html", ".css"}
EXEMPT = {"CHANGELOG.md", "test_retired_words.py"}


def files() -> list[Path]:
    """Every text file of the project, without generated ones and the changelog, which names what was renamed."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = [*ROOT.glob("*.*"), ROOT / "Makefile", *inside]
    return [path for path in found if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile")]


def markdown_of(notebook: str) -> str:
    cells = json.loads(notebook)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


TEXTS = {path.relative_to(ROOT): path.read_text() for path in files() if path.name not in EXEMPT}
PHRASES = [phrase.lower() for kind, phrase in ENTRIES if kind == "text"]
NAMES = {name for kind, name in ENTRIES if kind == "name"}
PATTERNS = [re.compile(pattern, re.IGNORECASE) for kind, pattern in ENTRIES if kind == "page"]
LONGEST_SENTENCE = 40
"""In words. Code in a sentence counts as one word."""
# MkDocs and the study write other pages.
PROSE = {path: text for path, text in TEXTS.items() if path.suffix == ".md" and path.name != "staleness.md"}
PROSE |= {path: markdown_of(text) for path, text in TEXTS.items() if path.suffix == ".ipynb"}


def sentences(page: str) -> list[str]:
    """The sentences of a page outside code, tables and links."""
    text = re.sub(r"^```.*?^```$|^(?:\||    )[^\n]*$", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |> |#))", text)
    return [one for part in paragraphs for one in re.split(r"(?<=[.:;?!])\s", " ".join(part.split()))]


def phrases_in(text: str) -> list[str]:
    words = " ".join(text.lower().split())
    # Most phrases occur nowhere, and a plain search for them is faster than a regular expression.
    return [phrase for phrase in PHRASES if phrase in words and re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", words)]


def identifiers(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string.lstrip("_") for token in tokens if token.type == tokenize.NAME}


def test_a_retired_phrase_is_nowhere() -> None:
    found = {str(path): phrases_in(text) for path, text in TEXTS.items()}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}


def test_a_retired_name_is_no_identifier() -> None:
    # Only files that mention a name at all, perhaps in a string or a comment, have to be tokenized, which is slow.
    mentioned = re.compile(rf"(?<![A-Za-z0-9])_*(?:{'|'.join(NAMES)})(?!\w)")
    code = {path: text for path, text in TEXTS.items() if path.suffix == ".py" and mentioned.search(text)}
    found = {str(path): identifiers(text) & NAMES for path, text in code.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_retired_pattern_is_in_no_sentence_of_a_page() -> None:
    found = {
        str(path): [one for one in sentences(text) if any(pattern.search(one) for pattern in PATTERNS)]
        for path, text in PROSE.items()
    }
    assert {path: ones for path, ones in found.items() if ones} == {}


def test_the_sentences_of_pages_are_short() -> None:
    found = {
        str(path): [one for one in sentences(text) if len(one.split()) > LONGEST_SENTENCE]
        for path, text in PROSE.items()
    }
    assert {path: ones for path, ones in found.items() if ones} == {}


def test_sentences_are_found_outside_code_and_tables() -> None:
    page = "# A page\n\nIt [goes](on.md) with `a b c`. Then\nit ends: here.\n\n```\nls a\n```\n\n| a | b |\n\n- One.\n"
    assert [one for one in sentences(page) if one] == [
        "# A page",
        "It goes with code.",
        "Then it ends:",
        "here.",
        "- One.",
    ]


def test_every_entry_of_the_list_has_a_known_kind() -> None:
    assert {kind for kind, _ in ENTRIES} == {"text", "name", "page"}
