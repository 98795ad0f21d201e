"""The process that generates: a Ray actor that composes and runs `pipeline/service.py` on its event loop (uvloop)."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from miles_async.adapters.datasets.factory import eval_groups, open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.ray.learner import RayLearner, RayRanks
from miles_async.adapters.ray.servers import RayServers
from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.checkpoints import LoadedCheckpoint, checkpoint_name, read_progress
from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.adapters.system.clock import SystemClock
from miles_async.adapters.system.memory import tune_memory
from miles_async.adapters.system.processors import Processors
from miles_async.adapters.weights.channel import Channel
from miles_async.config.fields import values_of
from miles_async.config.generation import (
    adapter_versions_of,
    bounds_of,
    rollout_mode,
    schedule_of,
    serves_agents,
)
from miles_async.config.prompt_files import with_dataset
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import install_guests
from miles_async.errors import EngineLostError
from miles_async.events import DataSkipped, Event
from miles_async.guests import GUESTS
from miles_async.observability.console.logging import configure_worker_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.pipeline.checkpoint import resume
from miles_async.pipeline.evaluate import EvalSet
from miles_async.pipeline.journal import Journal
from miles_async.pipeline.run_ports import Ports
from miles_async.pipeline.service import Service
from miles_async.rewards.factory import RunRewards
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.scheduling.bounds import Schedule
from miles_async.stored_run import StoredRun

from .debugging import dump_tokenizer, replace_unused_ports, without_staleness_limit
from .faults import FaultInjector
from .functions import conversion, data_source, dynamic_filter, packs_ahead, reward_post_process, run_functions
from .generators import GeneratorFactory
from .heartbeats import Heartbeat, heartbeat
from .rollout_logs import RolloutLogs
from .specs import ClusterHandles, answer_parsers, eval_sampling_of, greedy_of, sample_limits, store_folder

log = structlog.get_logger(__name__)

EventBatch = tuple[int, Sequence[Event]]
"""The number of a batch of events, and the events."""

REPORT_SECONDS = 30.0
"""A service reports twice a second. One that has reported nothing for so long hangs, although the event loop responds:
its store does not answer, or the run does not end after an error."""


class Outbox:
    """Holds the events that the journal has stored until the driver has received them."""

    def __init__(self) -> None:
        self._batches: list[EventBatch] = []
        self._filled = asyncio.Event()
        self.received = 0
        """Number of the last batch that the driver has received."""
        self.filled_at = time.monotonic()
        """Time of the last batch."""

    def put(self, number: int, events: Sequence[Event]) -> None:
        self.filled_at = time.monotonic()
        self._batches.append((number, events))
        self._filled.set()

    async def take(self, received: int, patience_seconds: float) -> list[EventBatch]:
        """Return all batches after number `received`. Waits up to `patience_seconds` for the first one.

        A batch is returned again until the driver confirms it, so that none is lost with the answer to a call.
        """
        self.received = received
        self._batches = [batch for batch in self._batches if batch[0] > received]
        if not self._batches:
            self._filled.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._filled.wait(), patience_seconds)
        return list(self._batches)


def begin_rollout(logs: RolloutLogs, rollout_id: int) -> None:
    """Tell the guests and the logs which batch is collected next."""
    GUESTS.ask("begin a rollout", lambda guest: guest.begin_rollout(rollout_id))
    logs.begin(rollout_id)


class RolloutWorker:
    """Hosts the service. `run` returns at the end of the run; the other methods are served meanwhile."""

    def __init__(self, config: RunConfig, entry: str, folder: RunFolder) -> None:
        self._config = config
        self._entry = entry
        self._folder = folder
        self._outbox = Outbox()
        self._journal: Journal
        self._service: Service | None = None
        self._asked_to_stop = False
        self._serves = asyncio.Event()
        """Set when the service and what it needs exist."""
        self._servers: RayServers
        self._fleet: SGLangFleet

    async def log_to(self, logs: Path, process: str) -> None:
        """Write log and output of this process to files in `logs` from now on."""
        configure_worker_logging(logs, process, logs.parent.name)

    async def import_libraries(self, checkpoint: str) -> None:
        """Import what data and tokenizer need, which takes seconds. Called while engines and learner start."""
        if self._config.data.reasoning_gym_task is not None:
            await asyncio.to_thread(importlib.import_module, "reasoning_gym")
        tokenizer = await asyncio.to_thread(CheckpointTokenizer, checkpoint)
        if self._config.data.apply_chat_template or serves_agents(self._config):
            await asyncio.to_thread(getattr, tokenizer, "transformers")

    async def run(self, handles: ClusterHandles, received: int) -> None:
        """Run to the end, from the start or from where another rollout worker of this run was lost.

        `received` is the number of the last batch of events that the driver has received. It may exceed the number of
        the last batch in the store if the store could not be written.

        Raises UserError, FatalError or an error of a user's function.
        """
        config = self._config
        install_guests(values_of(config))
        faults = FaultInjector(config.faults, self._folder.faults, SystemClock())
        async with AsyncExitStack() as cleanup:
            stored = await self._open_journal(faults, received, cleanup)
            adapters = adapter_versions_of(config)
            fleet = await self._connect(handles, taking_over=stored is not None)
            if handles.router_actor is None:
                cleanup.push_async_callback(self._leave_router)
            generators = await self._open_generators(handles, fleet, stored, adapters, cleanup)
            ranks = faults.port("ranks", RayRanks(handles.learner_ranks))
            channel = Channel(handles.weight_transports, ranks, fleet.address)
            if stored is not None:
                await self._reconnect(channel)
            data = await self._open_data(generators, handles.began_with if stored is None else None)
            rewarder = RunRewards(config, generators.args)
            cleanup.push_async_callback(rewarder.close)
            live, schedule = generators.training(), schedule_of(config, self._entry)
            generators.connect(live, rewarder)
            stream = schedule is Schedule.FULLY_ASYNC
            recording = await generators.recording(live, handles.checkpoint, stream=stream)
            logs = RolloutLogs(config, generators.args)
            ports = Ports(
                clock=faults.clock,
                journal=self._journal,
                data=data,
                generator=recording or live,
                rewarder=rewarder,
                learner=RayLearner(
                    config,
                    ranks,
                    self._folder.path.name,
                    self._checkpoint_before(handles, stored),
                    conversion(config, generators.args) or reward_post_process(config, generators.args),
                ),
                channel=channel,
                fleet=fleet,
                dead_letters=self._open_dead_letters(cleanup),
                dynamic_filter=dynamic_filter(config, generators.args, data.observe),
                text_of=generators.tokenizer.text_of,
                limits=generators.limits,
                functions=run_functions(config, self._entry, generators, recording, self._journal, logs),
                packs_ahead=packs_ahead(config, self._entry),
                keeps_groups=rollout_mode(config).keeps_groups,
                eval_sets=self._eval_sets(data, generators, rewarder),
                processors=Processors().in_use,
                on_rollout=partial(begin_rollout, logs),
                adapters=adapters,
                restore_posted=generators.trajectories.restore,
            )
            self._service = Service(
                without_staleness_limit(config),
                bounds_of(config, self._entry),
                faults.ports(replace_unused_ports(config, ports)),
                schedule=schedule,
                first_rollout=0 if handles.began_with is None else handles.began_with.rollout + 1,
                stored=stored,
            )
            self._serves.set()
            if self._asked_to_stop:
                self._service.stop()
            await dump_tokenizer(config, handles.checkpoint)
            tune_memory()
            await self._service.run()

    async def _open_journal(self, faults: FaultInjector, received: int, cleanup: AsyncExitStack) -> StoredRun | None:
        """Open the store and the journal of the run. Returns the state that a lost rollout worker has left."""
        file = SqliteRunStore(store_folder(self._config, self._folder), self._folder.path.name)
        cleanup.callback(file.close)
        store = faults.port("store", file)
        stored = await store.read()
        self._journal = Journal(
            store,
            faults.port("outbox", self._outbox),
            faults.clock,
            number=max(received, 0 if stored is None else stored.number),
            retains_trained=self._config.restarts_learner,
        )
        # Whatever fails later is explained by events.
        cleanup.push_async_callback(self._journal.flush)
        for number, events in stored.events if stored is not None else ():
            self._outbox.put(number, events)
        return stored

    async def _open_generators(
        self,
        handles: ClusterHandles,
        fleet: SGLangFleet,
        stored: StoredRun | None,
        adapters: AdapterVersions | None,
        cleanup: AsyncExitStack,
    ) -> GeneratorFactory:
        """Open the generators, with the tokenizer of the checkpoint and the parser of answers to agents."""
        config = self._config
        parser: AnswerParserProcess | None = None
        tokenizer = CheckpointTokenizer.of_run(config.data, handles.checkpoint)
        if serves_agents(config):
            # Otherwise the first request of an agent would stop the event loop while transformers is imported.
            await asyncio.to_thread(getattr, tokenizer, "transformers")
            parser = await cleanup.enter_async_context(AnswerParserProcess(answer_parsers(config, handles.checkpoint)))
        generators = GeneratorFactory(
            config,
            handles,
            fleet,
            tokenizer,
            parser,
            journal=self._journal,
            stored=stored,
            live_version=self._live_version,
            adapters=adapters,
            limits=sample_limits(config, handles.checkpoint),
            agent_key_file=self._folder.agent_key,
        )
        return await cleanup.enter_async_context(generators)

    async def _open_data(self, generators: GeneratorFactory, began_with: LoadedCheckpoint | None) -> BufferedSource:
        """Open the data source. It continues from `began_with`, the checkpoint of another run, if there is one."""
        loop = asyncio.get_running_loop()

        # A rollout function may take prompts from its own thread.
        def warn(sentence: str) -> None:
            loop.call_soon_threadsafe(self._journal.warn, sentence)

        def report(reason: str, sentence: str) -> None:
            event = DataSkipped(time=time.time(), reason=reason, sentence=sentence)
            loop.call_soon_threadsafe(self._journal.emit, event)

        # In a thread, because this scans the file and imports transformers if prompts are chats.
        data = await asyncio.to_thread(
            open_data,
            self._config,
            tokenizer=generators.tokenizer,
            args=generators.args,
            report=report,
            warn=warn,
            create=data_source(self._config, generators.args),
        )
        if began_with is not None:
            resume(read_progress(began_with.folder), data, self._journal)
        return data

    def _open_dead_letters(self, cleanup: AsyncExitStack) -> DeadLetterFile:
        dead_letters = DeadLetterFile(self._folder.dead_letters, self._journal)
        retries = asyncio.create_task(dead_letters.retry_forever())
        cleanup.callback(dead_letters.retry)
        cleanup.callback(retries.cancel)
        return dead_letters

    def _eval_sets(self, data: BufferedSource, generators: GeneratorFactory, rewarder: RunRewards) -> list[EvalSet]:
        """The held-out problems of the training data, and the data sets for evaluations."""
        config = self._config
        configs = {name: with_dataset(config, dataset) for name, dataset in config.data.datasets.items()}
        held_out = (
            EvalSet(
                name=name or "held_out",
                problems=feed.eval_problems(),
                generator=generators.evaluation(greedy_of(configs.get(name, config))),
            )
            for name, feed in data.feeds.items()
        )
        others = (
            EvalSet(
                name=name,
                problems=eval_groups(config, name, dataset, tokenizer=generators.tokenizer, warn=self._journal.warn),
                generator=generators.evaluation(eval_sampling_of(config, dataset)),
                rewarder=rewarder.of(dataset),
            )
            for name, dataset in config.rollout.eval_datasets.items()
        )
        return [*held_out, *others]

    def _checkpoint_before(self, handles: ClusterHandles, stored: StoredRun | None) -> Path | None:
        """The checkpoint that the next one follows: the newest of this run, or the one that the learner has loaded."""
        loaded, folder = handles.learner_checkpoint, self._config.learner.save_folder
        saved = None if stored is None else stored.progress["saved"]
        if folder is not None and saved is not None and (loaded is None or loaded.rollout <= saved):
            return folder / checkpoint_name(saved)
        return None if loaded is None else loaded.folder

    async def _connect(self, handles: ClusterHandles, *, taking_over: bool) -> SGLangFleet:
        """Connect to the running engines and add them to the router.

        With `taking_over`, a router that does not answer is restarted first, and the engines drop the requests that a
        lost rollout worker has left. The pipeline restarts an engine that does not answer, or that has no server now.
        """
        engine = self._config.engine
        self._servers = RayServers(
            handles.engine_actors,
            handles.router_actor,
            handles.router_url,
            engine.engine_start_timeout_seconds,
        )
        self._fleet = SGLangFleet(
            handles.router_url,
            router_key=handles.router_key,
            servers=self._servers,
            emit=self._journal.emit,
            health_timeout=engine.engine_health_timeout_seconds,
            colocated=self._config.cluster.colocate,
            adapters=self._config.learner.lora_rank > 0,
            former_urls=handles.engine_urls,
        )
        if taking_over:
            try:
                await self._fleet.check_router()
            except EngineLostError as lost:
                log.warning("the router did not answer the new rollout worker", reason=str(lost))
        for info in handles.engines:
            self._fleet.register_engine(info)
            if not taking_over:
                await self._fleet.admit(info.name)
                continue
            try:
                await self._fleet.take_over(info.name)
            except EngineLostError as lost:
                log.warning("an engine did not answer the new rollout worker", engine=info.name, reason=str(lost))
        for name in handles.engine_actors.keys() - set(self._fleet.members()):
            self._fleet.expect_engine(name)
        return self._fleet

    async def _reconnect(self, channel: Channel) -> None:
        """Connect the learner, which may be another one than before, to the engines that answer.

        A learner learns the layout of its weights from an engine, so one engine is restarted if none answers.
        """
        connected: list[str] = []
        for engine in self._fleet.routed():
            try:
                await channel.connect([*connected, engine])
                connected.append(engine)
            except EngineLostError as lost:
                await self._fleet.fence(engine, str(lost))
        if not connected and (members := self._fleet.members()):
            await self._fleet.restart(members[0])
            await channel.connect(members[:1])

    async def _leave_router(self) -> None:
        """Remove the engines from an external router, which would otherwise keep them after the run."""
        for engine in self._fleet.routed():
            await self._fleet.fence(engine, "the run has ended")

    async def events(self, received: int) -> list[EventBatch]:
        """Return the batches of events after number `received`; waits up to half a second for the first one."""
        return await self._outbox.take(received, 0.5)

    async def heartbeat(self) -> Heartbeat:
        """The heartbeat of this process: the event loop is responsive, and the service reports."""
        reports = not self._serves.is_set() or time.monotonic() - self._outbox.filled_at < REPORT_SECONDS
        return heartbeat(None if reports else False)

    async def add_engine(self, name: str, actors: Sequence[Any]) -> None:
        """Start another engine in the background. It receives requests once it holds the current weights.

        Does nothing if this rollout worker began with the engine.
        """
        await self._serves.wait()
        if name not in self._fleet.members():
            self._servers.add(name, actors)
            self._fleet.expect_engine(name)

    async def remove_engine(self, name: str) -> None:
        """Stop sending requests to an engine. Its unfinished groups fail when it ends and are generated elsewhere.

        Does nothing if this rollout worker began without the engine.
        """
        await self._serves.wait()
        assert self._service is not None
        if name in self._fleet.members():
            await self._service.remove_engine(name)

    async def stop(self) -> None:
        """Drain the run; see `Service.stop`."""
        self._asked_to_stop = True
        if self._service is not None:
            self._service.stop()

    def _live_version(self) -> int:
        return self._service.run_state.live_version if self._service is not None else -1
