"""Hugging Face tensors in the engine's own layout: fused, padded, repeated, split among ranks.

The engine's ranks are models of this process with a loader like SGLang's. They are written the way that another
process' memory is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_async.adapters.sglang.engine_weights import RankLayout, apply_delta, checksums, machine_id
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.weight_placement import find_placements, strided_parts
from miles_async.adapters.weights.engine import EngineMemory, RankMemory, Region
from miles_async.adapters.weights.layout import TensorPlan, plan_tensors, plans_by_name
from miles_async.adapters.weights.staging import Staging, describe, plans_of_source
from miles_async.adapters.weights.transports.disk_delta import Snapshot, make_delta
from miles_async.adapters.weights.transports.memory import MemoryTransport, _remaining
from miles_async.adapters.weights.transports.p2p import mooncake_advice
from miles_async.errors import EngineLostError, FatalError

WIDTH, HEADS, VOCABULARY, EXPERTS = 8, 16, 10, 3
LAYER = "model.layers.0"
QWEN, MIXTRAL = ("mlp", "gate_proj", "up_proj", "down_proj"), ("block_sparse_moe", "w1", "w3", "w2")
"""What they call a layer's experts and their projections."""
GATES = [("weight", [8, 6]), ("decay", [5])]
"""The tensors of `Gates`."""
Shapes = dict[str, tuple[int, ...]]


