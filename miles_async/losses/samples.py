"""The trained tokens of a micro-batch as lists with one tensor per sample, which functions in slime's form take."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_async.batching.batch import PackedBatch

Scalar = TypeVar("Scalar", bound=np.generic)


class SampleLayout:
    """Where the samples of a micro-batch lie, and how columns [m] of trained tokens become lists of samples.

    A response begins with the first trained token of its sample and ends with the last one. Samples without trained
    tokens are left out. With context parallelism every rank has the whole responses.
    """

    def __init__(self, batch: PackedBatch, device: torch.device) -> None:
        """`batch` is a micro-batch with m trained tokens. The tensors are on `device`."""
        self._device = device
        counts = np.bincount(batch.sequences, minlength=len(batch.lengths))
        starts = np.cumsum(batch.lengths) - batch.lengths
        ends = np.cumsum(counts)
        present = np.flatnonzero(counts)
        begin = starts[present]
        first, end = batch.targets[ends[present] - counts[present]], batch.targets[ends[present] - 1] + 1
        self.total_lengths: list[int] = (end - begin).tolist()
        """[n] tokens of each sample, from its first one to the end of its response."""
        self.response_lengths: list[int] = (end - first).tolist()
        """[n] tokens of each response."""
        offsets = np.cumsum(end - first) - (end - first)
        sample = np.repeat(np.arange(len(present)), counts[present])
        self._trained = self._tensor(batch.targets - first[sample] + offsets[sample])
        self._first_trained = ends[present] - counts[present]
        spans = list(zip(begin.tolist(), end.tolist(), strict=True))
        self.tokens = [self._tensor(batch.tokens[start:stop]) for start, stop in spans]
        """[n] ids of each sample, prompt and response."""
        self.rows: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *(np.arange(*span) for span in spans)])
        """[sum(total_lengths)] indices of all these tokens in the micro-batch."""

    def spread(self, column: Tensor) -> Tensor:
        """[sum(response_lengths)] entries of all response tokens: `column` [m], and 0 for tokens without training."""
        return column.new_zeros(sum(self.response_lengths)).index_copy(0, self._trained, column)

    def lists(self, column: Tensor) -> list[Tensor]:
        """`spread(column)`, divided into the responses."""
        return list(self.spread(column).split(self.response_lengths))

    def of_samples(self, column: Tensor) -> Tensor:
        """[n] entry of the first trained token of each sample, for a `column` [m] that is constant in each sample."""
        return column[self._tensor(self._first_trained)]

    def trained(self, flat: Tensor) -> Tensor:
        """[m] entries of the trained tokens; `flat` [sum(response_lengths)] has those of all response tokens."""
        return flat[self._trained]

    def _tensor(self, array: NDArray[Scalar]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
