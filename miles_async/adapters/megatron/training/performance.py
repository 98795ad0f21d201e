"""What a step took of the machine."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel
from miles_async.batching.batch import TrainStep
from miles_async.batching.flops import LayerSizes, training_flops

_PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}
"""Dense bf16 operations per second by what is in the device's name (NVIDIA's data sheets, without sparsity)."""


def usage(model: MegatronModel, steps: Sequence[TrainStep], seconds: float) -> dict[str, float]:
    """`memory_gib`, this rank's peak so far; and `mfu` where the device's own speed is known and bf16 is computed.

    MegatronModel FLOPs utilization counts what the model needs, forward and backward (PaLM, arXiv 2204.02311, appendix B):
    recomputation, log-probabilities of old policies and the critic make it lower.
    """
    if on_cpu():
        return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    found = {"memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    name = torch.cuda.get_device_name()
    peak = next((speed for words, speed in _PEAKS.items() if words in name), None)
    if peak is not None and model.bridge.config.bf16:
        lengths = [int(length) for step in steps for batch in step.micro_batches for length in batch.lengths]
        sharing = torch.distributed.get_world_size() // parallel_state.get_data_parallel_world_size()
        found["mfu"] = training_flops(lengths, _sizes(model)) / (seconds * peak * sharing)
    return found


def _sizes(model: MegatronModel) -> LayerSizes:
    config = model.bridge.config
    experts = config.num_moe_experts is not None
    return LayerSizes(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads_width=config.num_attention_heads * config.kv_channels,
        groups_width=config.num_query_groups * config.kv_channels,
        feed_forward=config.moe_ffn_hidden_size * config.moe_router_topk if experts else config.ffn_hidden_size,
        vocabulary=model.vocab_size,
    )