def weights(seed: int = 0, family: tuple[str, ...] = QWEN) -> dict[str, Tensor]:
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
    block, gate, up, down = family
    for expert in range(EXPERTS):
        its = f"model.layers.1.{block}.experts.{expert}"
        shapes |= {f"{its}.{gate}": (4, WIDTH), f"{its}.{up}": (4, WIDTH), f"{its}.{down}": (WIDTH, 4)}
    generator = torch.Generator().manual_seed(seed)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def engine_shapes(ranks: int, key_heads: int | None = None, block: str = "mlp") -> Shapes:
    """Of one rank; `key_heads` are its rows of keys and of values where it is not its part of the four."""
    rows = HEADS // ranks + 2 * (key_heads or 4 // ranks)
    return {
        "model.embed_tokens.weight": (12 // ranks, WIDTH),
        f"{LAYER}.self_attn.qkv_proj.weight": (rows, WIDTH),
        f"{LAYER}.self_attn.o_proj.weight": (WIDTH, HEADS // ranks),
        f"{LAYER}.mlp.gate_up_proj.weight": (24 // ranks, WIDTH),
        f"{LAYER}.mlp.down_proj.weight": (WIDTH, 12 // ranks),
        f"{LAYER}.input_layernorm.weight": (WIDTH,),
        f"model.layers.1.{block}.experts.w13_weight": (EXPERTS, 8 // ranks, WIDTH),
        f"model.layers.1.{block}.experts.w2_weight": (EXPERTS, WIDTH, 4 // ranks),
    }


class Rank(nn.Module):
    """An engine rank's parameters under SGLang's names, and a loader that fuses and divides tensors as SGLang does."""

    def __init__(
        self, shapes: Shapes, dtype: torch.dtype = torch.float32, rank: int = 0, ranks: int = 1, added: float = 0.0
    ) -> None:
        super().__init__()
        self.held = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}
        self._rank, self._ranks, self._added = rank, ranks, added

    def named_parameters(self, *_: object, **__: object) -> Any:
        return self.held.items()

    def __getitem__(self, name: str) -> Tensor:
        return self.held[f"{name}.weight"].data

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "lm_head.weight":
                continue
            path, _, layer = name.removesuffix(".weight").rpartition(".")
            if expert := re.fullmatch(r"(.*\.experts)\.(\d+)", path):
                stacked = self.held[f"{expert[1]}.{'w2' if layer in ('down_proj', 'w2') else 'w13'}_weight"]
                target = stacked[int(expert[2])]
            else:
                fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
                fused_layer = f"{fused[layer.removesuffix('_proj')]}_proj" if layer[:-5] in fused else layer
                target = self.held[f"{path}.{fused_layer}.weight"]
            self._copy(layer, target.data, tensor)

    def _copy(self, layer: str, target: Tensor, tensor: Tensor) -> None:
        if layer in ("q_proj", "k_proj", "v_proj"):
            queries = HEADS // self._ranks
            keys = (len(target) - queries) // 2
            first = {"q": 0, "k": queries, "v": queries + keys}[layer[0]]
            count = queries if layer[0] == "q" else keys
            start = self._rank * count * len(tensor) // (self._ranks * count) // count * count
            target[first : first + count] = tensor[start : start + count]
        elif layer in ("gate_proj", "up_proj", "w1", "w3"):
            half = len(target) // 2
            part = tensor.chunk(self._ranks)[self._rank]
            target[half:] = part if layer in ("up_proj", "w3") else target[half:]
            target[:half] = part if layer in ("gate_proj", "w1") else target[:half]
        elif layer == "embed_tokens":
            part = tensor[self._rank * len(target) :][: len(target)]
            target[: len(part)] = part
            target[len(part) :] = 0
        elif tensor.dim() == 2:
            target.copy_(tensor.chunk(self._ranks, 1)[self._rank])
        else:
            # In place, as SGLang's loader of Gemma does.
            target.copy_(tensor.add_(self._added))


def ranks_of(ranks: int, dtype: torch.dtype = torch.float32, **shapes: Any) -> list[Rank]:
    return [Rank(engine_shapes(ranks, **shapes), dtype, rank, ranks) for rank in range(ranks)]


def plans_of(tensors: dict[str, Tensor], ranks: list[Rank]) -> list[TensorPlan]:
    described = describe(tensors.items())
    found = [find_placements(rank, [(name, list(shape)) for name, shape, _ in described]) for rank in ranks]
    layouts = [msgspec.json.decode(msgspec.json.encode(one), type=RankLayout) for one in found]
    assert [layout.unknown for layout in layouts] == [None] * len(ranks)
    return plan_tensors(described, layouts, engine_of(ranks).ranks[0].dtypes)


def engine_of(ranks: list[Rank]) -> EngineMemory:
    def regions(rank: Rank) -> dict[str, Region]:
        return {
            name: Region(tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "cpu")
            for name, tensor in rank.held.items()
        }

    memories = tuple(RankMemory(os.getpid(), machine_id(), regions(rank)) for rank in ranks)
    return EngineMemory(EngineInfo("e", "http://nowhere", os.getpid(), len(ranks)), memories)


def staged(tensors: dict[str, Tensor], ranks: list[Rank], source: int = 0, sources: int = 1) -> Staging:
    staging = Staging(plans_of_source(plans_of(tensors, ranks), source, sources))
    staging.fill(1, reversed(tensors.items()))
    return staging


def test_bfloat16_weights_reach_a_float32_engine_unchanged() -> None:
    own = {name: tensor.bfloat16() for name, tensor in weights().items()}
    [rank] = ranks_of(1)
    MemoryTransport().send(staged(own, [rank]), engine_of([rank]))
    name = f"{LAYER}.self_attn.o_proj"
    assert rank[name].dtype is torch.float32
    assert torch.equal(rank[name], own[f"{name}.weight"].float())


@pytest.mark.parametrize("sources", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
def test_each_rank_gets_its_shard_of_every_tensor_from_the_source_that_holds_it(
    family: tuple[str, ...], ranks: int, dtype: torch.dtype, sources: int
) -> None:
    block, gate, up, down = family
    there = ranks_of(ranks, dtype, block=block)
    tensors = weights(family=family)
    shares = [staged(tensors, there, source, sources) for source in range(sources)]
    for staging in shares:
        MemoryTransport().send(staging, engine_of(there))
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def part(name: str, dim: int, rank: int) -> Tensor:
        return tensors[f"{name}.weight"].chunk(ranks, dim)[rank]

    for rank, held in enumerate(there):
        qkv = torch.cat([part(f"{LAYER}.self_attn.{name}_proj", 0, rank) for name in "qkv"])
        gate_up = torch.cat([part(f"{LAYER}.mlp.{name}_proj", 0, rank) for name in ("gate", "up")])
        assert torch.equal(held[f"{LAYER}.self_attn.qkv_proj"], qkv)
        assert torch.equal(held[f"{LAYER}.mlp.gate_up_proj"], gate_up)
        assert torch.equal(held[f"{LAYER}.self_attn.o_proj"], part(f"{LAYER}.self_attn.o_proj", 1, rank))
        assert torch.equal(held[f"{LAYER}.mlp.down_proj"], part(f"{LAYER}.mlp.down_proj", 1, rank))
        assert torch.equal(held[f"{LAYER}.input_layernorm"], tensors[f"{LAYER}.input_layernorm.weight"])
        for expert in range(EXPERTS):
            its, joined = f"model.layers.1.{block}.experts.{expert}", f"model.layers.1.{block}.experts"
            w13 = torch.cat([part(f"{its}.{name}", 0, rank) for name in (gate, up)])
            assert torch.equal(held.held[f"{joined}.w13_weight"][expert], w13)
            assert torch.equal(held.held[f"{joined}.w2_weight"][expert], part(f"{its}.{down}", 1, rank))
    rows = torch.cat([held["model.embed_tokens"] for held in there])
    assert torch.equal(rows[:VOCABULARY], tensors["model.embed_tokens.weight"])
    assert not rows[VOCABULARY:].any()
    # All shares together are one copy of the model.
    assert sum(staging.buffer.numel() for staging in shares) == sum(
        tensor.numel() * tensor.element_size() for tensor in tensors.values()
    )


def test_key_heads_are_replicated_if_there_are_fewer_than_ranks() -> None:
    there = ranks_of(4, key_heads=2)
    tensors = weights()
    MemoryTransport().send(staged(tensors, there), engine_of(there))
    keys = tensors[f"{LAYER}.self_attn.k_proj.weight"]
    for rank, held in enumerate(there):
        assert torch.equal(held[f"{LAYER}.self_attn.qkv_proj"][4:6], keys[rank // 2 * 2 :][:2])


def test_a_staged_tensor_can_be_read_in_buckets_of_any_size() -> None:
    tensors = weights()
    staging = staged(tensors, ranks_of(2))
    for name, tensor in tensors.items():
        assert torch.equal(staging.tensor(name), tensor)
    buckets = list(staging.buckets(1024))
    assert len(buckets) > 2
    assert sum(len(bucket) for bucket in buckets) == len(tensors)
    for bucket in buckets:
        flat = torch.cat([tensors[plan.name].flatten() for plan in bucket])
        assert torch.equal(staging.flat(bucket).view(torch.float32), flat)
        assert len({plan.block for plan in bucket}) == 1 or flat.numel() * 4 <= 1024


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_projections_that_sglangs_loader_joins_come_in_one_bucket_from_one_source(sources: int) -> None:
    attention = f"{LAYER}.self_attn"
    joined = {f"{attention}.q_a_proj.weight", f"{attention}.kv_a_proj_with_mqa.weight"}
    shapes: dict[str, tuple[int, ...]] = {
        f"{attention}.{name}_proj.weight": (64, 64) for name in ("q_a", "q_b", "kv_b", "o")
    }
    shapes |= {f"{LAYER}.mlp.experts.{expert}.up_proj.weight": (96, 64) for expert in range(4)}
    shapes |= {f"{attention}.kv_a_proj_with_mqa.weight": (24, 64), f"{attention}.q_a_layernorm.weight": (64,)}
    plans = plans_by_name([(name, shape, "bfloat16") for name, shape in shapes.items()])
    buckets = [
        {plan.name for plan in bucket}
        for source in range(sources)
        for bucket in Staging(plans_of_source(plans, source, sources)).buckets(1)
    ]
    assert sorted(name for bucket in buckets for name in bucket) == sorted(shapes)
    assert [bucket >= joined for bucket in buckets if bucket & joined] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_with_an_offset_is_staged_as_the_engine_keeps_it_and_read_as_its_loader_expects_it(
    dtype: torch.dtype,
) -> None:
    name = f"{LAYER}.input_layernorm.weight"
    values = torch.cat([torch.linspace(-300, 300, 4001), torch.linspace(-2, 2, 4001)])
    rank = Rank({name: (len(values),)}, dtype, added=1.0)
    staging = staged({name: values}, [rank])
    MemoryTransport().send(staging, engine_of([rank]))
    kept = values.to(dtype) + 1
    assert torch.equal(rank.held[name].data, kept)
    assert torch.equal(staging.tensor(name) + 1, kept)
    assert torch.equal(staging.flat(staging.plans).view(dtype) + 1, kept)


def test_the_full_comparison_finds_a_single_wrong_byte() -> None:
    there = ranks_of(2)
    staging = staged(weights(), there)
    MemoryTransport().send(staging, engine_of(there))
    windows, expected = staging.checksums(2, verify_all=True)
    assert [checksums(rank, windows[number]) for number, rank in enumerate(there)] == expected
    there[1][f"{LAYER}.mlp.down_proj"].view(torch.uint8)[3, 5] ^= 1
    [differs] = [number for number, found in enumerate(checksums(there[1], windows[1])) if found != expected[1][number]]
    assert windows[1][differs][0] == f"{LAYER}.mlp.down_proj.weight"


def test_a_tied_output_layer_is_left_out() -> None:
    tensors = weights()
    with_shared_embedding = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert len(plans_of(with_shared_embedding, ranks_of(1))) == len(tensors)


def test_an_engine_of_another_model_is_refused_with_the_difference() -> None:
    tensors = weights()
    less = {name: tensor for name, tensor in tensors.items() if "layernorm" not in name}
    more = tensors | {f"{LAYER}.mlp.router.weight": torch.zeros(3)}
    wider = tensors | {f"{LAYER}.mlp.down_proj.weight": torch.zeros(WIDTH, 16)}
    half = {name: tensor for name, tensor in tensors.items() if "up_proj" not in name}
    for learner, sentence in [
        (less, r"the learner does not fill its parameter model\.layers\.0\.input_layernorm\.weight"),
        (more, r"SGLang refuses the learner's tensors: KeyError: 'model\.layers\.0\.mlp\.router\.weight'"),
        (wider, r"SGLang refuses the learner's tensors: RuntimeError: .*\(12\) must match .*\(16\)"),
        (half, r"the learner does not fill its parameter model\.layers\.0\.mlp\.gate_up_proj\.weight"),
    ]:
        with pytest.raises(FatalError, match=f"the engine serves another model: {sentence}"):
            plans_of(learner, ranks_of(1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_an_engine_that_quantises_weights_is_refused(dtype: torch.dtype) -> None:
    [rank] = ranks_of(1)
    rank.held["quantised"] = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    tensors = describe(weights().items())
    layout = find_placements(rank, [(name, list(shape)) for name, shape, _ in tensors])
    with pytest.raises(FatalError, match=rf"quantises its parameter quantised \({str(dtype)[6:]}\), and .* start the"):
        plan_tensors(tensors, [layout], {})


def test_an_incompletely_exported_share_is_not_staged() -> None:
    tensors = weights()
    staging = staged(tensors, ranks_of(1))
    del tensors[f"{LAYER}.mlp.up_proj.weight"]
    with pytest.raises(FatalError, match=r"no longer exports model\.layers\.0\.mlp\.up_proj\.weight"):
        staging.fill(2, tensors.items())
    assert staging.version is None


def test_an_interrupted_write_is_continued() -> None:
    assert _remaining([(0, 100, 10), (50, 200, 10)], 4) == [(4, 104, 6), (50, 200, 10)]
    assert _remaining([(0, 100, 10), (50, 200, 10)], 10) == [(50, 200, 10)]
    assert _remaining([(0, 100, 10), (50, 200, 10)], 20) == []


def test_a_write_into_an_ended_process_fails() -> None:
    there = ranks_of(1)
    engine = engine_of(there)
    staging = staged(weights(), there)
    gone = EngineMemory(engine.info, (RankMemory(2**22 - 1, machine_id(), engine.ranks[0].regions),))
    with pytest.raises(EngineLostError, match="its memory cannot be written: No such process"):
        MemoryTransport().send(staging, gone)


def test_the_memory_of_another_machine_cannot_be_written() -> None:
    engine = engine_of(ranks_of(1))
    away = EngineMemory(engine.info, (RankMemory(1, "another boot", engine.ranks[0].regions),))
    with pytest.raises(EngineLostError, match="is on another machine"):
        MemoryTransport().connect(away)


def test_a_delta_contains_the_changed_bytes_and_needs_the_same_base(tmp_path: Path) -> None:
    there = ranks_of(2)
    engine = engine_of(there)
    tensors = weights()
    staging = staged(tensors, there)
    MemoryTransport().send(staging, engine)
    base = Snapshot(staging.fill_count, 1, staging.buffer.clone())
    tensors[f"{LAYER}.mlp.down_proj.weight"][2, 7] *= 1.001
    staging.fill(2, tensors.items())
    changed, notes = make_delta(staging, base)
    carried = sum(tensor.numel() for name, tensor in changed.items() if name.endswith(".bytes"))
    assert 0 < carried <= 4
    save_file(changed, tmp_path / "delta", metadata=notes)
    for rank in range(2):
        apply_delta(there[rank], tmp_path / "delta", rank)
    windows, expected = staging.checksums(2, verify_all=True)
    assert [checksums(rank, windows[number]) for number, rank in enumerate(there)] == expected
    there[1][f"{LAYER}.self_attn.o_proj"][0, 0] += 1
    with pytest.raises(ValueError, match=r"o_proj\.weight did not hold version 1"):
        apply_delta(there[1], tmp_path / "delta", 1)
    (tmp_path / "torn").write_bytes((tmp_path / "delta").read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        apply_delta(there[0], tmp_path / "torn", 0)


def test_finding_the_layout_leaves_an_engine_as_it_was() -> None:
    [rank] = ranks_of(1)
    for parameter in rank.held.values():
        parameter.data.normal_()
    before = {name: parameter.data.clone() for name, parameter in rank.held.items()}
    plans_of(weights(), [rank])
    assert all(torch.equal(parameter.data, before[name]) for name, parameter in rank.held.items())


class Gates(nn.Module):
    """A layer whose parameter interleaves rows of a tensor and is transposed, and that may compute more than that."""

    def __init__(self, work: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 8))
        self.decay = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.squares = torch.zeros(6, 8)
        self._work = work

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "weight":
                gates, ups = tensor[::2], tensor[1::2]
                self.weight.data.copy_(torch.cat([gates, ups]).T)
            else:
                self.decay.data.copy_(-tensor.float().exp() if self._work == "exponential" else tensor)
        if self._work == "derived":
            self.squares = self.weight.data**2


def test_rows_that_a_loader_interleaves_and_transposes_are_written_by_contiguous_copies() -> None:
    model = Gates("plain")
    layout = msgspec.json.decode(msgspec.json.encode(find_placements(model, GATES)), type=RankLayout)
    [plan, _] = plan_tensors(
        [("weight", (8, 6), "float32"), ("decay", (5,), "float32")],
        [layout],
        {"weight": "float32", "decay": "bfloat16"},
    )
    assert len(plan.copies) < 10
    staging, tensor = Staging([plan]), torch.randn(8, 6)
    staging.fill(1, [("weight", tensor)])
    for source, _, target, size in staging.segments([plan], 0):
        model.weight.data.view(-1).view(torch.uint8)[target : target + size] = staging.buffer[source : source + size]
    assert torch.equal(model.weight.data, torch.cat([tensor[::2], tensor[1::2]]).T)
    assert torch.equal(staging.tensor("weight"), tensor)


@pytest.mark.parametrize(
    "work, reason",
    [
        ("exponential", "SGLang's loader computes what its parameter decay holds"),
        ("derived", "SGLang's loader derives squares of a Gates from the weights"),
    ],
)
def test_a_loader_that_computes_is_noticed_and_leaves_the_model_as_it_was(work: str, reason: str) -> None:
    model = Gates(work)
    squares = model.squares
    found = find_placements(model, GATES)
    assert found.unknown == reason
    assert found.placements == []
    assert not model.weight.any()
    assert not model.decay.any()
    assert model.squares is squares


def test_every_flat_order_of_elements_is_described_by_parts() -> None:
    tensors, firsts = torch.arange(400), np.array([2, 103, 204])
    draw = np.random.default_rng(0)
    for size in range(200):
        numbers = draw.permutation(np.concatenate([np.arange(2, 102), np.arange(103, 203), np.zeros(9, int)]))[:size]
        found = torch.zeros(size, dtype=torch.int64)
        for source, target, form in strided_parts(numbers, firsts):
            part = tensors.as_strided(form.shape, form.strides, source)
            found.as_strided(form.shape, form.target_strides, target).copy_(part)
        assert found.tolist() == numbers.tolist()


def test_the_error_for_a_missing_library_has_the_command_that_installs_it() -> None:
    missing = ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")
    assert "apt-get install libibverbs1" in mooncake_advice(missing)
