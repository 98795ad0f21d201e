"""A learner and an engine that take turns on one GPU (`--colocate`): the memory that each frees for the other."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu_check.learner import furthest, token_lists
from benchmarks.gpu_check.publish import LEARNING_RATE, recompute, require_transport, train
from benchmarks.gpu_check.report import NotPossibleError, Report
from benchmarks.gpu_check.surroundings import LARGE, ON_GPU, REQUEST_SECONDS, SMALL, Precision, Surroundings, score
from benchmarks.settings import TRAINING
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.engine import call_engine
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.config.schema import RunConfig, Weights
from tests.configuration import run_config
from tests.stack.learning import learning

LENGTHS = (5, 17, 100)
UNCHANGED = 1e-3
"""In nats. Weights that were lost change log-probabilities by far more, and kernels may round in another order."""
LEAST_FREED = {"learner": 0.9, "engine": 0.6}
"""Part of the tensors of a learner, and of all memory of an engine, whose CUDA context and kernels stay."""


def check(report: Report, surroundings: Surroundings) -> None:
    checkpoint = surroundings.checkpoint(LARGE if ON_GPU else SMALL)
    run = settings("bf16")
    with learning(checkpoint, run) as learner:
        offload_learner(report, learner, run)
        learner.offload()
        before = used_bytes()
        with surroundings.engine(checkpoint, "bf16", colocated=True) as engine:
            release_and_resume(report, engine, used_bytes() - before)
            learner.onload()
            send_weights(report, engine, learner, run, surroundings.folder / "weights")


def settings(precision: Precision) -> RunConfig:
    return run_config(**TRAINING, precision=precision, lr=LEARNING_RATE)


def offload_learner(report: Report, learner: MegatronLearner, run: RunConfig) -> None:
    """Offload a learner with optimizer state, and bring it back."""
    with report.part("learner"):
        train(learner, run)
        sequences = token_lists(LENGTHS)
        expected, before = learner.logprobs(sequences), used_bytes()
        learner.offload()
        held = sum(offloaded.bytes for offloaded in learner._offloaded)
        _freed(report, "learner: memory freed", before - used_bytes(), LEAST_FREED["learner"] * held)
        learner.onload()
        apart = furthest(learner.logprobs(sequences), expected)
        report.figure("learner: log-probabilities changed by", apart, "nats", at_most=UNCHANGED)


def release_and_resume(report: Report, engine: EngineInfo, held: int) -> None:
    """`held` are the bytes of the device that the engine uses."""
    with report.part("engine"):
        sequences = token_lists(LENGTHS)
        expected, before = score(engine, sequences), used_bytes()
        call_engine(engine, "/release_memory_occupation", {}, timeout=REQUEST_SECONDS)
        _freed(report, "engine: memory freed", before - used_bytes(), LEAST_FREED["engine"] * held)
        call_engine(engine, "/resume_memory_occupation", {}, timeout=REQUEST_SECONDS)
        apart = furthest(score(engine, sequences), expected)
        report.figure("engine: log-probabilities changed by", apart, "nats", at_most=UNCHANGED)


def send_weights(report: Report, engine: EngineInfo, learner: MegatronLearner, run: RunConfig, folder: Path) -> None:
    """Publish as a colocated run does: a step while the engine is off the device, then a send while the learner is.

    From the second turn on, the weights are staged where the transport reads them.
    """
    with report.part("engine resumed"):
        named = describe(learner.weights())
        source = WeightSource(named, folder, Weights(update_weight_timeout_seconds=REQUEST_SECONDS))
        source.connect([engine], {})
        for version, transport in enumerate(("disk", "p2p", "ipc"), start=20):
            part = f"engine resumed, {transport}"
            with report.part(part):
                require_transport(transport)
                if transport == "p2p" and ON_GPU:
                    raise NotPossibleError("SGLang offers no Mooncake engine beside its memory saver")
                for _ in range(2):
                    call_engine(engine, "/release_memory_occupation", {}, timeout=REQUEST_SECONDS)
                    learner.onload()
                    train(learner, run)
                    source.stage(version, learner.weights(), [transport])
                    before = used_bytes()
                    learner.offload()
                    freed, held = before - used_bytes(), sum(offloaded.bytes for offloaded in learner._offloaded)
                    call_engine(engine, "/resume_memory_occupation", {}, timeout=REQUEST_SECONDS)
                    outcome = source.send(version, engine.name, transport)
                    if outcome.error is not None:
                        raise RuntimeError(outcome.error)
                _freed(report, f"{part}: memory freed", freed, LEAST_FREED["learner"] * held)
                report.figure(f"{part}: send", outcome.seconds, "s")
                learner.onload()
                recompute(report, learner, engine, part, version, run.learner.precision or "bf16")
        source.close()


def used_bytes() -> int:
    """Used memory of the GPU, by all processes; 0 on a CPU."""
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _freed(report: Report, part: str, freed: int, at_least: float) -> None:
    if not ON_GPU:
        report.not_possible(part, "without a GPU there is no device memory to free")
        return
    report.figure(part, freed / 2**30, "GiB", at_least=at_least / 2**30)
