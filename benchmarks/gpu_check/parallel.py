"""Layouts over several ranks, with one GPU each and NCCL, or on the CPU with gloo, against one rank in float32."""

from __future__ import annotations

import math
import multiprocessing
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.gpu_check.learner import LOGPROB_LIMIT, furthest, token_lists
from benchmarks.gpu_check.report import NotPossibleError, Report
from benchmarks.gpu_check.surroundings import ON_GPU, SMALL, Precision, Surroundings
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.batch import rank_batches
from tests.configuration import run_config
from tests.stack.learning import gradients_of, save_state, uneven_groups, without_compiler

# On a GPU a forked process cannot use CUDA. On a CPU all ranks are forked from a process that has imported Megatron.
_processes: Any = multiprocessing.get_context("spawn" if ON_GPU else "forkserver")
if not ON_GPU:
    _processes.set_forkserver_preload([__name__])

RANKS = torch.cuda.device_count() if ON_GPU else 4
DENSE = SMALL.model_copy(update={"num_layers": 4})
EXPERTS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.01,
    "norm_topk_prob": True,
}
"""Settings of a `Qwen3MoeConfig` with widths and logits like those of `SMALL`."""


class Layout(NamedTuple):
    experts: bool
    """Whether the model has experts."""
    ranks: int
    settings: Mapping[str, Any]


TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
LAYOUTS = {
    "data parallel": Layout(False, 2, {}),
    "tensor parallel": Layout(False, 2, TENSOR),
    "pipeline": Layout(False, 2, PIPELINE),
    "uneven pipeline": Layout(False, 2, PIPELINE | {"decoder_first_pipeline_num_layers": 1}),
    "context parallel": Layout(False, 2, {"context_parallel_size": 2}),
    "tensor parallel, pipeline": Layout(False, 4, TENSOR | PIPELINE),
    "expert parallel": Layout(True, 2, EXPERT),
    "experts dealt to tensor-parallel ranks": Layout(True, 2, TENSOR | EXPERT | {"expert_tensor_parallel_size": 1}),
    "tensor and expert parallel": Layout(True, 4, TENSOR | EXPERT),
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
LENGTHS = (5, 17, 40)
"""Tokens of the sequences whose log-probabilities are compared."""
GRADIENT_LIMIT = {"fp32": 1e-4, "bf16": 3e-2}
"""Largest distance of the gradients, relative to their norm."""

REROUTED = 0.1
"""In nats. With experts, rounding in bfloat16 may send a token to another expert."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks of a layout compute."""

    layout: Layout
    precision: Precision
    checkpoint: Path
    rollouts: Sequence[int]
    """Number of the batch of each step."""
    load: Path | None = None
    """The training state with which the steps begin; None for that of the checkpoint."""
    save: Path | None = None
    """Where the state after the steps is written."""


@dataclass(frozen=True, slots=True)
class Computed:
    logprobs: list[list[float]]
    """With the weights of the checkpoint, in nats."""
    gradients: dict[str, NDArray[np.float32]]
    """Of the first batch, with the same weights."""
    loaded: list[list[float]]
    """Log-probabilities before the steps."""
    stepped: list[list[list[float]]]
    """Log-probabilities after each step."""


def check(report: Report, surroundings: Surroundings) -> None:
    with Ranks(RANKS) as ranks:
        for experts in (False, True):
            with report.part("experts" if experts else "dense"):
                require_ranks(2)
                compare(report, surroundings, ranks, experts=experts)


def compare(report: Report, surroundings: Surroundings, ranks: Ranks, *, experts: bool) -> None:
    """Compare each layout with one rank in float32, and a run that takes a step under each with a run on one rank."""
    layouts = {name: layout for name, layout in LAYOUTS.items() if layout.experts == experts}
    checkpoint = create_experts(surroundings) if experts else surroundings.checkpoint(DENSE)
    one_rank, every_step = Layout(experts, 1, {}), range(len(layouts))
    exact = ranks.compute(Task(one_rank, "fp32", checkpoint, every_step))
    for precision in PRECISIONS:
        alone = exact if precision == "fp32" else ranks.compute(Task(one_rank, precision, checkpoint, every_step))
        expected, taken, saved = [alone.logprobs, *alone.stepped], 0, None
        for name, layout in layouts.items():
            part = f"{name}, {precision}"
            limit = REROUTED if experts and precision == "bf16" else LOGPROB_LIMIT[precision]
            with report.part(part):
                require_ranks(layout.ranks)
                task = Task(layout, precision, checkpoint, [taken], load=saved, save=surroundings.folder / part)
                found = ranks.compute(task)
                apart = furthest(found.logprobs, exact.logprobs)
                report.figure(f"{part}: log-probabilities", apart, "nats", at_most=limit)
                apart = distance(found.gradients, exact.gradients)
                report.figure(f"{part}: gradients", apart, "relative", at_most=GRADIENT_LIMIT[precision])
                apart = furthest(found.loaded, expected[taken])
                report.figure(f"{part}: state loaded", apart, "nats", at_most=limit)
                apart = furthest(found.stepped[0], expected[taken + 1])
                report.figure(f"{part}: step", apart, "nats", at_most=limit)
                taken, saved = taken + 1, task.save


def require_ranks(count: int) -> None:
    if count > RANKS:
        raise NotPossibleError(f"NCCL needs a GPU for each of {count} ranks, and this machine has {RANKS}")


def create_experts(surroundings: Surroundings) -> Path:
    return surroundings.random_model("small experts", Qwen3MoeForCausalLM, Qwen3MoeConfig(**EXPERTS))


def distance(ours: Mapping[str, NDArray[np.float32]], exact: Mapping[str, NDArray[np.float32]]) -> float:
    """The norm of the difference of all gradients together, relative to their norm."""
    if ours.keys() != exact.keys():
        raise RuntimeError(f"there are gradients of other tensors: {sorted(ours.keys() ^ exact.keys())}")
    apart = sum(float(np.square(ours[name] - one).sum()) for name, one in exact.items())
    return math.sqrt(apart / sum(float(np.square(one).sum()) for one in exact.values()))


def computed(task: Task, rank: int, port: int) -> Computed:
    """One rank's part. The results are the same on all ranks."""
    ranks, sequences = task.layout.ranks, token_lists(LENGTHS)
    run = run_config(
        precision=task.precision,
        lr=1e-4,
        max_tokens_per_gpu=40,
        share_prefixes=False,
        use_distributed_optimizer=True,  # as by default on GPUs
        moe_router_dtype="fp32",
        actor_num_gpus_per_node=ranks,
        **task.layout.settings,
    )
    learner = MegatronLearner(run, str(task.checkpoint), rank, ranks, "127.0.0.1", port)
    try:
        logprobs = learner.logprobs(sequences)
        batches = [rank_batches(uneven_groups(rollout), run, ranks)[rank] for rollout in (0, *task.rollouts)]
        gradients = gradients_of(learner, batches[0][0])
        if task.load is not None:
            learner.load_state(str(task.load))
        loaded, stepped = learner.logprobs(sequences), []
        for rollout, steps in zip(task.rollouts, batches[1:], strict=True):
            if not learner.train(rollout, steps).finite:
                raise RuntimeError("a loss or gradient is not finite")
            stepped.append(learner.logprobs(sequences))
        if task.save is not None:
            save_state(learner, task.save)
    finally:
        learner.close()
    return Computed(logprobs, {name: one.float().cpu().numpy() for name, one in gradients.items()}, loaded, stepped)


class Ranks:
    """Processes that compute one task after the other, with a device each.

    They are started with the first task, and again after a failure.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._started: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._started:
            process.kill()
            process.join()
            connection.close()
        self._started = []

    def compute(self, task: Task) -> Computed:
        """Raises RuntimeError if a rank fails. The others may wait for it, so all are ended."""
        if not self._started:
            self._started = [_start(rank) for rank in range(self._count)]
        connections = [connection for _, connection in self._started[: task.layout.ranks]]
        results: dict[int, Computed] = {}
        port = free_port()
        for connection in connections:
            connection.send((task, port))
        while waiting := [rank for rank in range(len(connections)) if rank not in results]:
            ready = wait([connections[rank] for rank in waiting])
            for rank in waiting:
                if connections[rank] in ready:
                    results[rank] = self._receive(rank)
        return results[0]

    def _receive(self, rank: int) -> Computed:
        try:
            error, result = self._started[rank][1].recv()
        except EOFError:
            error, result = "its process ended", None
        if error is not None:
            self.__exit__()
            raise RuntimeError(f"rank {rank}: {error}")
        return result


def _start(rank: int) -> tuple[Any, Connection]:
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_serve, args=(rank, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(rank: int, connection: Connection) -> None:
    if ON_GPU:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    with nullcontext() if ON_GPU else without_compiler():
        while True:
            task, port = connection.recv()
            try:
                connection.send((None, computed(task, rank, port)))
            except Exception as error:
                traceback.print_exc()
                connection.send((repr(error), None))
