"""The plugin's changes to SGLang's generation on CPU: shared prompts, products with weights, and sampling."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_async.adapters.sglang import cpu_generation

LONG = list(range(cpu_generation.MIN_SHARED_TOKENS))


def test_samples_of_one_prompt_wait_until_one_of_them_has_filled_the_cache() -> None:
    scheduler = Scheduler([LONG, LONG, LONG, [7, *LONG], LONG])
    assert scheduler.next_batch() == [0, 3]
    assert scheduler.next_batch() == [1]
    assert scheduler.next_batch() == [2]


def test_requests_that_did_not_fit_stay_in_the_queue_behind_those_that_waited_for_their_prompt() -> None:
    scheduler = Scheduler([LONG, LONG, [7, *LONG]], room=1)
    assert scheduler.next_batch() == [0]
    assert [request.number for request in scheduler.waiting_queue] == [1, 2]


def test_a_prompt_that_is_computed_in_chunks_is_not_computed_a_second_time() -> None:
    scheduler = Scheduler([LONG, [7, *LONG]])
    scheduler.chunked_req = request(9, LONG)
    assert scheduler.next_batch() == [1]
    scheduler.chunked_req = None
    assert scheduler.next_batch() == [0]


@pytest.mark.parametrize("disabled", [True, False])
def test_short_prompts_and_engines_without_prefix_cache_do_not_wait(disabled: bool) -> None:
    scheduler = Scheduler([LONG if disabled else LONG[1:]] * 3)
    scheduler.disable_radix_cache = disabled
    assert scheduler.next_batch() == [0, 1, 2]


def test_the_same_prompt_under_another_cache_key_is_another_prompt() -> None:
    scheduler = Scheduler([LONG, LONG])
    scheduler.waiting_queue[1].extra_key = "|epoch=1"
    assert scheduler.next_batch() == [0, 1]


def test_requests_that_wait_are_not_lost_when_the_scheduler_fails() -> None:
    scheduler = Scheduler([LONG, LONG])

    def fail(_: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        cpu_generation.share_prompts(fail, scheduler)
    assert sorted(request.number for request in scheduler.waiting_queue) == [0, 1]


def test_tokens_are_sampled_with_their_probabilities() -> None:
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.0, 0.25, 1e-3, 0.249, 0.0])
    tokens = cpu_generation.sample_tokens(refuse, probs.expand(200_000, -1))
    assert tokens.dtype is torch.int32
    shares = torch.bincount(tokens, minlength=6) / len(tokens)
    torch.testing.assert_close(shares, probs, rtol=0, atol=4e-3)
    assert shares[1] == shares[5] == 0
    assert shares[3] > 0


@pytest.mark.parametrize("drawn", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("scale", [1.0, 0.7, 1e-30])
def test_the_first_and_the_last_possible_token_bound_the_samples(
    drawn: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype: torch.full(shape, drawn, dtype=dtype))
    probs = scale * torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]])
    assert cpu_generation.sample_tokens(refuse, probs).tolist() == ([1, 2] if drawn == 0 else [3, 2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_probabilities_that_are_not_valid_are_left_to_sglang(value: float) -> None:
    probs = torch.tensor([[0.5, 0.5], [value, 0.0]])
    assert cpu_generation.sample_tokens(lambda *_: torch.tensor([9]), probs) == torch.tensor([9])


def test_requests_with_a_sampling_seed_are_left_to_sglang() -> None:
    seeded = cpu_generation.sample_tokens(lambda *_: torch.tensor([9]), torch.ones(1, 3), torch.tensor([5]))
    assert seeded == torch.tensor([9])


@pytest.mark.parametrize("rows", [0, 1, 5, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_and_logits_are_those_of_torch(rows: int, bias: bool) -> None:
    layer = torch.nn.Linear(48, 40, bias=bias).requires_grad_(False)
    x = torch.randn(rows, 96)[:, :48]
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    actual = cpu_generation.apply_linear(refuse, None, layer, x, layer.bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)

    head = ParallelLMHead(layer.weight)
    logits = cpu_generation.compute_logits(refuse, SimpleNamespace(rl_on_policy_target=None), x, head)
    torch.testing.assert_close(logits, torch.nn.functional.linear(x, layer.weight), rtol=0, atol=1e-5)


def test_weights_in_bfloat16_are_left_to_sglang() -> None:
    layer = ParallelLMHead(torch.ones(4, 4, dtype=torch.bfloat16))
    x, theirs = torch.ones(1, 4), torch.zeros(1)
    assert cpu_generation.apply_linear(lambda *_: theirs, None, layer, x) is theirs
    processor = SimpleNamespace(rl_on_policy_target=None)
    assert cpu_generation.compute_logits(lambda *_: theirs, processor, x, layer) is theirs


class ParallelLMHead(torch.nn.Module):
    """Has the name and the weight of SGLang's class."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


class Scheduler:
    """The queue of SGLang's scheduler, whose batches have room for `room` requests."""

    def __init__(self, prompts: Sequence[Sequence[int]], room: int = 100) -> None:
        self.waiting_queue = [request(number, prompt) for number, prompt in enumerate(prompts)]
        self.chunked_req: Any = None
        self.disable_radix_cache = False
        self.room = room

    def next_batch(self) -> list[int]:
        def admit(scheduler: Scheduler) -> list[int]:
            batch = scheduler.waiting_queue[: scheduler.room]
            scheduler.waiting_queue = scheduler.waiting_queue[scheduler.room :]
            return [request.number for request in batch]

        batch: list[int] = cpu_generation.share_prompts(admit, self)
        return batch


def request(number: int, prompt: Sequence[int]) -> Any:
    return SimpleNamespace(number=number, origin_input_ids=array("q", prompt), extra_key=None)


def refuse(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own function was called")
