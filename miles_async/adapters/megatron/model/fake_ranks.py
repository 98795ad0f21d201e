"""Learner ranks without memory: Megatron's modules with fake tensors, which have a shape and no contents.

One process builds the part of each rank of any layout, at the size of the real model, in seconds. `make plan` prints
the memory plan from them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.even_experts import distribute_evenly
from miles_async.adapters.megatron.model.factory import open_source, use_positions
from miles_async.adapters.megatron.model.local_layers import replace_swiglu
from miles_async.adapters.megatron.model.mtp_heads import heads_of, return_heads
from miles_async.adapters.megatron.model.packed_params import packed_params
from miles_async.adapters.megatron.model.process_groups import group_sizes
from miles_async.adapters.megatron.model.source import ModelSource
from miles_async.batching.shared_prefixes import Pack
from miles_async.config.schema import Learner
from miles_async.models.layers import Weights
from miles_async.planning.plan import MeasuredStage

_MOST_TOKENS = 1024


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create, while they live. On a CPU torch keeps no account."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        """`existing` tensors are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in existing:
            self._add(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, leaf.untyped_storage().nbytes())
        return result

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _KnownContents(TorchDispatchMode):
    """Computes with the tensors that have contents, such as the bounds of sequences, on which shapes depend."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def measure_stages(settings: Learner, hf_checkpoint: str, tokens: int) -> list[MeasuredStage]:
    """The first rank of each pipeline stage, with the local layers and a micro-batch of `tokens` tokens per rank.

    No process groups may exist. Experts get equally many tokens.
    """
    settings = settings.model_copy(update={"transformer_impl": "local"})
    # What layers keep is proportional to the tokens. More of them would take longer with linear attention, which
    # computes its chunks one by one.
    tokens = min(tokens, _MOST_TOKENS)
    stages = settings.pipeline_model_parallel_size
    return [_measure_rank(settings, hf_checkpoint, stage * settings.ranks // stages, tokens) for stage in range(stages)]


def _measure_rank(settings: Learner, hf_checkpoint: str, rank: int, tokens: int) -> MeasuredStage:
    with _fake_groups(settings, rank), redirect_cuda_to_cpu():
        source = open_source(settings, hf_checkpoint, fuses=True)
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            chunks = source.build_chunks()
            named = [pair for chunk in chunks for pair in chunk.named_parameters()]
            expert = sum(parameter.numel() for name, parameter in named if ".experts." in name)
            weights = Weights(sum(parameter.numel() for _, parameter in named) - expert, expert)
            with torch.compiler.set_stance("force_eager"), _KnownContents():  # type: ignore[no-untyped-call]
                return MeasuredStage(weights, _kept(chunks, settings, source, tokens))


def _kept(chunks: Sequence[Any], settings: Learner, source: ModelSource, tokens: int) -> float:
    """Bytes per token that the chunks keep from a forward pass."""
    by_position, shares_prefixes = use_positions(source, chunks, settings)
    # Two sequences, as the tokens of each rank are divided.
    pack = Pack.of(np.array([tokens * settings.context_parallel_size // 2] * 2), None)
    positions = torch.empty(tokens, dtype=torch.int64)
    params = packed_params(
        pack,
        torch.device("cpu"),
        positions if by_position else None,
        local=True,
        shares_prefixes=shares_prefixes,
    )
    rows = tokens // (settings.tensor_model_parallel_size if settings.sequence_parallel else 1)
    ids, results = torch.empty(1, tokens, dtype=torch.int64), []
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    with LiveBytes([*parameters, ids, positions]) as live:
        for chunk in chunks:
            replace_swiglu(chunk)
            distribute_evenly(chunk)
            model = unwrap_model(chunk)
            if model.post_process:
                model.output_layer.forward = _return_input
                if heads_of(source.config):
                    return_heads(model)
            if not model.pre_process:
                shape = (rows, 1, source.config.hidden_size)
                model.set_input_tensor([torch.empty(shape, dtype=source.config.params_dtype, requires_grad=True)])
            results.append(chunk(ids, positions[None], None, packed_seq_params=params))
        return live.now / tokens


def _return_input(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    return hidden, None


@contextmanager
def _fake_groups(settings: Learner, rank: int) -> Iterator[None]:
    """Megatron's process groups, as `rank` sees them. The other ranks do not exist, and collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=settings.ranks)
    try:
        parallel_state.initialize_model_parallel(**group_sizes(settings), create_gloo_process_groups=False)
        initialize_rng_tracker(inference_rng_tracker=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
