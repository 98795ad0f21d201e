"""Which tokens of a pack each rank computes where ranks share its sequences (context parallelism)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def context_parallel_indices(lengths: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """[parts, T / parts] the places in the pack that each rank computes, rising.

    Every sequence is cut into `2 * parts` equal pieces; rank r takes the r-th piece and the r-th from the end, so that
    causal attention costs all ranks the same. Megatron's rotary embedding and Transformer Engine count on this order.
    `lengths` are divisible by `2 * parts`, but for a single part.
    """
    total = int(lengths.sum())
    if parts == 1:
        return np.arange(total)[None]
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    piece = within // np.repeat(lengths // (2 * parts), lengths)
    owner = np.minimum(piece, 2 * parts - 1 - piece)
    return np.argsort(owner, kind="stable").reshape(parts, -1)
