"""The batched attention of the engine on CPU, compared with one plain computation per sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_async.adapters.sglang import cpu_attention

WIDTH = 8
SCALING = 0.3
CONTEXT = 400

sequence = st.tuples(st.integers(0, 120), st.integers(1, 60))
"""Cached tokens and new tokens."""


@settings(max_examples=15)
@given(st.lists(sequence, min_size=1, max_size=8), st.sampled_from([(4, 4), (6, 2), (9, 3), (4, 1)]))
@example([(0, 11)] * 20, (4, 2))
@example([(43, 1)] * 7 + [(0, 44)], (9, 3))
@example([(0, 5), (40, 5), (0, 45), (300, 60)], (9, 3))
def test_extended_sequences_attend_as_if_each_were_alone(
    sequences: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    new = [tokens for _, tokens in sequences]
    cache = Cache(sequences, kv_heads=heads[1])
    query = torch.randn(sum(new), heads[0], WIDTH)
    output = cpu_attention.extend(
        refuse, backend(), query, torch.empty_like(query), *cache.tensors(), cache.lengths - torch.tensor(new),
        torch.tensor(new), scaling=SCALING, enable_gqa=heads[0] != heads[1], causal=True,
    )  # fmt: skip
    torch.testing.assert_close(output, cache.expected(query, new), rtol=0, atol=1e-5)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=12), st.sampled_from([(4, 4), (9, 3)]))
@example([12] * 192, (4, 2))
def test_decoded_tokens_attend_as_if_each_sequence_were_alone(cached: list[int], heads: tuple[int, int]) -> None:
    cache = Cache([(tokens, 1) for tokens in cached], kv_heads=heads[1])
    query = torch.randn(len(cached), heads[0], WIDTH)
    output = cpu_attention.decode(
        refuse, backend(), query, torch.empty_like(query), *cache.tensors(), scaling=SCALING, enable_gqa=True,
        causal=False,
    )  # fmt: skip
    torch.testing.assert_close(output, cache.expected(query, [1] * len(cached)), rtol=0, atol=1e-5)


def test_a_cache_of_another_dtype_is_converted() -> None:
    cache = Cache([(5, 1), (9, 1)], kv_heads=2)
    cache.keys, cache.values = cache.keys.bfloat16(), cache.values.bfloat16()
    query = torch.randn(2, 4, WIDTH)
    output = cpu_attention.decode(refuse, backend(), query, torch.empty_like(query), *cache.tensors(), scaling=SCALING)
    torch.testing.assert_close(output, cache.expected(query, [1, 1]), rtol=0, atol=1e-5)


def test_queries_in_bfloat16_have_a_mask_in_bfloat16() -> None:
    cache = Cache([(5, 1), (9, 1)], kv_heads=2)
    query = torch.randn(2, 4, WIDTH).bfloat16()
    output = cpu_attention.decode(refuse, backend(), query, torch.empty_like(query), *cache.tensors(), scaling=SCALING)
    torch.testing.assert_close(output.float(), cache.expected(query, [1, 1]), rtol=0, atol=0.03)


def test_layers_of_one_pass_share_the_plan_and_the_next_pass_makes_its_own() -> None:
    cache = Cache([(5, 1), (9, 1)], kv_heads=2)
    engine, query = backend(), torch.randn(2, 4, WIDTH)

    def attend() -> torch.Tensor:
        return cpu_attention.decode(refuse, engine, query, torch.empty_like(query), *cache.tensors(), scaling=SCALING)

    attend()
    plan = engine.forward_metadata
    attend()
    assert engine.forward_metadata is plan
    cache.lengths -= 1  # SGLang changes the lengths in place
    cpu_attention.forget_plan(None, engine, None)
    torch.testing.assert_close(attend(), cache.expected(query, [1, 1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "option", [{"sliding_window_size": 0}, {"encoder_lens": torch.tensor([1])}, {"causal": False}], ids=str
)
def test_unsupported_attention_is_left_to_sglang(option: dict[str, Any]) -> None:
    cache = Cache([(0, 1)], kv_heads=2)
    query = torch.randn(1, 4, WIDTH)
    theirs = torch.zeros(1)
    options = {"scaling": SCALING, "causal": True} | option
    arguments: tuple[Any, ...] = (lambda *_, **__: theirs, backend(), query, torch.empty_like(query), *cache.tensors())
    extend_arguments = (*arguments, torch.tensor([0]), torch.tensor([1]))
    assert cpu_attention.extend(*extend_arguments, **options) is theirs
    if "causal" not in option:
        assert cpu_attention.decode(*arguments, **options) is theirs


def test_buckets_bound_padding_and_memory() -> None:
    lengths = [20, 30, 40, 50, 2000, 2900] + [1000] * 100
    buckets = list(cpu_attention.divide(lengths, [1] * len(lengths)))
    assert sorted(index for members in buckets for index in members) == list(range(len(lengths)))
    for members in buckets:
        longest, shortest = (f(lengths[index] for index in members) for f in (max, min))
        assert longest <= max(cpu_attention.SHORT, cpu_attention.PADDING_RATIO * shortest)
        assert longest * len(members) <= cpu_attention.MAX_PADDED_KEYS


class Cache:
    """Keys and values of sequences in random slots of a cache. Unused slots contain NaN."""

    def __init__(self, sequences: list[tuple[int, int]], kv_heads: int) -> None:
        torch.manual_seed(0)
        self.lengths = torch.tensor([cached + new for cached, new in sequences])
        used = int(self.lengths.sum())
        slots = torch.randperm(used + 50)[:used]
        self.keys = torch.full((used + 50, kv_heads, WIDTH), torch.nan)
        self.values = self.keys.clone()
        self.keys[slots] = torch.randn(used, kv_heads, WIDTH)
        self.values[slots] = torch.randn(used, kv_heads, WIDTH)
        self.rows = torch.randperm(len(sequences) + 3)[: len(sequences)]
        self.req_to_token = torch.zeros(len(sequences) + 3, CONTEXT, dtype=torch.int32)
        for row, of_sequence in zip(self.rows, slots.split(self.lengths.tolist()), strict=True):
            self.req_to_token[row, : len(of_sequence)] = of_sequence

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.keys, self.values, self.req_to_token, self.rows, self.lengths

    def expected(self, query: torch.Tensor, new: list[int]) -> torch.Tensor:
        """Attention by its definition, one sequence at a time."""
        output = []
        group = query.shape[1] // self.keys.shape[1]
        lengths = self.lengths.tolist()
        for of_request, length, own in zip(self.rows, lengths, query.split(new), strict=True):
            slots = self.req_to_token[of_request, :length].long()
            keys = self.keys[slots].float().repeat_interleave(group, dim=1)
            values = self.values[slots].float().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", own.float(), keys) * SCALING
            later = torch.ones(len(own), length, dtype=torch.bool).triu(length - len(own) + 1)
            output.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values))
        return torch.cat(output)


def backend() -> Any:
    return SimpleNamespace(forward_metadata=None)


def refuse(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own attention was called")
