"""The process of one learner rank. `workers.cluster` makes it a Ray actor."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from ray.actor import ActorHandle

from miles_async.adapters.megatron.model.environment import DETERMINISTIC, attention_kernels
from miles_async.adapters.ray.actor_errors import all_results
from miles_async.adapters.sglang.launch import WITHOUT_COMPILER, EngineInfo, has_cuda
from miles_async.adapters.storage.warm_starts import Problems, WarmStarted
from miles_async.adapters.system.memory import uncollected_imports
from miles_async.adapters.system.network_ports import ClaimedPort, claim_port
from miles_async.adapters.system.work_time import WorkTime
from miles_async.config.fields import values_of
from miles_async.config.generation import adapter_versions_of
from miles_async.config.schema import RunConfig
from miles_async.config.untested import loaded_by_name
from miles_async.config.user_functions import install_guests
from miles_async.observability.console.logging import configure_logging, configure_worker_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.rollout.contract import flat_args
from miles_async.scheduling.lineage import Lineage
from miles_async.types import LearnerProgress, SendOutcome, StepReport

from .heartbeats import Heartbeat, heartbeat

# Importing torch and Megatron takes ten seconds. The driver imports this module only to name the class, so the methods
# that need them import them, inside the actor's process.
if TYPE_CHECKING:
    from miles_async.adapters.megatron.checkpoint.state_copy import CheckpointCopy
    from miles_async.adapters.megatron.training.learner import MegatronLearner
    from miles_async.adapters.weights.adapters import AdapterSource
    from miles_async.adapters.weights.source import WeightSource
    from miles_async.batching.batch import TrainStep

T = TypeVar("T")
MAX_PARALLEL_SENDS = 16
"""Engines that one rank sends weights to at once."""


class LearnerRank:
    """One rank of the learner: Megatron, a weight source and a checkpoint writer, each with its own threads.

    All calls that touch the model run in one thread, one after the other. Sending weights and writing checkpoints run
    in other threads, beside the next optimizer steps. Each rank sends its own part of the weights. Methods marked "all
    ranks" contain collective operations: they must be called on all ranks (`on_all`), and one after the other.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, folder: Path) -> None:
        """`folder` is the folder of the run, on a file system that engines share."""
        configure_logging(config.observability.log_format)
        # CUDA, NCCL and OpenMP read their environment when torch is imported.
        if config.learner.deterministic_mode:
            os.environ |= DETERMINISTIC
        os.environ |= attention_kernels(config.learner)
        if not has_cuda():
            os.environ |= WITHOUT_COMPILER
        os.environ |= config.learner.train_env_vars
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._folder = RunFolder(folder)
        self._log = structlog.get_logger(__name__).bind(learner_rank=rank)
        _pin_to_cpus(config.learner.learner_cpus, rank, world_size)
        threads = config.learner.learner_threads or len(os.sched_getaffinity(0))
        # OpenMP keeps the number of threads per calling thread, so the thread that runs the model has to set it.
        self._work_time = WorkTime()

        def prepare_thread() -> None:
            _limit_threads(threads)
            self._work_time.count_this_thread()

        self._model_thread = ThreadPoolExecutor(1, "step", initializer=prepare_thread)
        self._send_threads = ThreadPoolExecutor(MAX_PARALLEL_SENDS, "weights")
        self._checkpoint_thread = ThreadPoolExecutor(1, "checkpoint")
        self._learner: MegatronLearner
        self._port: ClaimedPort
        self._source: WeightSource | AdapterSource | None = None
        self._copy: CheckpointCopy
        self._progress = LearnerProgress(rollout=-1, groups=(), report=None, version=0, staged=False, changed=None)
        self._others: Sequence[ActorHandle[Any]] = ()
        """All ranks but this one, if this is the first rank."""
        self._batch: tuple[int, Sequence[int], Sequence[TrainStep]] | None = None
        """The batch that was received last and is not trained yet: rollout, groups and steps."""
        self._logprobs: list[float] | None = None
        """Of the staged version, if the engines are to be compared with it."""
        self._running: set[asyncio.Future[Any]] = set()
        """Calls that occupy a thread now, or wait for one."""

    async def log_to(self, logs: Path, process: str) -> None:
        """Write log and output into files in `logs` from now on."""
        configure_worker_logging(logs, process, logs.parent.name)

    async def warm_start(self, problems: Problems, check: Problems) -> WarmStarted:
        """Train the checkpoint to start from, or find it in the cache. On one rank only, before `start`."""

        def report(step: int, loss: float, accuracy: float) -> None:
            self._log.info("warm start", step=step, loss=round(loss, 3), greedy_accuracy=round(accuracy, 3))

        def train() -> WarmStarted:
            with uncollected_imports():
                from miles_async.adapters.megatron.training.warm_start import warm_start

            return warm_start(self._config, problems, check, report)

        return await self._run(self._model_thread, train)

    def claim_port(self, host: str) -> int:
        """Reserve a port of this node for the rendezvous of all ranks. On rank 0 only."""
        self._port = claim_port(host)
        return self._port.number

    async def lead(self, others: Sequence[ActorHandle[Any]]) -> None:
        """Let `on_all` call these ranks as well as this one. On rank 0 only."""
        self._others = others

    async def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks; return the results in order of the ranks. On rank 0 only.

        The method runs to its end on all ranks even if the process that called this one dies. Raises what
        `all_results` raises.
        """
        calls = [getattr(other, method).remote(*arguments) for other in self._others]
        return await all_results([getattr(self, method)(*arguments), *calls])

    async def import_libraries(self) -> None:
        """Import what `start` needs."""

        def import_all() -> None:
            with uncollected_imports():
                importlib.import_module("miles_async.adapters.megatron.training.learner")

        await self._run(self._model_thread, import_all)

    async def start(self, hf_checkpoint: str, master_addr: str, master_port: int) -> None:
        """Load the checkpoint. All ranks."""

        def build() -> MegatronLearner:
            with uncollected_imports():
                from miles_async.adapters.megatron.training.hooks import LearnerHooks
                from miles_async.adapters.megatron.training.learner import MegatronLearner
                from miles_async.losses.functions import LossFunctions

            install_guests(values_of(self._config))
            args = flat_args(self._config)
            functions, hooks = LossFunctions.load(self._config, args), LearnerHooks.load(self._config, args)
            ranks = (self._rank, self._world_size, master_addr, master_port)
            return MegatronLearner(self._config, hf_checkpoint, *ranks, functions, hooks)

        self._learner = await self._run(self._model_thread, build)

    async def shares_prefixes(self) -> bool:
        """See `MegatronLearner.shares_prefixes`."""
        return self._learner.shares_prefixes

    async def receive_batch(self, rollout_id: int, groups: Sequence[int], steps: Sequence[TrainStep]) -> None:
        """Keep this rank's part of a batch for `train`. It replaces a part that was received before and not trained.

        `groups` are the sequence numbers of the batch's groups, for `progress`.
        """
        self._batch = rollout_id, groups, steps

    async def train(self, rollout_id: int, adapter: str = "") -> StepReport:
        """Take the optimizer steps of this rank's part of the batch that all ranks have received. All ranks.

        They train `adapter` if the run trains several.
        """
        assert self._batch is not None, "receive_batch() comes first"
        received, groups, steps = self._batch
        assert received == rollout_id, f"rollout {received} was received"
        self._batch = None
        structlog.contextvars.bind_contextvars(rollout=rollout_id)
        report = await self._run(self._model_thread, lambda: self._train(rollout_id, adapter, steps))
        changed = adapter if report.finite else self._progress.changed
        self._progress = replace(self._progress, rollout=rollout_id, groups=groups, report=report, changed=changed)
        return report

    async def progress(self) -> LearnerProgress:
        """Return what this rank has trained and staged, once no call of an earlier rollout worker runs any more."""
        while self._running:
            await asyncio.wait(self._running)
        return self._progress

    async def logprobs(self, token_lists: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `MegatronLearner.logprobs`. All ranks."""
        return await self._run(self._model_thread, lambda: self._learner.logprobs(token_lists))

    async def describe(self) -> None:
        """Find out which weights there are, once; `connect` needs to know. The learner has the devices. All ranks."""
        adapters = adapter_versions_of(self._config)
        if self._source is None and adapters is not None:
            from miles_async.adapters.weights.adapters import AdapterSource

            self._source = AdapterSource(
                self._folder.adapters,
                self._learner.adapter_config,
                self._config.weights,
                rank=self._rank,
                resident=adapters.resident,
                colocated=self._config.cluster.colocate,
            )
        elif self._source is None:
            from miles_async.adapters.weights.source import WeightSource
            from miles_async.adapters.weights.staging import describe

            # Listing the weights gathers them one by one, which is collective.
            named = await self._run(self._model_thread, lambda: describe(self._learner.engine_weights()))
            self._source = WeightSource(
                named,
                self._folder.weights,
                self._config.weights,
                rank=self._rank,
                sources=self._world_size,
                by_name=loaded_by_name(self._config),
            )

    async def connect(self, engines: Sequence[EngineInfo], transports: Mapping[str, str]) -> None:
        """See `WeightSource.connect`. All ranks."""
        await self.describe()
        source = self._connected_source
        await self._run(self._send_threads, lambda: source.connect(engines, transports))

    async def stage(
        self, version: int, transports: Sequence[str], adapter: str = "", lineage: Lineage | None = None
    ) -> None:
        """Copy this rank's part of the weights as `version` and prepare it for `transports`. All ranks.

        They are those of `adapter` if the run trains several. `lineage` has the versions of its weights; None leaves it
        as it is.
        """
        if lineage is not None:
            self._learner.lineages[adapter] = lineage
        self._learner.version = version
        structlog.contextvars.bind_contextvars(version=version)
        source = self._connected_source

        def stage() -> list[float] | None:
            from miles_async.adapters.weights.engine import TOKENS

            self._learner.adapters.select(adapter)
            source.stage(version, self._learner.engine_weights(), transports, adapter)
            return self._learner.logprobs([TOKENS])[0] if source.compared else None

        self._logprobs = await self._run(self._model_thread, stage)
        # Another adapter may be newer than its staged version: a restored run stages several versions again.
        changed = None if adapter == self._progress.changed else self._progress.changed
        self._progress = replace(self._progress, version=version, staged=True, changed=changed)

    async def send(self, version: int, engine: str, transport: str) -> SendOutcome:
        """Send this rank's part of the staged version to one engine; several engines may be sent to at once."""
        source = self._connected_source
        return await self._run(self._send_threads, lambda: source.send(version, engine, transport))

    async def compare(self, engine: str) -> float | None:
        """See `WeightSource.compare`. Returns None if there is nothing to compare, and on all ranks but the first."""
        source, logprobs = self._connected_source, self._logprobs
        if self._rank or logprobs is None:
            return None
        return await self._run(self._send_threads, lambda: source.compare(engine, logprobs))

    async def drop(self, engine: str) -> None:
        """See `AdapterSource.drop`. All ranks."""
        source = self._connected_source
        await self._run(self._send_threads, lambda: source.drop(engine))

    async def offload(self) -> None:
        """Release the device memory to an engine that shares the device. All ranks."""
        await self._run(self._model_thread, lambda: self._learner.offload())

    async def onload(self) -> None:
        """Take the device memory back. All ranks."""
        await self._run(self._model_thread, lambda: self._learner.onload())

    async def copy_state(self, folder: str | None, hf_path: str | None) -> None:
        """Copy this rank's part of a checkpoint for `folder`, and of an export to `hf_path`. All ranks."""
        self._copy = await self._run(self._model_thread, lambda: self._learner.copy_state(folder, hf_path))

    async def write_state(self) -> Any:
        """Write the copied state while steps are taken; return what `finish_state` needs from this rank."""
        with self._work_time.writing():
            return await self._run(self._checkpoint_thread, self._copy.write)

    async def finish_state(self, written: list[Any]) -> None:
        """Complete a checkpoint from the results of `write_state` of all ranks. On rank 0 only."""
        with self._work_time.writing():
            await self._run(self._checkpoint_thread, lambda: self._copy.finish(written))

    async def work_seconds(self) -> float:
        """Return the seconds that this rank has worked so far; see `WorkTime`."""
        return self._work_time.seconds

    async def load_state(self, folder: str) -> None:
        """Resume from this rank's part of a checkpoint, after `start` and before `connect`. All ranks."""
        await self._run(self._model_thread, lambda: self._learner.load_state(folder))

    async def begin(self, rollout: int, version: int, changed: str | None) -> None:
        """Count batches and versions from here on; see `LearnerProgress`."""
        self._progress = LearnerProgress(
            rollout=rollout, groups=(), report=None, version=version, staged=False, changed=changed
        )

    async def heartbeat(self) -> Heartbeat:
        return heartbeat()

    def _train(self, rollout_id: int, adapter: str, steps: Sequence[TrainStep]) -> StepReport:
        from miles_async.adapters.megatron.training.performance import profiled

        self._learner.adapters.select(adapter)
        with profiled(self._config.debug, rollout_id, self._rank):
            return self._learner.train(rollout_id, steps)

    @property
    def _connected_source(self) -> WeightSource | AdapterSource:
        assert self._source is not None, "describe() comes first"
        return self._source

    async def _run(self, threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(threads, call)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await running


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _pin_to_cpus(cpus: list[int] | None, rank: int, world_size: int) -> None:
    """Pin all threads of this process to this rank's part of `cpus`; ranks that outnumber the cores share them."""
    if cpus is None:
        return
    own = cpus[rank % len(cpus) :: world_size]
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended since
            os.sched_setaffinity(int(thread), own)
