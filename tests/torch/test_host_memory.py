"""Host memory that is kept for copies of a GPU's tensors. The tensors of these tests are on the CPU."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles_async.adapters.megatron.model import host_memory
from miles_async.adapters.megatron.model.host_memory import HostMemory

TENSORS = [
    torch.arange(5.0, requires_grad=True),
    torch.ones(3, 4, dtype=torch.bfloat16).T,
    torch.zeros(0, 2),
    torch.tensor(7, dtype=torch.uint8),
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """With memory as on a GPU, but not pinned; gets an entry each time when the host waits."""
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("wait"))
    monkeypatch.setattr(host_memory, "on_cpu", lambda: False)
    monkeypatch.setattr(host_memory, "_pinned", lambda size: np.empty(size, np.uint8))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return waits


def test_copies_have_the_contents_of_their_tensors_after_one_wait(waits: list[str]) -> None:
    copies = HostMemory().copy(TENSORS)
    assert waits == ["wait"]
    for copy, tensor in zip(copies, TENSORS, strict=True):
        torch.testing.assert_close(copy, tensor.detach(), rtol=0, atol=0)
        assert not copy.requires_grad


def test_later_copies_use_the_same_memory_until_they_need_more(waits: list[str]) -> None:
    memory = HostMemory()
    first = memory.copy(TENSORS)
    second = memory.copy([2 * tensor for tensor in TENSORS])
    assert [one.data_ptr() for one in first] == [one.data_ptr() for one in second]
    assert second[0].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    (large,) = memory.copy([torch.full((1000,), 3.0)])
    assert large.sum() == 3000


def test_a_copy_is_saved_without_the_other_copies(waits: list[str]) -> None:
    copies = HostMemory().copy([torch.zeros(10_000), torch.ones(4)])
    file = io.BytesIO()
    torch.save(copies[1], file)
    assert file.tell() < 4000


def test_copies_on_a_cpu_have_their_own_memory() -> None:
    memory = HostMemory()
    [first], [second] = memory.copy(TENSORS[:1]), memory.copy(TENSORS[:1])
    assert first.data_ptr() != second.data_ptr() != TENSORS[0].data_ptr()
    assert first.tolist() == second.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
