"""Adapters on CPU: each row of a batch gets the adapter of its request, whatever the order of the requests."""

from __future__ import annotations

import torch

from miles_async.adapters.sglang.cpu_lora import BatchPlan, Order, Part, expand, shrink

RANK, INPUTS, OFFSETS = 2, 5, torch.tensor([0, 3, 7])
SLOTS = [1, 0, 1, 2, 0]
"""The slot of each row; that of 2 holds no adapter."""
SCALES = {0: 0.5, 1: 2.0}


def test_rows_whose_adapters_alternate_get_what_their_adapter_computes() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs, base = torch.randn(len(SLOTS), INPUTS, generator=draw), torch.randn(len(SLOTS), 7, generator=draw)
    a, b = torch.randn(3, 2 * RANK, INPUTS, generator=draw), torch.randn(3, 7, RANK, generator=draw)
    parts = [Part(slice(0, 2), 0, RANK, SCALES[0]), Part(slice(2, 4), 1, RANK, SCALES[1])]
    plan = BatchPlan({len(SLOTS): Order(torch.tensor([1, 4, 0, 2, 3]), parts)})

    computed = expand(shrink(inputs, a, plan, 2), b, plan, OFFSETS, base.clone())

    for row, slot in enumerate(SLOTS):
        hidden = SCALES.get(slot, 0.0) * inputs[row] @ a[slot].T
        added = torch.cat([b[slot, :3] @ hidden[:RANK], b[slot, 3:] @ hidden[RANK:]])
        torch.testing.assert_close(computed[row], base[row] + added)


def test_an_expert_gets_the_rows_of_each_adapter_that_chose_it() -> None:
    part = Part(slice(2, 5), 0, RANK, 1.0)
    assert part.among(torch.tensor([0, 2, 4, 6])).rows == slice(1, 3)
    assert part.among(torch.tensor([0, 1, 7])).rows == slice(2, 2)
