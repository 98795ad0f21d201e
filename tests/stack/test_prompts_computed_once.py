"""The samples of a group that a CPU engine admits together: their prompt is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from miles_async.adapters.sglang.cpu_generation import compute_prompts_once


def test_the_same_prompt_is_computed_once_and_its_keys_and_logits_are_copied() -> None:
    engine = Engine()
    batch = engine.batch([[5, 6, 7], [8, 9], [5, 6, 7], [5, 6, 7]])
    output = compute_prompts_once(engine.compute, engine, batch)
    assert engine.computed() == [5, 6, 7, 8, 9]
    assert engine.cached_tokens(batch) == [[5, 6, 7], [8, 9], [5, 6, 7], [5, 6, 7]]
    assert output.next_token_logits.tolist() == [[7], [9], [7], [7]]


def test_the_model_gets_a_batch_of_the_sequences_that_are_computed() -> None:
    engine = Engine()
    compute_prompts_once(engine.compute, engine, engine.batch([[5, 6], [5, 6], [8]]))
    [part] = engine.batches
    assert (part.batch_size, part.seq_lens_sum, part.extend_num_tokens) == (2, 3, 3)
    assert part.extend_start_loc.tolist() == [0, 2]
    assert part.req_pool_indices.tolist() == [0, 2]
    assert part.positions.tolist() == [0, 1, 0]
    assert part.extend_seq_lens_cpu == [2, 1]
    assert part.rids == ["0", "2"]


def test_the_same_tokens_after_another_cached_prefix_are_computed_again() -> None:
    engine = Engine()
    batch = engine.batch([[5], [5], [5]], cached=[[90, 91], [90, 92], [90, 91]])
    output = compute_prompts_once(engine.compute, engine, batch)
    assert engine.computed() == [5, 5]
    assert output.next_token_logits.tolist() == [[5], [5], [5]]


def test_the_same_prompt_under_two_adapters_is_computed_twice() -> None:
    engine = Engine()
    compute_prompts_once(engine.compute, engine, engine.batch([[5], [5]], lora_ids=["one", "two"]))
    assert engine.computed() == [5, 5]


def test_prompts_whose_log_probabilities_are_asked_for_are_all_computed() -> None:
    engine = Engine()
    asked: dict[str, Any] = {"return_logprob": True, "extend_logprob_start_lens_cpu": [0, 2]}
    compute_prompts_once(engine.compute, engine, engine.batch([[5, 6], [5, 6]], **asked))
    assert engine.computed() == [5, 6, 5, 6]


class Engine:
    """SGLang's runner, with a model whose keys and values are its tokens, and whose logits are the last one."""

    def __init__(self) -> None:
        cache = object.__new__(MHATokenToKVPool)
        cache.k_buffer, cache.v_buffer = [torch.zeros(100, 1, 1)], [torch.zeros(100, 1, 1)]
        requests = object.__new__(ReqToTokenPool)
        requests.req_to_token = torch.zeros(10, 20, dtype=torch.int32)
        self.model_runner = SimpleNamespace(
            token_to_kv_pool=cache,
            req_to_token_pool=requests,
            is_generation=True,
            ps=SimpleNamespace(pp_size=1),
            lora_manager=None,
        )
        self.batches: list[ForwardBatch] = []

    def batch(
        self, prompts: Sequence[Sequence[int]], cached: Sequence[Sequence[int]] | None = None, **others: Any
    ) -> ForwardBatch:
        """A batch of sequences with these new tokens, after tokens in these slots of the cache."""
        prefixes = cached or [[]] * len(prompts)
        for row, slots in enumerate(prefixes):
            self.model_runner.req_to_token_pool.req_to_token[row, : len(slots)] = torch.tensor(slots)
        lengths, cached_lengths = [len(prompt) for prompt in prompts], [len(slots) for slots in prefixes]
        new, old = torch.tensor(lengths), torch.tensor(cached_lengths)
        values: dict[str, Any] = {
            "forward_mode": ForwardMode.EXTEND,
            "batch_size": len(prompts),
            "input_ids": torch.tensor([token for prompt in prompts for token in prompt]),
            "req_pool_indices": torch.arange(len(prompts)),
            "seq_lens": new + old,
            "seq_lens_sum": int((new + old).sum()),
            "out_cache_loc": torch.arange(1, 1 + sum(lengths)),
            "positions": torch.cat(
                [torch.arange(start, start + length) for start, length in zip(cached_lengths, lengths, strict=True)]
            ),
            "extend_num_tokens": sum(lengths),
            "extend_seq_lens": new,
            "extend_prefix_lens": old,
            "extend_start_loc": new.cumsum(0) - new,
            "extend_seq_lens_cpu": lengths,
            "extend_prefix_lens_cpu": cached_lengths,
            "lora_ids": [None] * len(prompts),
            "rids": [str(row) for row in range(len(prompts))],
            "capture_hidden_mode": CaptureHiddenMode.NULL,
        }
        return ForwardBatch(**(values | others))

    def compute(self, _: Engine, batch: ForwardBatch, __: None) -> LogitsProcessorOutput:
        self.batches.append(batch)
        for cache in (self.model_runner.token_to_kv_pool.k_buffer[0], self.model_runner.token_to_kv_pool.v_buffer[0]):
            cache[batch.out_cache_loc, 0, 0] = batch.input_ids.float()
        last = batch.extend_start_loc + batch.extend_seq_lens - 1
        return LogitsProcessorOutput(batch.input_ids[last][:, None])

    def computed(self) -> list[int]:
        """The tokens that the model computed in its only batch."""
        [batch] = self.batches
        tokens: list[int] = batch.input_ids.tolist()
        return tokens

    def cached_tokens(self, batch: ForwardBatch) -> list[list[int]]:
        """The tokens whose keys and values are in the slots of each sequence."""
        cache = self.model_runner.token_to_kv_pool
        assert torch.equal(cache.k_buffer[0], cache.v_buffer[0])
        found = cache.k_buffer[0][batch.out_cache_loc].flatten().int()
        return [part.tolist() for part in found.split(batch.extend_seq_lens_cpu)]
