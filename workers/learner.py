"""The process of one learner rank. The cluster makes it a Ray actor with `ray.remote(LearnerRank)`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.warm_starts import Problems, WarmStarted
from miles_async.config.schema import RunConfig
from miles_async.observability.logging import configure_logging, configure_worker_logging
from miles_async.types import StepReport, WriteOutcome

# The driver names this class and must not wait for torch and Megatron, which take ten seconds to import: the actor's
# own process imports them in the methods that need them.
if TYPE_CHECKING:
    from torch import Tensor

    from miles_async.adapters.megatron.batch import TrainStep
    from miles_async.adapters.megatron.learner import MegatronLearner
    from miles_async.adapters.weights.writer import WeightWriter

T = TypeVar("T")


class LearnerRank:
    """Megatron in one thread, weight writes in another: staged weights travel while the next step runs.

    Everything that touches the model runs in the step thread, one call after the other. Only rank 0 writes weights:
    staging gathers them whole.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        configure_logging(config.observability.log_format)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._log = structlog.get_logger(__name__).bind(learner_rank=rank)
        _pin(config.learner.learner_cpus, rank, world_size)
        threads = config.learner.learner_threads or len(os.sched_getaffinity(0))
        # The thread count of an OpenMP team belongs to the thread that starts it.
        self._step = ThreadPoolExecutor(1, "step", initializer=_limit_threads, initargs=(threads,))
        self._weights = ThreadPoolExecutor(1, "weights")
        self._learner: MegatronLearner
        self._writer: WeightWriter

    async def log_to(self, logs: Path, process: str) -> None:
        """Write log and output into files there from now on."""
        configure_worker_logging(logs, process, logs.parent.name)

    async def warm_start(self, problems: Problems, check: Problems) -> WarmStarted:
        """The checkpoint to start from, taught or found in the cache. Only on one rank, and before `start`."""

        from miles_async.adapters.megatron.warm_start import warm_start

        def report(step: int, loss: float, accuracy: float) -> None:
            self._log.info("warm start", step=step, loss=round(loss, 3), greedy_accuracy=round(accuracy, 3))

        return await self._in_step(lambda: warm_start(self._config, problems, check, report))

    async def start(self, hf_checkpoint: str, master_addr: str, master_port: int) -> None:
        """Load the checkpoint. Call it on all ranks at once: each waits for the others."""

        def build() -> MegatronLearner:
            from miles_async.adapters.megatron.learner import MegatronLearner

            return MegatronLearner(self._config, hf_checkpoint, self._rank, self._world_size, master_addr, master_port)

        self._learner = await self._in_step(build)

    async def connect(self, wanted: str, engines: Sequence[EngineInfo], folder: str) -> str | None:
        """All ranks, before training: find the way weights take to the engines, and write version 0.

        `wanted` is `auto` or a way's name, `folder` is where the disk way keeps its files. Rank 0 returns the way.
        """
        from miles_async.adapters.weights.choose import choose_writer

        snapshot = await self._in_step(lambda: self._gather(keep=self._rank == 0))
        if self._rank > 0:
            return None
        self._writer = await self._in_weights(lambda: choose_writer(wanted, engines, snapshot.items, Path(folder)))
        return self._writer.name

    async def reconnect(self, engines: Sequence[EngineInfo]) -> None:
        """Rank 0: the engines are these from now on."""
        await self._in_weights(lambda: self._writer.connect(engines))

    async def train(self, rollout_id: int, steps: Sequence[TrainStep]) -> StepReport:
        structlog.contextvars.bind_contextvars(rollout=rollout_id)
        return await self._in_step(lambda: self._learner.train(rollout_id, steps))

    async def logprobs(self, token_lists: Sequence[list[int]]) -> list[list[float]]:
        return await self._in_step(lambda: self._learner.logprobs(token_lists))

    async def stage(self, version: int) -> None:
        """Copy the weights aside as `version`; all ranks take part, rank 0 keeps them."""
        self._learner.version = version
        structlog.contextvars.bind_contextvars(version=version)
        if self._rank == 0:
            await self._in_step(lambda: self._writer.stage(version, self._learner.weights()))
        else:
            await self._in_step(lambda: self._gather(keep=False))

    async def write(self, version: int, engines: Sequence[str]) -> list[WriteOutcome]:
        """Rank 0: write the staged version to each engine, one after the other."""
        return await self._in_weights(lambda: [self._writer.write(version, engine) for engine in engines])

    async def save_state(self, folder: str) -> None:
        """Write this rank's part of a checkpoint into `folder`. All ranks."""
        await self._in_step(lambda: self._learner.save_state(folder))

    async def load_state(self, folder: str) -> None:
        """Go on from this rank's part of a checkpoint; after `start`, before `connect`. All ranks."""
        await self._in_step(lambda: self._learner.load_state(folder))

    async def save_hf(self, path: str) -> None:
        await self._in_step(lambda: self._learner.save_hf(path))

    async def pid(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        """Leave engines and ranks. Only after `start` and `connect`."""
        if self._rank == 0:
            await self._in_weights(self._writer.close)
        await self._in_step(self._learner.close)

    def _gather(self, *, keep: bool) -> dict[str, Tensor]:
        """Gathering is collective: the ranks that do not keep the weights take part in it all the same."""
        return {name: tensor.clone() for name, tensor in self._learner.weights() if keep}

    async def _in_step(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._step, call)

    async def _in_weights(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._weights, call)


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
