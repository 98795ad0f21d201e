"""Hugging Face tensors in the engine's own layout: fused, padded, split among ranks."""

from __future__ import annotations

import pytest
import torch

from miles_async.adapters.weights.choose import _advice
from miles_async.adapters.weights.layout import FusedStaging
from miles_async.errors import Fatal

WIDTH, HEADS, VOCABULARY = 8, 16, 10
LAYER = "model.layers.0"


def weights() -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens": (VOCABULARY, WIDTH),
        f"{LAYER}.self_attn.q_proj": (HEADS, WIDTH),
        f"{LAYER}.self_attn.k_proj": (4, WIDTH),
        f"{LAYER}.self_attn.v_proj": (4, WIDTH),
        f"{LAYER}.self_attn.o_proj": (WIDTH, HEADS),
        f"{LAYER}.mlp.gate_proj": (12, WIDTH),
        f"{LAYER}.mlp.up_proj": (12, WIDTH),
        f"{LAYER}.mlp.down_proj": (WIDTH, 12),
        f"{LAYER}.input_layernorm": (WIDTH,),
    }
    torch.manual_seed(0)
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def sizes(ranks: int, padded_vocabulary: int = 12) -> list[dict[str, int]]:
    split = {
        "model.embed_tokens": padded_vocabulary * WIDTH,
        f"{LAYER}.self_attn.qkv_proj": (HEADS + 8) * WIDTH,
        f"{LAYER}.self_attn.o_proj": HEADS * WIDTH,
        f"{LAYER}.mlp.gate_up_proj": 24 * WIDTH,
        f"{LAYER}.mlp.down_proj": 12 * WIDTH,
    }
    whole = {f"{LAYER}.input_layernorm": WIDTH}
    return [
        {f"{name}.weight": size // ranks for name, size in split.items()}
        | {f"{name}.weight": size for name, size in whole.items()}
    ] * ranks


def parameter(staging: FusedStaging, rank: int, name: str) -> torch.Tensor:
    (piece,) = [piece for piece in staging.pieces if (piece.rank, piece.parameter) == (rank, f"{name}.weight")]
    return staging.buffer[piece.offset : piece.offset + piece.numel]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_gets_its_part_of_every_tensor(ranks: int) -> None:
    tensors = weights()
    staging = FusedStaging(sizes(ranks), torch.float32)
    staging.fill(reversed(tensors.items()))

    def part(name: str, dim: int, rank: int) -> torch.Tensor:
        return tensors[f"{LAYER}.{name}.weight"].chunk(ranks, dim)[rank]

    for rank in range(ranks):
        qkv = torch.cat([part(f"self_attn.{name}_proj", 0, rank) for name in "qkv"])
        gate_up = torch.cat([part(f"mlp.{name}_proj", 0, rank) for name in ("gate", "up")])
        assert torch.equal(parameter(staging, rank, f"{LAYER}.self_attn.qkv_proj"), qkv.flatten())
        assert torch.equal(parameter(staging, rank, f"{LAYER}.mlp.gate_up_proj"), gate_up.flatten())
        assert torch.equal(
            parameter(staging, rank, f"{LAYER}.self_attn.o_proj"), part("self_attn.o_proj", 1, rank).flatten()
        )
        assert torch.equal(parameter(staging, rank, f"{LAYER}.mlp.down_proj"), part("mlp.down_proj", 1, rank).flatten())
        assert torch.equal(
            parameter(staging, rank, f"{LAYER}.input_layernorm"), tensors[f"{LAYER}.input_layernorm.weight"]
        )
    rows = torch.cat([parameter(staging, rank, "model.embed_tokens") for rank in range(ranks)]).view(-1, WIDTH)
    assert torch.equal(rows[:VOCABULARY], tensors["model.embed_tokens.weight"])
    assert not rows[VOCABULARY:].any()


def test_a_tied_output_layer_is_left_out() -> None:
    tensors = weights()
    staging = FusedStaging(sizes(1), torch.float32)
    staging.fill([*tensors.items(), ("lm_head.weight", tensors["model.embed_tokens.weight"])])
    assert staging.buffer.any()


def test_a_parameter_that_nothing_was_exported_for_is_named() -> None:
    tensors = weights()
    del tensors[f"{LAYER}.mlp.up_proj.weight"]
    with pytest.raises(Fatal, match=r"nothing for the engine's parameter model\.layers\.0\.mlp\.gate_up_proj\.weight"):
        FusedStaging(sizes(1), torch.float32).fill(tensors.items())


def test_a_tensor_that_the_engine_does_not_know_is_named() -> None:
    tensors = weights() | {f"{LAYER}.mlp.router.weight": torch.zeros(3)}
    with pytest.raises(Fatal, match=r"no parameter model\.layers\.0\.mlp\.router\.weight"):
        FusedStaging(sizes(1), torch.float32).fill(tensors.items())


def test_key_heads_that_the_engine_repeats_are_refused_with_a_way_out() -> None:
    more = [{name: size + WIDTH * ("qkv" in name) for name, size in rank.items()} for rank in sizes(2)]
    with pytest.raises(Fatal, match="set weight_transfer to broadcast"):
        FusedStaging(more, torch.float32).fill(weights().items())


def test_a_missing_library_is_answered_with_the_command_that_installs_it() -> None:
    missing = ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")
    assert "apt-get install libibverbs1" in _advice(missing)
