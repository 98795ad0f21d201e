"""The training state of a model with the shape of Qwen3-0.6B: copies to host memory and back, and checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks.gpu_check.learner import furthest, token_lists
from benchmarks.gpu_check.measure import NO_GPU_MEMORY, ROUNDS, report_peak, start_peak, timed
from benchmarks.gpu_check.offload import LENGTHS, UNCHANGED
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.step import SHORT, learner_config, train_steps
from benchmarks.gpu_check.surroundings import DEVICE, ON_GPU, Surroundings
from miles_async.adapters.megatron.checkpoint.state_copy import CheckpointCopy
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import Snapshot, model_tensors
from miles_async.batching.batch import TrainStep
from tests.stack.learning import learning

COPIED = 2**31 if ON_GPU else 2**24
"""Bytes of a bare copy."""


def check(report: Report, surroundings: Surroundings) -> None:
    """Report the bandwidth of bare copies, of a rollback's copy and of offloading, and the cost of a checkpoint."""
    with report.part("bare copies"):
        bare_copies(report)
    steps = train_steps(SHORT)
    with learning(surroundings.qwen3(), learner_config()) as learner:
        learner.train(0, steps)  # creates the state of the optimizer
        state = state_bytes(learner)
        report.figure("state: size", state / 2**30, "GiB")
        with report.part("rollback"):
            rollback(report, learner, steps, state)
        with report.part("offload"):
            offload(report, learner, state)
        with report.part("checkpoint"):
            checkpoint(report, learner, steps, surroundings.folder / "saved")


def bare_copies(report: Report) -> None:
    """Report what copies between host memory and the GPU can reach."""
    on_device = torch.zeros(COPIED, dtype=torch.uint8, device=DEVICE)
    for kind in ("pageable", "pinned"):
        on_host = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=kind == "pinned" and ON_GPU)
        for direction, source, target in (("to the host", on_device, on_host), ("back", on_host, on_device)):
            seconds = min(timed(partial(target.copy_, source)) for _ in range(ROUNDS))
            report.figure(f"{kind} memory: {direction}", COPIED / seconds / 1e9, "GB/s")


def rollback(report: Report, learner: MegatronLearner, steps: list[TrainStep], state: int) -> None:
    """Report the copy from which a batch of several optimizer steps is restored; and train, and restore it."""
    sequences = token_lists(LENGTHS)
    expected, before = learner.logprobs(sequences), host_bytes()
    snapshots: list[Snapshot] = []
    for kind in ("first copy", "copy"):  # the first one includes the allocation of host memory
        seconds = timed(lambda: snapshots.append(Snapshot(learner._model)))
        report.figure(f"rollback: {kind}", state / seconds / 1e9, "GB/s")
    report.figure("rollback: copy, time", 1e3 * seconds, "ms")
    report.figure("rollback: host memory", (host_bytes() - before) / 2**30, "GiB")
    learner.train(1, steps)
    seconds = timed(snapshots[-1].restore)
    report.figure("rollback: restore", state / seconds / 1e9, "GB/s")
    apart = furthest(learner.logprobs(sequences), expected)
    report.figure("rollback: log-probabilities changed by", apart, "nats", at_most=UNCHANGED)


def offload(report: Report, learner: MegatronLearner, state: int) -> None:
    """Report how fast the state leaves the GPU and returns."""
    if not ON_GPU:
        report.not_possible("offload", NO_GPU_MEMORY)
        return
    sequences = token_lists(LENGTHS)
    expected = learner.logprobs(sequences)
    report.figure("offload: to the host", state / timed(learner.offload) / 1e9, "GB/s")
    report.figure("offload: back", state / timed(learner.onload) / 1e9, "GB/s")
    apart = furthest(learner.logprobs(sequences), expected)
    report.figure("offload: log-probabilities changed by", apart, "nats", at_most=UNCHANGED)


def checkpoint(report: Report, learner: MegatronLearner, steps: list[TrainStep], folder: Path) -> None:
    """Save, train and load; report time, memory above that of the state, and what has changed."""
    sequences = token_lists(LENGTHS)
    expected, on_host, on_device = learner.logprobs(sequences), host_bytes(), start_peak()
    copies: list[CheckpointCopy] = []
    for kind in ("first copy", "copy"):
        seconds = timed(lambda: copies.append(learner.copy_state(str(folder))))
        report.figure(f"checkpoint: {kind}, time", 1e3 * seconds, "ms")
    report_peak(report, "checkpoint: copy, GPU memory", on_device)
    report.figure("checkpoint: copy, host memory", (host_bytes() - on_host) / 2**30, "GiB")
    copy = copies.pop()
    report.figure("checkpoint: write, time", 1e3 * timed(lambda: copy.finish([copy.write()])), "ms")
    learner.train(2, steps)
    on_host, on_device = host_bytes(), start_peak()
    report.figure("checkpoint: load, time", 1e3 * timed(lambda: learner.load_state(str(folder))), "ms")
    report_peak(report, "checkpoint: load, GPU memory", on_device)
    report.figure("checkpoint: load, host memory kept", (host_bytes() - on_host) / 2**30, "GiB")
    apart = furthest(learner.logprobs(sequences), expected)
    report.figure("checkpoint: log-probabilities changed by", apart, "nats", at_most=UNCHANGED)


def state_bytes(learner: MegatronLearner) -> int:
    """Size of weights, fp32 copies and moments."""
    storages = (tensor.untyped_storage() for tensor in model_tensors(learner._model))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def host_bytes() -> int:
    """Main memory of this process."""
    return psutil.Process().memory_info().rss
