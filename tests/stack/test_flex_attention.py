"""The GPU's attention with common prefixes computes what the CPU's attention computes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from miles_async.adapters.megatron.model import flex_attention
from miles_async.adapters.megatron.model.flex_attention import FlexAttention, is_plain_attention, prefix_mask
from miles_async.adapters.megatron.model.local_layers import LocalAttention
from miles_async.adapters.megatron.model.packed_params import packed_params
from miles_async.adapters.megatron.model.process_groups import create_process_groups, destroy_process_groups
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.shared_prefixes import Pack
from tests.configuration import run_config

PREFIXES = Pack.of(np.array([150, 140, 160, 160, 90, 7]), np.array([0, 130, 135, 160, 40, 0]))
"""Sequences with common prefixes, two of them equal, and padding, which is a sequence too."""
PACKS = {
    "prefixes": PREFIXES,
    "whole sequences": Pack.of(np.array([5, 128, 130, 1])),
}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    learner = run_config().learner
    create_process_groups(rank=0, world_size=1, address="127.0.0.1", port=free_port(), learner=learner)
    yield
    destroy_process_groups()


def config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        use_cpu_initialization=True,
        **{"attention_dropout": 0.0} | settings,
    )


def attention(module: type, pack: Pack) -> list[Tensor]:
    """The result of a core attention and its gradients to queries, keys and values, from random inputs."""
    torch.manual_seed(0)
    tokens = len(pack.computed)
    inputs = [torch.randn(tokens, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    positions = torch.from_numpy(pack.positions[pack.computed])
    params = packed_params(pack, torch.device("cpu"), positions, local=True, shares_prefixes=True)
    out = module(config())(*inputs, None, packed_seq_params=params)
    return [out, *torch.autograd.grad(out, inputs, torch.randn_like(out))]


@pytest.mark.parametrize("name", PACKS)
def test_results_and_gradients_are_those_of_the_cpus_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = attention(LocalAttention, PACKS[name])
    monkeypatch.setattr(flex_attention, "has_gradients", lambda: True)
    # torch refuses to compute gradients on CPUs, because it compiles no kernel for them. Without a kernel it can.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    for ours, theirs in zip(attention(FlexAttention, PACKS[name]), expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("name", PACKS)
def test_the_mask_is_the_one_that_torch_computes_from_all_pairs_of_tokens(name: str) -> None:
    ours = prefix_mask(PACKS[name], torch.device("cpu"))
    theirs = create_block_mask(ours.mask_mod, None, None, *ours.seq_lengths, device="cpu")
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(ours, part), getattr(theirs, part)), part


SPECIAL = ({"window_size": (64, 0)}, {"softmax_type": "learnable"}, {"attention_dropout": 0.1}, {"mtp_num_layers": 1})


def test_models_with_special_attention_keep_their_own() -> None:
    assert is_plain_attention(config())
    assert not any(is_plain_attention(config(**settings)) for settings in SPECIAL)


def test_attention_is_compiled_for_more_cases_than_torch_allows_by_default_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex_attention, "flex_attention", lambda q, case: q + len(case))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flex_attention._compiled.cache_clear()
    try:
        with ThreadPoolExecutor(1) as thread:
            results = [thread.submit(flex_attention._attend, torch.zeros(1), case="x" * i) for i in range(20)]
        assert [result.result().item() for result in results] == list(range(20))
    finally:
        flex_attention._compiled.cache_clear()
