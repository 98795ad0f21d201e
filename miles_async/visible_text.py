"""Makes text of others safe to show: it cannot steer a terminal, hide in a line, or reorder it.

Models, data sets, clients, file names and logs of servers may contain control sequences, which move the cursor, colour
or retitle a terminal, and invisible characters, which show a text other than the one that is there. Unicode Technical
Report 36 describes what such characters do.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from functools import cache

MARKS_SHOWN = 8
"""Most combining marks in a row that are shown. Scripts stack up to four; more cover the lines around them."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Categories of control characters, format characters, half surrogate pairs, and separators of lines and paragraphs."""
_MARKS = frozenset(("Mn", "Me"))
"""Categories of combining marks."""
_DRAWN = re.compile("[\n\t\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd]")
"""Newline, tab, and signs of Arabic, Syriac and Kaithi: they are drawn although their category is of control or format
characters."""
_FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff"
"""Characters that are drawn as nothing although their category is not that of format characters."""
_FILLER = re.compile(f"[{_FILLERS}]")
_JOINER = re.compile("[\u200c\u200d]")
_SELECTOR = re.compile("[\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Variation selectors, which choose the glyph of the character before them."""
_STACKED = re.compile(f"{_JOINER.pattern}|{_SELECTOR.pattern}")
"""What may stand between combining marks without an end of their stack."""
_JOINED = re.compile("[\u0600-\u109f\u1780-\u18af\u1b00-\u1b7f\u2190-\u2bff\ua840-\ua8ff\ufe0f\U0001f000-\U0001faff]")
"""Letters of scripts that need joiners, and emoji."""
_SELECTED = re.compile(
    "[#*0-9\xa9\xae\u1000-\u109f\u1820-\u18aa\u203c\u2049\u2100-\u9fff\uf900-\ufaff\U0001f000-\U0001faff"
    "\U00020000-\U0003ffff]"
)
"""Symbols, ideographs, and letters of Myanmar and Mongolian."""
_FLAG = "\U0001f3f4"
_NATIONS = tuple("".join(chr(0xE0000 + ord(letter)) for letter in f"gb{name}\x7f") for name in ("eng", "sct", "wls"))
"""The flags of England, Scotland and Wales are spelled with tags."""


def visible_text(text: str) -> str:
    """Return `text` with visible symbols in place of control characters and of invisible characters.

    Newlines and tabs stay, and a carriage return and a newline become a newline. Joiners and variation selectors stay
    in emoji and in scripts that need them. Half surrogate pairs become question marks. Visible text stays as it is.
    """
    pattern = _CONTROLS if text.isascii() else _suspects()
    return pattern.sub(lambda run: "".join(_shown(run)), text)


def visible_json(line: bytes) -> bytes:
    """Return JSON with the same meaning, and with escapes in place of what `visible_text` replaces.

    `line` is in UTF-8, and its control characters below U+0020 are escaped already, as every encoder does.
    """
    if line.isascii() and b"\x7f" not in line:
        return line
    return _suspects().sub(lambda run: json.dumps(run[0])[1:-1] if _changes(run) else run[0], line.decode()).encode()


def _changes(run: re.Match[str]) -> bool:
    return run[0] != "".join(_shown(run))


def _shown(run: re.Match[str]) -> Iterator[str]:
    """Yield what is shown in place of a run of suspects."""
    text, whole = run[0], run.string
    before = whole[run.start() - 1 : run.start()]
    if before == _FLAG and text.startswith(_NATIONS):
        flag = text[: len(_NATIONS[0])]
        yield flag
        text, before = text[len(flag) :], flag[-1]
    stacked = 0
    for index, character in enumerate(text):
        if _is_hidden(before, character):
            after = text[index + 1 :] or whole[run.end() : run.end() + 1]
            yield "" if character == "\r" and after == "\n" else _symbol(character)
            stacked = 0
        else:
            stacked = stacked + 1 if _STACKED.match(character) or unicodedata.category(character) in _MARKS else 0
            if stacked <= MARKS_SHOWN:
                yield character
            elif stacked == MARKS_SHOWN + 1:
                yield "<more marks>"
        before = character


def _is_hidden(before: str, character: str) -> bool:
    """Return whether a character needs a symbol, after the character `before`."""
    if _JOINER.match(character):
        return not _JOINED.match(before)
    if _SELECTOR.match(character):
        return not _SELECTED.match(before)
    if _DRAWN.match(character):
        return False
    return unicodedata.category(character) in _INVISIBLE or _FILLER.match(character) is not None


def _symbol(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    # A response that ends within a character, and an undecodable file name, have half of a surrogate pair.
    return "?" if 0xD800 <= code < 0xE000 else f"<U+{code:04X}>"


@cache
def _suspects() -> re.Pattern[str]:
    """Return the pattern for runs of characters that may be invisible.

    It is built from the Unicode data of Python, which takes 20 ms. Above U+FFFF it has whole ranges of rare scripts,
    because regular expressions test single characters there one after another.
    """
    listed = "".join(
        re.escape(character)
        for character in map(chr, range(0x10000))
        if unicodedata.category(character) in _INVISIBLE | _MARKS and not _DRAWN.match(character)
    )
    return re.compile(f"[{listed}{_FILLERS}\U00010000-\U0001efff]+")
