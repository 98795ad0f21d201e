"""The process of one learner rank. The cluster makes it a Ray actor with `ray.remote(LearnerRank)`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.storage.warm_starts import Problems, WarmStarted
from miles_async.adapters.system.network_ports import ClaimedPort, claim_port
from miles_async.config.schema import RunConfig
from miles_async.observability.console.logging import configure_logging, configure_worker_logging
from miles_async.types import StepReport, WriteOutcome

# The driver names this class and must not wait for torch and Megatron, which take ten seconds to import: the actor's
# own process imports them in the methods that need them.
if TYPE_CHECKING:
    from miles_async.adapters.megatron.checkpoint.state_copy import CheckpointCopy
    from miles_async.adapters.megatron.training.learner import MegatronLearner
    from miles_async.adapters.weights.source import Source
    from miles_async.batching.batch import TrainStep

T = TypeVar("T")
ENGINES_AT_ONCE = 16
"""That one rank writes weights to."""


class LearnerRank:
    """Megatron in one thread, weight writes in others, checkpoint files in one: both travel while steps are taken.

    Everything that touches the model runs in the step thread, one call after the other. Each rank sends its own share
    of the weights; gathering them whole, one after the other, is for all ranks together.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, folder: Path) -> None:
        """`folder` is the run's own, shared with the engines."""
        configure_logging(config.observability.log_format)
        if config.learner.deterministic_mode:
            os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
        os.environ |= config.learner.train_env_vars  # before torch is imported
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._folder = folder
        self._log = structlog.get_logger(__name__).bind(learner_rank=rank)
        _pin(config.learner.learner_cpus, rank, world_size)
        threads = config.learner.learner_threads or len(os.sched_getaffinity(0))
        # The thread count of an OpenMP team belongs to the thread that starts it.
        self._step = ThreadPoolExecutor(1, "step", initializer=_limit_threads, initargs=(threads,))
        self._weights = ThreadPoolExecutor(ENGINES_AT_ONCE, "weights")
        self._checkpoint = ThreadPoolExecutor(1, "checkpoint")
        self._learner: MegatronLearner
        self._port: ClaimedPort
        self._source: Source | None = None
        self._copy: CheckpointCopy

    async def log_to(self, logs: Path, process: str) -> None:
        """Write log and output into files there from now on."""
        configure_worker_logging(logs, process, logs.parent.name)

    async def warm_start(self, problems: Problems, check: Problems) -> WarmStarted:
        """The checkpoint to start from, taught or found in the cache. Only on one rank, and before `start`."""

        from miles_async.adapters.megatron.training.warm_start import warm_start

        def report(step: int, loss: float, accuracy: float) -> None:
            self._log.info("warm start", step=step, loss=round(loss, 3), greedy_accuracy=round(accuracy, 3))

        return await self._in_step(lambda: warm_start(self._config, problems, check, report))

    def claim_port(self, host: str) -> int:
        """A port of this node at which the ranks meet; rank 0 holds it."""
        self._port = claim_port(host)
        return self._port.number

    async def start(self, hf_checkpoint: str, master_addr: str, master_port: int) -> None:
        """Load the checkpoint. Call it on all ranks at once: each waits for the others."""

        def build() -> MegatronLearner:
            from miles_async.adapters.megatron.training.learner import MegatronLearner

            return MegatronLearner(self._config, hf_checkpoint, self._rank, self._world_size, master_addr, master_port)

        self._learner = await self._in_step(build)

    async def meet(self, engines: Sequence[EngineInfo]) -> None:
        """All ranks: the engines are these from now on. Raises EngineLostError where one does not answer or fit."""
        if self._source is None:
            # Naming the weights gathers them, one by one: all ranks take part.
            named = await self._in_step(lambda: [(name, tuple(t.shape)) for name, t in self._learner.weights()])
            self._source = weight_source(self._config, named, self._folder, self._rank, self._world_size)
        source = self._source
        await self._in_weights(lambda: source.meet(engines))

    async def reach(self, transport: str, engine: str) -> None:
        """Connect a way to an engine. Raises EngineLostError with what to do about it."""
        await self._in_weights(lambda: self._sending.reach(transport, engine))

    async def train(self, rollout_id: int, steps: Sequence[TrainStep]) -> StepReport:
        structlog.contextvars.bind_contextvars(rollout=rollout_id)
        return await self._in_step(lambda: self._train(rollout_id, steps))

    async def logprobs(self, token_lists: Sequence[list[int]]) -> list[list[float]]:
        return await self._in_step(lambda: self._learner.logprobs(token_lists))

    async def stage(self, version: int, transports: Sequence[str]) -> None:
        """Copy this rank's share of the weights aside as `version`, ready to go by `ways`; all ranks at once."""
        self._learner.version = version
        structlog.contextvars.bind_contextvars(version=version)
        await self._in_step(lambda: self._sending.stage(version, self._learner.weights()))
        for transport in transports:
            await self._in_weights(partial(self._sending.prepare, transport))

    async def write(self, version: int, engine: str, transport: str) -> WriteOutcome:
        """Write this rank's share of the staged version to one engine. Several engines may be written at once."""
        return await self._in_weights(lambda: self._sending.write(version, engine, transport))

    async def offload(self) -> None:
        """Leave the device's memory to an engine that shares it. All ranks."""
        await self._in_step(lambda: self._learner.offload())

    async def onload(self) -> None:
        await self._in_step(lambda: self._learner.onload())

    async def copy_state(self, folder: str | None, hf_path: str | None) -> None:
        """Copy aside this rank's part of a checkpoint for `folder`, and of an export to `hf_path`. All ranks."""
        self._copy = await self._in_step(lambda: self._learner.copy_state(folder, hf_path))

    async def write_state(self) -> Any:
        """Write what was copied aside, while steps are taken; returns what `finish_state` on rank 0 wants of each."""
        return await self._in_checkpoint(self._copy.write)

    async def finish_state(self, written: list[Any]) -> None:
        """Rank 0, when all have written."""
        await self._in_checkpoint(lambda: self._copy.finish(written))

    async def load_state(self, folder: str) -> None:
        """Go on from this rank's part of a checkpoint; after `start`, before `connect`. All ranks."""
        await self._in_step(lambda: self._learner.load_state(folder))

    async def pid(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        """Leave engines and ranks. Only after `start`."""
        if self._source is not None:
            await self._in_weights(self._source.close)
        await self._in_step(self._learner.close)

    def _train(self, rollout_id: int, steps: Sequence[TrainStep]) -> StepReport:
        from miles_async.adapters.megatron.training.performance import profiled

        with profiled(self._config.debug, rollout_id, self._rank):
            return self._learner.train(rollout_id, steps)

    @property
    def _sending(self) -> Source:
        assert self._source is not None, "meet() comes first"
        return self._source

    async def _in_step(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._step, call)

    async def _in_checkpoint(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._checkpoint, call)

    async def _in_weights(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._weights, call)


def weight_source(
    config: RunConfig, named: Sequence[tuple[str, tuple[int, ...]]], folder: Path, rank: int, sources: int
) -> Source:
    """What sends this rank's share of the weights of these names and shapes."""
    from miles_async.adapters.weights.source import Source

    return Source(
        named,
        folder / "weights",
        rank=rank,
        sources=sources,
        bucket=config.weights.update_weight_buffer_size,
        everything=config.weights.check_weight_update_equal,
        timeout=config.weights.update_weight_timeout_seconds,
    )


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _pin(cpus: list[int] | None, rank: int, world_size: int) -> None:
    """Keep this process, all its threads, on its share of `cpus`; where ranks outnumber cores, they share them."""
    if cpus is None:
        return
    share = cpus[rank % len(cpus) :: world_size]
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # a thread that has ended since
            os.sched_setaffinity(int(thread), share)
