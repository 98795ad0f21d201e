"""A small in-memory search index: BM25 (Robertson and Zaragoza, 2009) over the documents of a JSONL file."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from miles_async.errors import UserError

K1, B = 1.2, 0.75
"""BM25's parameters: how quickly repeated words saturate, and how strongly long documents are penalized."""
_WORD = re.compile(r"\w+")


class SearchIndex:
    """An inverted index over a list of texts."""

    def __init__(self, documents: list[str]) -> None:
        self.documents = documents
        words = [_words(document) for document in documents]
        self._average = sum(map(len, words)) / max(len(words), 1) or 1.0
        self._lengths = [len(document_words) for document_words in words]
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """By word: the documents that contain it, and how often they do."""
        for number, document_words in enumerate(words):
            for word, count in Counter(document_words).items():
                self._postings[word].append((number, count))

    @staticmethod
    def from_file(path: str) -> SearchIndex:
        """Index a JSONL file of objects with a `text`. Raises UserError that names the first other line."""
        documents = []
        try:
            with Path(path).expanduser().open("rb") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        documents.append(str(msgspec.json.decode(line)["text"]))
                    except (msgspec.DecodeError, KeyError, TypeError) as error:
                        raise UserError(
                            f"tool_search_corpus {path}, line {number}: expected an object with a text"
                        ) from error
        except OSError as error:
            raise UserError(f"tool_search_corpus {path} cannot be read: {error.strerror}") from error
        return SearchIndex(documents)

    def search(self, query: str, most: int = 3) -> list[str]:
        """The `most` best documents, best first. Documents without a word of the query are left out."""
        scores: Counter[int] = Counter()
        for word in set(_words(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self.documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                length = 1 - B + B * self._lengths[number] / self._average
                scores[number] += rarity * count * (K1 + 1) / (count + K1 * length)  # type: ignore[assignment]
        best = sorted(scores, key=lambda number: (-scores[number], number))
        return [self.documents[number] for number in best[:most]]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
