"""The tokens that top-p and top-k sampling kept, for each token of a response.

Sampling with top-p or top-k draws each token from a few kept tokens, with their probabilities renormalized. The policy
that is trained is this distribution, so the learner needs the kept tokens to compute the same log-probabilities. SGLang
calls the kept tokens the sampling mask.

Example::

    mask = SamplingMask.from_rows([[7, 9], [], [3]])  # the second token came from a tool
    mask.counts, mask.token_ids  # [2, 0, 1], [7, 9, 3]
    mask.take(np.array([2])).rows()  # [[3]]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The kept tokens of n tokens, as two flat arrays. Treat the arrays as constants: samples share them."""

    counts: NDArray[np.int32]
    """[n] number of tokens that were kept when the token was sampled; 0 for a token that no model sampled."""
    token_ids: NDArray[np.int32]
    """[sum of `counts`] the kept token ids, those of the first token first."""

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int]]) -> SamplingMask:
        """Build a mask from one list of kept token ids per token, the form in which SGLang reports it."""
        counts = np.fromiter(map(len, rows), np.int32, len(rows))
        token_ids = np.fromiter((token for row in rows for token in row), np.int32, int(counts.sum()))
        return SamplingMask(counts, token_ids)

    @staticmethod
    def empty(tokens: int) -> SamplingMask:
        """The mask of `tokens` tokens that no model sampled."""
        return SamplingMask(np.zeros(tokens, np.int32), np.zeros(0, np.int32))

    @staticmethod
    def concatenate(masks: Iterable[SamplingMask]) -> SamplingMask:
        """Join masks in order."""
        joined = [SamplingMask.empty(0), *masks]  # np.concatenate needs at least one array
        return SamplingMask(
            np.concatenate([mask.counts for mask in joined]), np.concatenate([mask.token_ids for mask in joined])
        )

    def to_dict(self) -> dict[str, list[int]]:
        """Both arrays as lists, by name."""
        return {"counts": self.counts.tolist(), "token_ids": self.token_ids.tolist()}

    @staticmethod
    def from_dict(values: Mapping[str, Sequence[int]]) -> SamplingMask:
        """The inverse of `to_dict`. Raises KeyError for a missing array."""
        return SamplingMask(np.array(values["counts"], np.int32), np.array(values["token_ids"], np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.token_ids, other.token_ids)

    __hash__ = None  # type: ignore[assignment]

    @property
    def positions(self) -> NDArray[np.int64]:
        """[sum of `counts`] index of the token that each entry of `token_ids` belongs to, ascending."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def rows(self) -> list[list[int]]:
        """Return one list of kept token ids per token."""
        return [row.tolist() for row in np.split(self.token_ids, np.cumsum(self.counts)[:-1])] if len(self) else []

    def take(self, indices: NDArray[np.int64]) -> SamplingMask:
        """Return the mask of the tokens at `indices`, in that order."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        counts = self.counts[indices]
        new_starts = np.cumsum(counts, dtype=np.int64) - counts
        entries = np.repeat(starts[indices] - new_starts, counts) + np.arange(int(counts.sum()))
        return SamplingMask(counts, self.token_ids[entries])

    def keeps(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n] whether the kept tokens of each token include the token itself; `tokens` [n] are token ids."""
        hits = self.positions[self.token_ids == np.repeat(tokens, self.counts)]
        return np.bincount(hits, minlength=len(self.counts)) > 0

    def has_duplicates(self) -> bool:
        """Whether a token id occurs twice among the kept tokens of one token."""
        keys = self.positions << 32 | self.token_ids
        return len(np.unique(keys)) < len(keys)
