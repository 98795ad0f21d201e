from __future__ import annotations

import pytest

from miles_async.batching.flops import attention_crossover, training_flops
from miles_async.models.plugin import ModelPlugin
from tests.planned_models import MODELS

LLAMA_7B = ModelPlugin().shape(
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
)


def test_short_sequences_take_six_operations_per_weight_and_token() -> None:
    weights = 6.74e9 - 32000 * 4096  # an embedding look-up takes no arithmetic
    assert training_flops([1] * 1000, LLAMA_7B) == pytest.approx(6 * weights * 1000, rel=0.005)


@pytest.mark.parametrize("name, billions", [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("DeepSeek-V3", 37)])
def test_a_token_takes_six_operations_per_weight_that_is_active(name: str, billions: float) -> None:
    shape = ModelPlugin().shape(MODELS[name])
    assert training_flops([1] * 1000, shape) == pytest.approx(6 * billions * 1e9 * 1000, rel=0.015)


def test_attention_grows_with_the_square_of_the_length_of_each_sequence() -> None:
    long, short = training_flops([8192], LLAMA_7B), training_flops([1024] * 8, LLAMA_7B)
    assert long - short == pytest.approx(3 * 4 * 32 * 4096 * (8192**2 - 8 * 1024**2) / 2)


def test_at_the_crossover_length_half_of_the_operations_are_attention() -> None:
    crossover = round(attention_crossover(LLAMA_7B))
    linear = training_flops([1] * crossover, LLAMA_7B)
    assert training_flops([crossover], LLAMA_7B) == pytest.approx(2 * linear, rel=1e-3)
