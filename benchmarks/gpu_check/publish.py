"""Weights from a learner into a running engine by each transport: alone, and while the learner takes steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu_check.learner import furthest, token_lists
from benchmarks.gpu_check.measure import timed
from benchmarks.gpu_check.report import NotPossibleError, Report
from benchmarks.gpu_check.surroundings import (
    BOTH_ROUND,
    DEVICE,
    LARGE,
    ON_GPU,
    SMALL,
    Precision,
    Surroundings,
    can_import,
    generate,
    has_distribution,
    largest_gap,
    prompts,
    require_gpu,
    require_rdma,
)
from benchmarks.settings import TRAINING
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import Snapshot
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig, Weights
from tests.configuration import run_config
from tests.stack.learning import learning, uneven_groups

TRANSPORTS = ("disk", "disk_delta", "memory", "p2p", "ipc", "broadcast")
"""`broadcast` is the last one: if NCCL fails, the engine may not recover."""
ROUNDS = 3
SEND_SECONDS = 120.0
LEARNING_RATE = 5e-5
"""Large enough that one step changes most weights in bfloat16, too."""
LENGTHS = (5, 17, 100)
"""Tokens of the sequences whose log-probabilities show what steps have done."""
UNCHANGED = 1e-3
"""In nats. Steps that a send disturbs change log-probabilities by more; kernels may add up in another order."""


def check(report: Report, surroundings: Surroundings, precision: Precision) -> None:
    _check(report, surroundings, precision, TRANSPORTS, protocol="tcp")


def check_rdma(report: Report, surroundings: Surroundings) -> None:
    with report.part("p2p over RDMA"):
        require_gpu("a write into a GPU's memory")
        require_rdma()
        _check(report, surroundings, "bf16", ["p2p"], protocol="rdma")


def _check(
    report: Report, surroundings: Surroundings, precision: Precision, transports: Sequence[str], *, protocol: str
) -> None:
    checkpoint = surroundings.checkpoint(LARGE if ON_GPU else SMALL)
    with surroundings.engine(checkpoint, precision, protocol=protocol) as engine:
        compare(report, engine, checkpoint, surroundings.folder / "weights", precision, transports)


def compare(
    report: Report,
    engine: EngineInfo,
    checkpoint: Path,
    folder: Path,
    precision: Precision,
    transports: Sequence[str] = TRANSPORTS,
) -> None:
    run = run_config(**TRAINING, precision=precision, lr=LEARNING_RATE)
    with learning(checkpoint, run) as learner:
        source = WeightSource(describe(learner.weights()), folder, Weights(update_weight_timeout_seconds=SEND_SECONDS))
        source.connect([engine], {})
        try:
            for number, transport in enumerate(transports):
                with report.part(transport):
                    require_transport(transport)
                    publishing = Publishing(report, learner, run, source, engine, precision, transport)
                    alone = publishing.bandwidth(2 * number + 1)
                    publishing.beside_steps(2 * number + 2, alone)
        finally:
            source.close()


@dataclass(frozen=True, slots=True)
class Publishing:
    """What one transport is measured with."""

    report: Report
    learner: MegatronLearner
    run: RunConfig
    source: WeightSource
    engine: EngineInfo
    precision: Precision
    transport: str

    def bandwidth(self, version: int) -> float:
        """Train and publish a few times; returns the median seconds, in which the engine would be paused."""
        seconds = []
        for _ in range(ROUNDS):
            self.train()
            self.stage(version)
            seconds.append(self.send(version))
        staged, alone, part = staged_bytes(self.source), median(seconds), self.transport
        self.report.figure(f"{part}: bandwidth", staged.numel() / alone / 1e9, "GB/s")
        self.report.figure(f"{part}: of a bare copy", copy_seconds(staged) / alone, "fraction")
        recompute(self.report, self.learner, self.engine, part, version, self.precision)
        return alone

    def beside_steps(self, version: int, alone: float) -> None:
        """Publish while the learner takes as many steps as fit into `alone`, the seconds of a send without steps.

        The engine must get the staged weights, and not those of the steps. The steps must have the results that they
        have without the send.
        """
        part, sequences = f"{self.transport} beside steps", token_lists(LENGTHS)
        count = math.ceil(alone / timed(self.train))
        self.stage(version)
        snapshot = Snapshot(self.learner._model)
        steps_alone = timed(partial(self.train, count))
        expected = self.learner.logprobs(sequences)
        snapshot.restore()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.send, version)
            steps_beside = timed(partial(self.train, count))
        for what, seconds, before in (
            ("send", sending.result(), alone),
            ("step", steps_beside / count, steps_alone / count),
        ):
            self.report.figure(f"{part}: {what}", 1e3 * seconds, "ms")
            self.report.figure(f"{part}: {what} alone", 1e3 * before, "ms")
        apart = furthest(self.learner.logprobs(sequences), expected)
        self.report.figure(f"{part}: learner changed by", apart, "nats", at_most=UNCHANGED)
        snapshot.restore()
        recompute(self.report, self.learner, self.engine, part, version, self.precision)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            train(self.learner, self.run)

    def stage(self, version: int) -> None:
        self.source.stage(version, self.learner.weights(), [self.transport])

    def send(self, version: int) -> float:
        """Send the staged weights; returns the seconds."""
        outcome = self.source.send(version, self.engine.name, self.transport)
        if outcome.error is None:
            return outcome.seconds
        if "not in main memory" in outcome.error:
            raise NotPossibleError(outcome.error)
        raise RuntimeError(outcome.error)


def recompute(
    report: Report, learner: MegatronLearner, engine: EngineInfo, part: str, version: int, precision: Precision
) -> None:
    """Sample from prompts that no earlier version has cached, and compare with the learner's log-probabilities."""
    drawn = generate(engine, prompts(4, 40, first=200 + version), 32)
    gap = largest_gap(drawn, learner.logprobs([one.tokens for one in drawn]))
    report.figure(f"{part}: tokens recomputed by the learner", gap, "nats", at_most=BOTH_ROUND[precision])


def train(learner: MegatronLearner, run: RunConfig) -> None:
    [steps] = rank_batches(uneven_groups(0), run, 1)
    if not learner.train(0, steps).finite:
        raise RuntimeError("a loss or gradient is not finite")


def staged_bytes(source: WeightSource) -> torch.Tensor:
    assert source._staging is not None, "the source is connected"
    return source._staging.buffer


def copy_seconds(staged: torch.Tensor) -> float:
    """Median time of a plain copy of the staged bytes to the kind of memory that holds the engine's weights."""
    target = torch.empty_like(staged, device=DEVICE)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(staged)
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def require_transport(transport: str) -> None:
    if transport == "broadcast" and ON_GPU and torch.cuda.device_count() == 1:
        raise NotPossibleError("one GPU cannot run NCCL between two ranks: the learner and the engine need one each")
    if transport == "p2p" and not can_import("mooncake.engine"):
        raise NotPossibleError("Mooncake cannot be imported; install mooncake-transfer-engine and libibverbs1")
    if transport == "p2p" and ON_GPU and has_distribution("mooncake-transfer-engine-non-cuda"):
        raise NotPossibleError("this build of Mooncake cannot write to a GPU; install mooncake-transfer-engine")
