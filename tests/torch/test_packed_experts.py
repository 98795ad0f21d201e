"""Adapters of experts as PEFT has them for a parameter of all experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from miles_async.errors import UserError
from miles_async.models.lora import (
    AdapterConfig,
    check_adapter,
    for_peft,
    linear_shapes,
    read_config,
    read_tensors,
    tensor_names,
    write_adapter,
)
from miles_async.models.lora_layers import adapted
from miles_async.models.packed_experts import linear_layers_in, pack, unpack

EXPERTS, RANK, SCALE, HIDDEN, WIDTH = 3, 4, 2.0, 16, 8
BLOCK = "model.layers.0.mlp.experts"
QWEN = AdapterConfig(RANK, SCALE, ("o_proj", "gate_proj", "up_proj", "down_proj"))
GPT_OSS = AdapterConfig(RANK, SCALE, QWEN.modules, alternates=True)
ORDERS = pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["gate before up", "gate and up alternate"])


def write_checkpoint(folder: Path, model_type: str) -> Path:
    """The tensors of one layer: an output projection and experts."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": HIDDEN}))
    o_proj = {"model.layers.0.self_attn.o_proj.weight": torch.zeros(HIDDEN, HIDDEN)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{BLOCK}.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH),
        f"{BLOCK}.down_proj": (EXPERTS, WIDTH, HIDDEN),
    }
    if model_type == "qwen3_moe":
        layers = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        shapes = {
            f"{BLOCK}.{expert}.{name}.weight": shape for expert in range(EXPERTS) for name, shape in layers.items()
        }
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()} | o_proj, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "gpt-oss", "gpt_oss")


@pytest.fixture
def adapter(checkpoint: Path) -> Mapping[str, Tensor]:
    """Random matrices of all layers of the checkpoint."""
    draw, shapes = torch.Generator().manual_seed(0), linear_shapes(checkpoint)
    tensors: dict[str, Tensor] = {}
    for layer in adapted(shapes, QWEN.modules):
        of_a, of_b = tensor_names(layer)
        tensors[of_a] = torch.randn(RANK, shapes[layer][1], generator=draw)
        tensors[of_b] = torch.randn(shapes[layer][0], RANK, generator=draw)
    return tensors


def change_of(tensors: Mapping[str, Tensor], layer: str) -> Tensor:
    """What an adapter with a factor of 1 adds to the weight of a layer."""
    of_a, of_b = tensor_names(layer)
    return tensors[of_b] @ tensors[of_a]


def change_in_peft(tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """What PEFT adds to a parameter [experts, outputs, inputs]: A has rows by expert, and B has columns by rank."""
    of_a, of_b = (tensors[name] for name in tensor_names(module))
    by_expert, by_rank = of_a.view(EXPERTS, -1, of_a.shape[1]), of_b.view(len(of_b), -1, EXPERTS)
    return torch.einsum("ore,eri->eoi", by_rank, by_expert)


@ORDERS
def test_peft_computes_from_packed_adapters_what_those_of_single_experts_compute(
    adapter: Mapping[str, Tensor], config: AdapterConfig
) -> None:
    packed = pack(adapter, config)
    gate_up, down = change_in_peft(packed, f"{BLOCK}.base_layer"), change_in_peft(packed, BLOCK)
    for expert in range(EXPERTS):
        gate, up, of_down = (change_of(adapter, f"{BLOCK}.{expert}.{name}_proj") for name in ("gate", "up", "down"))
        joined = torch.stack([gate, up], 1).flatten(0, 1) if config.alternates else torch.cat([gate, up])
        torch.testing.assert_close(gate_up[expert], joined)
        torch.testing.assert_close(down[expert], of_down)


@ORDERS
def test_unpacked_adapters_are_those_that_were_packed(adapter: Mapping[str, Tensor], config: AdapterConfig) -> None:
    unpacked = unpack(pack(adapter, config), config)
    assert unpacked.keys() == adapter.keys()
    assert [name for name, tensor in adapter.items() if not torch.equal(unpacked[name], tensor)] == []


def test_packed_adapters_whose_gate_and_up_projections_share_ranks_are_refused(adapter: Mapping[str, Tensor]) -> None:
    packed = pack(adapter, QWEN)
    packed[tensor_names(f"{BLOCK}.base_layer")[1]][0, -1] = 1
    with pytest.raises(UserError, match=f"gate and up projections of {BLOCK} have ranks in common"):
        unpack(packed, QWEN)


def test_a_folder_of_packed_adapters_names_the_parameters_and_their_ranks(
    checkpoint: Path, adapter: Mapping[str, Tensor], tmp_path: Path
) -> None:
    write_adapter(tmp_path, *for_peft(adapter, GPT_OSS, checkpoint), base=None, hash_of_base=None)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert content["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert content["rank_pattern"] == {"gate_up_proj": 2 * RANK}
    assert content["alpha_pattern"] == {"gate_up_proj": 2 * SCALE * RANK}
    assert content["target_modules"] == ["o_proj"], "layers of experts are no modules"
    assert read_config(tmp_path).packs_experts
    check_adapter(tmp_path, GPT_OSS, checkpoint)
    unpacked = unpack(read_tensors(tmp_path), GPT_OSS)
    assert [name for name, tensor in adapter.items() if not torch.equal(unpacked[name], tensor)] == []


def test_adapters_of_no_experts_are_not_packed(checkpoint: Path, adapter: Mapping[str, Tensor]) -> None:
    dense = {name: tensor for name, tensor in adapter.items() if ".o_proj." in name}
    assert for_peft(dense, GPT_OSS, checkpoint) == (dense, GPT_OSS)


@pytest.mark.parametrize("model_type, verb", [("gpt_oss", "lacks"), ("qwen3_moe", "has")])
def test_adapters_of_experts_in_the_form_of_another_model_are_refused(
    checkpoint: Path, adapter: Mapping[str, Tensor], tmp_path: Path, model_type: str, verb: str
) -> None:
    base = write_checkpoint(tmp_path / "base", model_type)
    written = (adapter, QWEN) if model_type == "gpt_oss" else for_peft(adapter, QWEN, checkpoint)
    write_adapter(tmp_path, *written, base=None, hash_of_base=None)
    with pytest.raises(UserError, match=f"{verb} target_parameters, unlike adapters of .*: use one that save_hf"):
        check_adapter(tmp_path, QWEN, base)


@ORDERS
def test_tensors_of_all_experts_have_the_weight_of_each_layer(config: AdapterConfig) -> None:
    whole = torch.arange(EXPERTS * 2 * WIDTH * HIDDEN).view(EXPERTS, 2 * WIDTH, HIDDEN)
    stored = whole.transpose(1, 2) if config.alternates else whole
    layers = dict(linear_layers_in(f"{BLOCK}.gate_up_proj", stored, config))
    of_gate, of_up = (slice(0, None, 2), slice(1, None, 2)) if config.alternates else (slice(WIDTH), slice(WIDTH, None))
    assert len(layers) == 2 * EXPERTS
    for expert in range(EXPERTS):
        assert torch.equal(layers[f"{BLOCK}.{expert}.gate_proj"], whole[expert, of_gate])
        assert torch.equal(layers[f"{BLOCK}.{expert}.up_proj"], whole[expert, of_up])
    [(name, weight)] = linear_layers_in("model.layers.0.self_attn.o_proj.weight", whole[0], config)
    assert (name, weight.data_ptr()) == ("model.layers.0.self_attn.o_proj", whole.data_ptr())
