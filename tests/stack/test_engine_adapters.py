"""Adapters that engines load in another form than PEFT's, as SGLang's own code reads and multiplies them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from miles_async.adapters.weights.engine_adapter import for_engines
from miles_async.models.lora import AdapterConfig, adapter_checksum, read_checksum, tensor_names, write_adapter

ROOT = Path(__file__).parents[2]
RANK, HIDDEN = 4, 16
ENGINE = """
import json, sys
from types import SimpleNamespace
from miles_async import cpu_compat
cpu_compat.install()
import torch
from safetensors.torch import load_file, save_file
from sglang.kernels.ops.moe import fused_moe_lora_kernel
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.lora import lora_moe_runners
from sglang.srt.lora.layers import FusedMoEWithLoRA
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig

def product(output, qcurr_hidden_states, lora_a_stacked, lora_b_stacked, **_):
    # In place of the Triton kernel, for one expert: each pair of matrices has its own columns of the output.
    for part, a, b in zip(output[0].chunk(len(lora_a_stacked), -1), lora_a_stacked, lora_b_stacked):
        part += qcurr_hidden_states @ a[0, 0].T @ b[0, 0].T

folder = sys.argv[1]
config = SimpleNamespace(num_hidden_layers=2, architectures=[], model_type="", vocab_size=32)
adapter = LoRAAdapter("one", LoRAConfig(folder, base_vocab_size=32), config, LoadConfig(), None)
adapter.initialize_weights_from_tensors(load_file(folder + "/adapter_model.safetensors"))
tensors = {name: tensor.contiguous() for layer in adapter.layers for name, tensor in layer.weights.items()}
gate_up = [name for name in tensors if ".experts.0.gate_up_proj." in name]
if gate_up:
    of_a, of_b = (next(tensors[name] for name in gate_up if part in name) for part in ("lora_A", "lora_B"))
    runner = SimpleNamespace(is_gated=True)
    layer = SimpleNamespace(
        tp_size=1, _uses_interleaved_gate_up=True, intermediate_size_per_partition=len(of_b) // 2,
        base_layer=SimpleNamespace(moe_runner_config=runner),
    )
    of_b = FusedMoEWithLoRA._slice_moe_b_2d(layer, of_b, 0, "gate_up_proj_moe")
    rank = adapter.config.r
    info = lora_moe_runners.LoRAInfo(
        gate_up_lora_a_weights=of_a[None, None], gate_up_lora_b_weights=of_b[None, None],
        down_lora_a_weights=None, down_lora_b_weights=None, seg_indptr=None, req_to_lora=None, lora_ranks=None,
        adapter_enabled=None, token_lora_mapping=None, max_lora_rank=rank, num_experts=1,
    )
    fused_moe_lora_kernel.fused_moe_lora = product
    output = torch.zeros(1, of_a.shape[1], len(of_b))
    lora_moe_runners._add_lora_gate_up_delta(
        torch.eye(of_a.shape[1]), output, None, None, info, None, None, None, None, None
    )
    tensors["gate_up"] = adapter.scaling * output[0].T.contiguous()
save_file(tensors, folder + "/loaded.safetensors", {"scale": json.dumps(adapter.scaling)})
"""


def loaded(folder: Path, tensors: dict[str, torch.Tensor], config: AdapterConfig) -> dict[str, torch.Tensor]:
    """What SGLang makes of an adapter that is written for engines."""
    write_adapter(folder, *for_engines(tensors, config), base=None, hash_of_base=None)
    command = [sys.executable, "-c", ENGINE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "loaded.safetensors")


def adapter(**outputs: int) -> dict[str, torch.Tensor]:
    """Random matrices of layers of these names, with `__` for dots, and these numbers of outputs."""
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, rows) in enumerate(outputs.items()):
        numbers = torch.Generator().manual_seed(number)
        of_a, of_b = tensor_names(f"model.language_model.layers.1.{name.replace('__', '.')}")
        tensors |= {
            of_a: torch.randn(RANK, HIDDEN, generator=numbers),
            of_b: torch.randn(rows, RANK, generator=numbers),
        }
    return tensors


def change(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    of_a, of_b = tensor_names(f"model.language_model.layers.1.{layer}")
    return tensors[of_b] @ tensors[of_a]


def test_engines_load_the_projections_of_linear_attention_as_four_layers(tmp_path: Path) -> None:
    keys, values = 6, 10
    tensors = adapter(
        linear_attn__in_proj_qkv=2 * keys + values, linear_attn__in_proj_z=values, linear_attn__out_proj=HIDDEN
    )
    config = AdapterConfig(RANK, 2.0, ("in_proj_qkv", "in_proj_z", "out_proj"))
    found = loaded(tmp_path, tensors, config)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["in_proj_qkvz", "out_proj"]
    of_a, of_b = (found[name] for name in tensor_names("model.language_model.layers.1.linear_attn.in_proj_qkvz"))
    parts = zip(of_a.split(RANK), of_b.split([keys, keys, values, values]), strict=True)
    expected = torch.cat([change(tensors, f"linear_attn.{one}") for one in ("in_proj_qkv", "in_proj_z")])
    torch.testing.assert_close(torch.cat([b @ a for a, b in parts]), expected)
    assert adapter_checksum(found.values()) == read_checksum(tmp_path)


def test_engines_multiply_alternating_rows_of_gpt_oss_by_the_matrix_that_the_learner_trains(tmp_path: Path) -> None:
    width, scale = 6, 2.0
    tensors = adapter(
        mlp__experts__0__gate_proj=width,
        mlp__experts__0__up_proj=width,
        mlp__experts__0__down_proj=HIDDEN,
        self_attn__o_proj=HIDDEN,
    )
    config = AdapterConfig(RANK, scale, ("gate_proj", "up_proj", "down_proj", "o_proj"), alternates=True)
    found = loaded(tmp_path, tensors, config)
    gate, up = (scale * change(tensors, f"mlp.experts.0.{one}_proj") for one in ("gate", "up"))
    torch.testing.assert_close(found.pop("gate_up"), torch.stack([gate, up], 1).view(2 * width, HIDDEN))
    for layer in ("mlp.experts.0.down_proj", "self_attn.o_proj"):
        torch.testing.assert_close(change(found, layer), change(tensors, layer))
    assert adapter_checksum(found.values()) == read_checksum(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2 * RANK
