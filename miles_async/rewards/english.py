"""Counts sentences and words of English text, and identifies languages, for the instructions of IFEval.

The benchmark uses NLTK and langdetect. NLTK loads tables from the internet, and langdetect draws at random; the
functions here do neither. They repeat the rules, not the tables: Punkt's (Kiss and Strunk, 2006) for sentences, and the
Penn Treebank's for words.
"""

from __future__ import annotations

import re

_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st sen rep gen col lt maj adm jr sr inc corp co ltd bros vs ave ft "
    "jan feb aug sept sep oct nov dec mon tues wed fri "
    "ala ariz calif colo conn fla ga ill kan ky mich minn nev okla ore pa tenn va vt wash wis".split()
)
"""Words that Punkt's English model knows to end with a period within a sentence."""
_STARTERS = frozenset(
    "according although among as at both but despite even for he her his how however i if in indeed instead it its "
    "many meanwhile moreover most my nevertheless of on one or our she similarly since so some that the their then "
    "there these they this those though thus to under we what when where which while who why with yet you your".split()
)
"""Words that begin a sentence if they are capitalised after an abbreviation."""
_CLOSING = "\"')]}*_\u201d\u2019"
_OPENING = "\"'([{*_\u201c\u2018"
_ACRONYM = re.compile(r"(?:[A-Z]\.)+[A-Z]|[ap]\.m|Ph\.D")
_NUMBER = re.compile(r"-?\d[\d.,-]*")


def count_sentences(text: str) -> int:
    """Return the number of sentences, as Punkt counts: it trusts every period that follows no known abbreviation."""
    words = text.split()
    return sum(map(_is_end, words, words[1:])) + bool(words)


def _is_end(word: str, following: str) -> bool:
    """Whether a sentence ends between two words that white space separates."""
    bare = word.rstrip(_CLOSING)
    if bare.endswith(("!", "?")):
        return True
    if not bare.endswith("."):
        return False
    stem, starter = bare[:-1].lstrip(_OPENING), following.lstrip(_OPENING)
    if _NUMBER.fullmatch(stem):
        return not starter[:1].islower()
    if len(stem) == 1 and stem.isalpha():
        return not starter[:1].isupper()
    abbreviated = stem.lower().rpartition("-")[2] in _ABBREVIATIONS or _ACRONYM.fullmatch(stem) is not None
    if abbreviated or stem.endswith("."):
        return starter[:1].isupper() and starter.lower().rstrip(",") in _STARTERS
    return True


_CONTRACTION = re.compile(r"(?i)(?<=[^'])('s|'m|'d|'ll|'re|'ve|n't)(?=$|[^\w'])")
_SEPARATE = re.compile(
    r"[\[\](){}<>?!;@#$%&\"\u201c\u201d\u2018\u2019«»…`]|--|[:,](?!\d)|\.\.\.|\.(?=[\[\](){}<>\"'\u201d\u2019]*$)"
)
_TWO_WORDS = re.compile(r"(?i)\b(can)(not)\b|\b(gim)(me)\b|\b(gon)(na)\b|\b(got)(ta)\b|\b(lem)(me)\b|\b(wan)(na)\b")


def count_capital_words(text: str) -> int:
    """Return the number of words without small letters, in the sense of the Penn Treebank.

    A hyphen or an apostrophe does not end a word, but a contraction is two: `NON-STOP` is one word, `DON'T` two.
    """
    return sum(_count_capital(word) for word in text.split())


def _count_capital(word: str) -> int:
    if not any(map(str.isupper, word)):
        return 0
    parts = _SEPARATE.sub(" ", word)
    parts = _TWO_WORDS.sub(lambda match: " ".join(filter(None, match.groups())), _CONTRACTION.sub(r" \1", parts))
    return sum(map(str.isupper, parts.split()))


def is_in_language(text: str, language: str) -> bool:
    """Return whether langid takes the text for the language, an ISO 639-1 code such as `en`.

    As in the benchmark, a text without letters passes.
    """
    # Loading the model takes half a second, so only runs that need it import it.
    import py3langid

    if not any(map(str.isalpha, text)):
        return True
    return bool(py3langid.classify(text)[0] == language.partition("-")[0].lower())
