"""One cluster for all stack tests: real Ray, SGLang, sglang-router, Megatron and Mooncake, started once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.storage.checkpoints import LoadedCheckpoint
from miles_async.config.load import load_config
from miles_async.config.schema import RunConfig
from miles_async.events import Event
from miles_async.observability.run_folder import RunFolder
from tests.audit import Audit
from workers.cluster import Cluster
from workers.driver import run_started
from workers.preflight import preflight
from workers.rollout import RolloutWorker

CONFIG = str(Path(__file__).parents[2] / "configs" / "arithmetic-cpu.yaml")
FULLY_ASYNC = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"


def settings(entry: str, *flags: str) -> RunConfig:
    """The main job's configuration, small and without a warm start."""
    small = ["--warm-start-max-steps", "0", "--eval-size", "8", "--learner-threads", "1"]
    small += ["--n-samples-per-prompt", "16", "--over-sampling-batch-size", "null"]
    small += ["--rm-type", "null", "--custom-rm-path", "tests.stack.user_functions.share_of_even_bytes"]
    return load_config(["--config", CONFIG, "--rollout-function-path", FULLY_ASYNC, *small, *flags], entry=entry)


@dataclass
class Played:
    """A run on the shared cluster, to its end."""

    config: RunConfig
    folder: RunFolder
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def violations(self) -> list[str]:
        audit = Audit(self.config.rollout.max_weight_staleness)
        for event in self.events:
            audit.observe(event)
        return audit.violations


class Stack:
    """The cluster, and a way to play runs on it one after the other."""

    def __init__(self, runner: asyncio.Runner, cluster: Cluster, folder: Path) -> None:
        self._runner = runner
        self.cluster = cluster
        self._folder = folder

    @property
    def latest(self) -> Path:
        """The folder of the run that was started last."""
        return self._folder / "latest"

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def play(
        self,
        entry: str,
        *flags: str,
        began_with: LoadedCheckpoint | None = None,
        watch: Callable[[Event], None] | None = None,
        stopped: bool = False,
    ) -> Played:
        """`watch` sees each event when it happens, or at most half a second later.

        `stopped`: the run is asked to end before it has begun.
        """
        config = settings(entry, "--run-dir", str(self._folder), *flags)
        return self.do(self._play(Played(config, RunFolder.create(config)), entry, began_with, watch, stopped))

    async def _play(
        self,
        played: Played,
        entry: str,
        began_with: LoadedCheckpoint | None,
        watch: Callable[[Event], None] | None,
        stopped: bool,
    ) -> Played:
        handles = replace(self.cluster.handles, began_with=began_with)
        if began_with is not None:
            for rank in handles.learner_ranks:
                await rank.load_state.remote(str(began_with.folder))
        # The same process hosts one run after the other, so it imports the libraries once.
        worker: Any = self.cluster.rollout.current
        await worker.__ray_call__.remote(RolloutWorker.__init__, played.config, entry, played.folder)
        played.events.append(run_started(played.config, played.folder, entry, "a model"))
        if stopped:
            await worker.stop.remote()
        run, received = asyncio.ensure_future(_finished(worker.run.remote(handles, 0))), 0
        while True:
            last = run.done()
            for number, events in await worker.events.remote(received):
                received = number
                played.events += events
                if watch is not None:
                    for event in events:
                        watch(event)
            if last:
                break
        # Engines that were replaced meanwhile have another address.
        engines = [await parts[0].info.remote() for parts in handles.engine_actors.values()]
        self.cluster.handles = replace(self.cluster.handles, engines=engines)
        await run
        return played


async def _finished(reference: Any) -> None:
    await reference


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one small layer, for learners without the cluster."""
    # A test that needs neither starts sooner without torch.
    from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
    from tests.stack.learning import TINY

    path = tmp_path_factory.mktemp("model") / "tiny"
    create_tiny_model(TINY, path, seed=1)
    return path


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    config = settings(
        "train_async.py",
        *("--run-dir", str(folder / "runs"), "--cache-dir", str(folder / "cache"), "--lr", "5e-5"),
        # Engines with room for evaluations beside training.
        *("--eval-interval", "1"),
    )
    with asyncio.Runner() as runner:
        cluster = runner.run(_enter(config))
        try:
            yield Stack(runner, cluster, folder / "runs")
        finally:
            runner.run(cluster.__aexit__(None, None, None))


async def _enter(config: RunConfig) -> Cluster:
    cluster = await Cluster(config, RunFolder.create(config), "train_async.py", lambda event: None).__aenter__()
    await cluster.start(preflight(config))
    return cluster
