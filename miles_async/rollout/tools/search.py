"""A small search index in memory: BM25 (Robertson & Zaragoza, 2009) over the documents of a JSONL file."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from miles_async.errors import UserError

K1, B = 1.2, 0.75
"""How fast repeats saturate, and how much long documents are held back."""
_WORD = re.compile(r"\w+")


class SearchIndex:
    def __init__(self, documents: list[str]) -> None:
        self.documents = documents
        words = [_words(document) for document in documents]
        self._average = sum(map(len, words)) / max(len(words), 1) or 1.0
        self._lengths = [len(each) for each in words]
        self._places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """Per word: the documents that hold it, and how often."""
        for number, each in enumerate(words):
            for word, count in Counter(each).items():
                self._places[word].append((number, count))

    @staticmethod
    def of_file(path: str) -> SearchIndex:
        """One JSON object with a `text` per line. Raises UserError that names the line."""
        documents = []
        try:
            with Path(path).expanduser().open("rb") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        documents.append(str(msgspec.json.decode(line)["text"]))
                    except (msgspec.DecodeError, KeyError, TypeError) as error:
                        raise UserError(f"tool_search_corpus {path}, line {number}: no object with a text") from error
        except OSError as error:
            raise UserError(f"tool_search_corpus {path} cannot be read: {error.strerror}") from error
        return SearchIndex(documents)

    def search(self, query: str, most: int = 3) -> list[str]:
        """The documents that fit best, best first; none that shares no word with the query."""
        scores: Counter[int] = Counter()
        for word in set(_words(query)):
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self.documents) - len(places) + 0.5) / (len(places) + 0.5))
            for number, count in places:
                length = 1 - B + B * self._lengths[number] / self._average
                scores[number] += rarity * count * (K1 + 1) / (count + K1 * length)  # type: ignore[assignment]
        best = sorted(scores, key=lambda number: (-scores[number], number))
        return [self.documents[number] for number in best[:most]]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
