"""The memory of a real learner rank on a CPU, and the plan's job with the constants of a CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles_async.adapters.megatron.model.fake_ranks import LiveBytes
from miles_async.adapters.megatron.model.output_layer import CHUNK_ENTRIES, OutputLayer
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import distinct_storages, model_tensors
from miles_async.batching.batch import TrainStep
from miles_async.config.memory import learner_job, planned_model
from miles_async.config.schema import RunConfig
from miles_async.losses.logprobs import PART_ENTRIES
from miles_async.planning.plan import GIB, LearnerJob
from miles_async.types import Group, Sample


def measure(learner: MegatronLearner, first: Sequence[TrainStep], steps: Sequence[TrainStep]) -> dict[str, int | None]:
    """Bytes of a rank by the names of `RankMemory`: of its state, and of a step in addition.

    `first` is a step that creates the state of the optimizer. `activations` are those before the output layer; None
    before the last pipeline stage.
    """
    learner.train(0, first)
    chunks = learner._model.chunks
    buffers = [one.grad_data for chunk in chunks for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    weights, state = distinct_storages(parameters), distinct_storages(model_tensors(learner._model))
    live, kept = LiveBytes([*parameters, *buffers, *model_tensors(learner._model)]), []
    usual: Callable[..., Any] = OutputLayer.map

    def watched(layer: OutputLayer, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            kept.append(settled(live))
        return usual(layer, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputLayer, "map", watched)
        with live:
            learner.train(1, steps)
    return {
        "weights": sum(one.nbytes() for one in weights.values()),
        "gradients": sum(one.nbytes for one in buffers),
        "optimizer": sum(one.nbytes() for key, one in state.items() if key not in weights),
        "activations": max(kept, default=None),
        "peak": live.peak,
    }


def settled(live: LiveBytes) -> int:
    """The live bytes without the tensors of collectives, which gloo's threads drop after they have woken the caller."""
    found = live.now
    for _ in range(20):
        time.sleep(0.005)
        found = min(found, live.now)
    return found


def cpu_job(settings: RunConfig) -> LearnerJob:
    """What the plan is computed from, on a CPU: smaller parts of logits, a fused Adam, and activations without it."""
    model = planned_model(settings)
    assert model is not None
    job = learner_job(settings, model, GIB)
    return replace(
        job,
        split=replace(job.split, fusion=False),
        chunk_entries=CHUNK_ENTRIES,
        softmax=2 * 4 * PART_ENTRIES["cpu"],
        foreach_adam=False,
    )


def full_group(samples: int, tokens: int) -> Group:
    """Samples of `tokens` tokens, of which every other one has a reward."""
    draw = random.Random(0)
    prompt = [draw.randrange(256) for _ in range(8)]
    return Group(
        Sample(
            index=i,
            tokens=prompt + [draw.randrange(256) for _ in range(tokens - 8)],
            response_length=tokens - 8,
            rollout_log_probs=[-5.0] * (tokens - 8),
            reward=float(i % 2),
        )
        for i in range(samples)
    )
