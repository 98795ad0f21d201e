"""Layers with the names and the parameters of Megatron's Transformer Engine layers, in torch: they need no GPU.

Megatron-Bridge builds its models from Transformer Engine's layers, and converts weights by the names of parameters and
of classes. With these layers its models, layer specs and conversions run unchanged without Transformer Engine, and the
names of parameters are those on GPUs. `install` puts the layers in place.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from miles_async.adapters.megatron.model import linear_attention
from miles_async.adapters.megatron.model.local_layers import LocalAttention, LocalNorm, rms_norm


class TENorm:
    """Creates a norm; Megatron's class of this name is such a factory too."""

    def __new__(cls, config: Any, hidden_size: int, eps: float | None = None, **_: Any) -> Any:
        _needs_rms_norm(config)
        return LocalNorm(
            config, hidden_size, config.layernorm_epsilon if eps is None else eps, dtype=config.params_dtype
        )


def _needs_rms_norm(config: Any) -> None:
    if config.normalization != "RMSNorm":
        raise ValueError(f"{config.normalization} needs Transformer Engine")


class TELinear(MegatronModule):  # type: ignore[misc]
    """A linear layer whose whole weight is on every tensor-parallel rank."""

    def __init__(
        self, input_size: int, output_size: int, *, parallel_mode: str | None, config: Any, bias: bool, **options: Any
    ) -> None:
        super().__init__(config)
        assert parallel_mode in (None, "duplicated"), parallel_mode
        self.parallel_mode = parallel_mode
        self._skips_bias = options["skip_bias_add"]
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns [..., output size] from `x` [..., input size], and a bias that was not added."""
        if self._skips_bias:
            return linear(x, self.weight), self.bias
        return linear(x, self.weight, self.bias), None


class TEColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's own layer by another name."""


class TERowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's own layer by another name."""


class TELayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear layer that normalizes its input."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        _needs_rms_norm(config)
        self._eps, self._zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        weight = self.layer_norm_weight + 1 if self._zero_centered else self.layer_norm_weight
        return self.project(rms_norm(x, weight, self._eps), *args, **options)

    def project(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """The linear layer alone."""
        return super().forward(x, *args, **options)


class _GroupedLinear(MegatronModule):  # type: ignore[misc]
    """The linear layers of this rank's experts; each expert gets its own rows of the input."""

    axis: ClassVar[int]
    """Dimension of the weights along which expert-tensor-parallel ranks split them."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self._count, self._skips_bias, self._groups = num_gemms, skip_bias_add, pg_collection
        ranks = pg_collection.expt_tp.size()
        shape = [output_size, input_size]
        shape[self.axis] //= ranks
        # Megatron sums the gradients of experts over their own group of ranks.
        shared = config.expert_model_parallel_size > 1 or ranks != config.tensor_model_parallel_size
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(weight, True, self.axis, 1)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                vector = torch.nn.Parameter(torch.empty(shape[0], dtype=config.params_dtype))
                if self.axis == 0:
                    set_tensor_model_parallel_attributes(vector, True, 0, 1)
                self.register_parameter(f"bias{i}", vector)
        for parameter in self.parameters():
            parameter.allreduce = not shared
        self._has_bias = bias

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Returns [t, output size] from `x` [t, input size], whose rows are sorted by expert, `m_splits` of each."""
        biases = [self.get_parameter(f"bias{i}") for i in range(self._count)] if self._has_bias else None
        added = [None] * self._count if biases is None or self._skips_bias else biases
        parts = [
            linear(part, self.get_parameter(f"weight{i}"), added[i]) for i, part in enumerate(x.split(list(m_splits)))
        ]
        return torch.cat(parts), biases if self._skips_bias else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Each weight is one row of a tensor of all experts, as in Transformer Engine's layer."""
        metadata, state, groups = ensure_metadata_has_dp_cp_group(metadata), self.state_dict(), self._groups
        first, count = groups.ep.rank() * self._count, groups.ep.size() * self._count
        axes = {"weight": self.axis} | ({"bias": 0} if self.axis == 0 else {})
        result = {}
        for i in range(self._count):
            offsets = (*sharded_offsets, (len(sharded_offsets), first + i, count))
            own = {name: self.get_parameter(f"{name}{i}") for name in ("weight", "bias") if f"{name}{i}" in state}
            groups_of_shards = {"tp_group": groups.expt_tp, "dp_cp_group": metadata["dp_cp_group"]}
            for key, shard in make_sharded_tensors_for_checkpoint(
                own, prefix, axes, offsets, **groups_of_shards
            ).items():
                shard.replica_id = (*shard.replica_id[:2], groups.expt_dp.rank())
                result[f"{key}{i}"] = shard
        return result


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """The experts' first layer."""

    axis: ClassVar[int] = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    """The experts' second layer."""

    axis: ClassVar[int] = 1


class TEDotProductAttention(LocalAttention):
    """Causal attention with what models add to it: a window, a scale, a sink per head, and caps of the scores."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config)
        self._groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self._scale: float | None = config.softmax_scale if softmax_scale is None else softmax_scale
        self._window: int | None = None
        """Most tokens before its own that a token attends to."""
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self._window = config.window_size[0]
        self._cap: float | None = None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self._groups.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise ValueError(f"softmax_type {config.softmax_type} needs Transformer Engine")

    @classmethod
    def with_capped_scores(cls, config: Any, *, scale: float, window: int | None, cap: float) -> TEDotProductAttention:
        """Attention whose scores are `cap * tanh(score / cap)`, as in Gemma 2."""
        attention = cls(config, 1, softmax_scale=scale)
        attention._window, attention._cap = window, cap
        return attention

    def forward(self, *args: Any, **options: Any) -> Any:
        """Returns [t, heads * d], the shape from which multi-head latent attention cuts the padding of its values."""
        return super().forward(*args, **options)[:, 0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self._window is None and self.softmax_offset is None and self._cap is None:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
            )
        visible = self._visible(k, mask)
        if self._cap is not None:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            scores = self._cap * torch.tanh(q @ k.transpose(-1, -2) * (self._scale or q.shape[-1] ** -0.5) / self._cap)
            return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        if self.softmax_offset is not None:
            # A sink is one more key, which has a score and no value.
            added = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)
            sinks = self.softmax_offset.to(q.dtype)[:, None, None].expand(-1, q.shape[2], 1)
            rows = (len(added), q.shape[1], -1, -1)
            visible = torch.cat((added.expand(rows), sinks.expand(rows)), -1)
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self._scale, enable_gqa=True)

    def _visible(self, k: Tensor, mask: Tensor | None) -> Tensor:
        """[1 or n, 1, queries, keys] true where a query attends."""
        keys = torch.arange(k.shape[2], device=k.device)
        if mask is None:
            mask = (keys <= keys[:, None])[None, None]
        if self._window is None:
            return mask
        # A query sees all keys up to its own position.
        positions = mask.sum(-1, keepdim=True) - 1
        return mask & (keys >= positions - self._window)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        metadata, state = ensure_metadata_has_dp_cp_group(metadata), self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self._groups.tp, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


class TESpecProvider(BackendSpecProvider):  # type: ignore[misc]
    """Chooses these layers for a layer spec."""

    def linear(self) -> type:
        return TELinear

    def column_parallel_linear(self) -> type:
        return TEColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return TERowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, **_: bool) -> type:
        return TENorm

    def core_attention(self) -> type:
        return TEDotProductAttention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        if moe_use_grouped_gemm:
            grouped = experts.GroupedMLPSubmodules(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)
            return partial(experts.TEGroupedMLP, submodules=grouped)
        single = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
        return partial(experts.SequentialMLP, submodules=single)


_LAYERS: Mapping[str, Any] = {
    layer.__name__: layer
    for layer in (
        TENorm,
        TELinear,
        TEColumnParallelLinear,
        TERowParallelLinear,
        TELayerNormColumnParallelLinear,
        TEColumnParallelGroupedLinear,
        TERowParallelGroupedLinear,
        TEDotProductAttention,
        TESpecProvider,
    )
}


@cache
def install() -> None:
    """Let Megatron's modules find these layers under Transformer Engine's names, in this process from now on.

    It must come before the first import of Megatron's hybrid models and of Megatron-Bridge, which create layer specs
    when they are imported.
    """
    late = ("megatron.bridge", "megatron.core.models.hybrid.hybrid_layer_specs", "megatron.core.ssm.mamba_mixer")
    early = [name for name in late if name in sys.modules]
    assert not early, f"{early} were imported before"
    extensions = importlib.import_module("megatron.core.extensions.transformer_engine")
    extensions.SplitAlongDim = _split  # type: ignore[attr-defined]
    for name in (
        "megatron.core.extensions.transformer_engine_spec_provider",
        "megatron.core.models.gpt.moe_module_specs",
        "megatron.core.transformer.multi_token_prediction",
    ):
        importlib.import_module(name)
    for name, module in sys.modules.copy().items():
        if name.startswith("megatron.core"):
            vars(module).update({layer: cls for layer, cls in _LAYERS.items() if layer in vars(module)})
    # These modules define the names only if Transformer Engine is installed.
    variants = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    variants.TESpecProvider = TESpecProvider  # type: ignore[attr-defined]
    block = importlib.import_module("megatron.core.transformer.transformer_block")
    block.LayerNormImpl = TENorm  # type: ignore[attr-defined]
    vars(moe_utils).setdefault("te_general_gemm", None)
    linear_attention.install()


def _split(tensor: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return tensor.split(list(sizes), dim)
