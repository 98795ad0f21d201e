"""Switches of Megatron reach Megatron under its own names, and precision and layers fit the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch.nn.functional import gelu
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig

from miles_async.adapters.megatron.model import local_layers, plugin_source
from miles_async.adapters.megatron.model.environment import ATTENTION, attention_kernels
from miles_async.adapters.megatron.model.factory import build_model
from miles_async.adapters.megatron.model.local_layers import dtype_of, refuse_for_local_layers, uses_local_layers
from miles_async.adapters.megatron.model.plugin_source import PluginSource
from miles_async.adapters.megatron.model.process_groups import create_process_groups, destroy_process_groups
from miles_async.adapters.megatron.model.source import run_fields
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.system.network_ports import free_port
from miles_async.config.megatron import SET_BY_THE_RUN
from miles_async.config.schema import Learner, TinyModel
from miles_async.errors import UserError
from miles_async.models.dense import Llama


@pytest.fixture
def process_groups() -> Iterator[None]:
    create_process_groups(rank=0, world_size=1, address="127.0.0.1", port=free_port(), learner=Learner())
    yield
    destroy_process_groups()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and Transformer Engine."""
    monkeypatch.setattr(local_layers, "on_cpu", lambda: False)
    monkeypatch.setattr(local_layers, "HAVE_TE", True)


@pytest.mark.usefixtures("process_groups")
@pytest.mark.parametrize(
    "setting, value, field",
    [
        ("rope_fusion", True, "apply_rope_fusion"),
        ("bias_swiglu_fusion", False, "bias_activation_fusion"),
        ("gradient_accumulation_fusion", True, "gradient_accumulation_fusion"),
        ("moe_permute_fusion", True, "moe_permute_fusion"),
        ("moe_router_fusion", True, "moe_router_fusion"),
        ("moe_router_dtype", "fp64", "moe_router_dtype"),
        ("moe_token_dispatcher_type", "flex", "moe_token_dispatcher_type"),
        ("decoder_first_pipeline_num_layers", 3, "num_layers_in_first_pipeline_stage"),
        ("decoder_last_pipeline_num_layers", 2, "num_layers_in_last_pipeline_stage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_switch_reaches_megatron_under_its_own_name(setting: str, value: Any, field: str) -> None:
    assert run_fields(Learner(**{setting: value}))[field] == value
    assert run_fields(Learner()).get(field) != value


@pytest.mark.usefixtures("process_groups")
def test_fields_that_users_set_reach_the_model_the_gradients_and_the_optimizer(tmp_path: Path) -> None:
    create_tiny_model(TinyModel(num_layers=1, hidden_size=32, ffn_hidden_size=32), tmp_path / "model", seed=1)
    given = {"attention_softmax_in_fp32": False, "check_for_large_grads": True, "adam_eps": 1e-15}
    model = build_model(Learner(megatron_args=given), str(tmp_path / "model"))
    assert model.config.attention_softmax_in_fp32 is False
    assert model.chunks[0].ddp_config.check_for_large_grads is True
    assert {group["eps"] for group in model.optimizer.param_groups} == {1e-15}


@pytest.mark.usefixtures("process_groups")
def test_users_cannot_set_a_field_that_the_run_sets() -> None:
    assert SET_BY_THE_RUN.keys() >= run_fields(Learner()).keys()


@pytest.mark.usefixtures("process_groups")
@pytest.mark.parametrize(
    "kind, of_the_plugin, swiglu",
    [(LlamaConfig, {}, True), (GemmaConfig, {}, False), (LlamaConfig, {"activation_func": gelu}, False)],
    ids=["SwiGLU", "GeGLU", "an activation of the plug-in"],
)
def test_transformer_engines_fused_kernels_are_used_unless_they_are_turned_off(
    kind: type[PretrainedConfig],
    of_the_plugin: dict[str, Any],
    swiglu: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Llama, "transformer_config", lambda *_: of_the_plugin)
    monkeypatch.setattr(plugin_source, "on_cpu", lambda: False)
    monkeypatch.setattr(plugin_source, "uses_local_layers", lambda settings: False)
    # Megatron refuses fused kernels where Transformer Engine is not installed.
    monkeypatch.setattr(plugin_source, "TransformerConfig", SimpleNamespace)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    kind().save_pretrained(tmp_path)
    fused = PluginSource(Learner(), str(tmp_path)).config
    assert (fused.apply_rope_fusion, fused.gradient_accumulation_fusion) == (True, True)
    assert fused.bias_activation_fusion is swiglu
    assert PluginSource(Learner(rope_fusion=False), str(tmp_path)).config.apply_rope_fusion is False
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    without_apex = PluginSource(Learner(), str(tmp_path)).config
    assert without_apex.gradient_accumulation_fusion is False, "Megatron cannot build an output layer with this fusion"


def test_only_the_chosen_attention_kernels_are_allowed() -> None:
    assert attention_kernels(Learner()) == {}
    allowed = attention_kernels(Learner(attention_backend="fused"))
    assert allowed == {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"}
    assert allowed.keys() == set(ATTENTION)


def test_a_cpu_computes_in_float32_unless_bf16_is_asked_for() -> None:
    assert dtype_of(Learner()) is torch.float32
    assert dtype_of(Learner(precision="bf16")) is torch.bfloat16


@pytest.mark.usefixtures("gpu")
def test_a_gpu_computes_in_bfloat16_with_transformer_engine_unless_float32_is_asked_for() -> None:
    assert dtype_of(Learner()) is torch.bfloat16
    assert not uses_local_layers(Learner())
    assert dtype_of(Learner(precision="fp32")) is torch.float32
    assert uses_local_layers(Learner(precision="fp32")), "Transformer Engine has no packed attention in float32"


def test_local_layers_refuse_what_only_those_of_transformer_engine_can_do() -> None:
    with pytest.raises(UserError, match=r"only those of Transformer Engine have moe_router_fusion: unset"):
        refuse_for_local_layers(Learner(moe_router_fusion=True))
    with pytest.raises(UserError, match=r"have recompute_modules layernorm and recompute_modules moe_act"):
        refuse_for_local_layers(Learner(recompute_modules=["layernorm", "moe_act"]))


def test_masks_of_context_parallelism_are_refused_above_a_size() -> None:
    refuse_for_local_layers(Learner(context_parallel_size=2, max_tokens_per_gpu=16384))
    refuse_for_local_layers(Learner(max_tokens_per_gpu=65536))
    with pytest.raises(UserError, match=r"may hold 65536 tokens: install Transformer Engine .* to 16384 or less"):
        refuse_for_local_layers(Learner(context_parallel_size=2, max_tokens_per_gpu=32768))
