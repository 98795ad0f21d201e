"""A run whose rollout worker is killed or stopped continues with another one and keeps learner and engines.

A run without checkpoints ends when it loses its learner; the run with posted groups ends in this way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from examples.external_generator import Endpoint, play
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.adapters.system.network_ports import free_port
from miles_async.events import GroupMoved, RunEnded, StepEnded
from miles_async.observability.diagnosis.audit import Audit
from miles_async.observability.trace.event_log import read_events
from tests.stack.job import job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS

EXTERNAL = "miles_async.rollout.external_rollout.generate_rollout"
BATCHES = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")
WORKER = "ray::RolloutWorker"


def test_a_lost_rollout_worker_is_replaced_until_no_batch_is_trained_between_two_losses(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    with job(tmp_path, *BATCHES, "--max-restarts", "1", "--store-dir", str(stores)) as running:
        running.says("Staleness stats", START_SECONDS)
        kept = running.process("ray::LearnerRank"), running.process("sglang::scheduler")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            os.kill(running.process(WORKER), number)
            running.says_again("another rollout worker was ready", START_SECONDS)
            for _ in range(2):  # the line of the second batch follows the step of the first one
                running.says_again("Staleness stats", START_SECONDS)
            assert (running.process("ray::LearnerRank"), running.process("sglang::scheduler")) == kept
        os.kill(running.process(WORKER), signal.SIGKILL)
        running.says_again("another rollout worker was ready", START_SECONDS)
        os.kill(running.process(WORKER), signal.SIGKILL)
        assert running.ended(within=PATIENCE_SECONDS) == 1
        assert running.left_running(patience=PATIENCE_SECONDS) == {}
    assert "rollout-4 died" in running.err
    [events] = (tmp_path / "runs" / "latest").glob("events.jsonl")
    audit, trained, steps = Audit(staleness_limit=2), Counter[str](), list[int]()
    for event in read_events(events):
        audit.observe(event)
        match event:
            case GroupMoved(after="trained", feed_index=prompt):
                trained[prompt] += 1
            case StepEnded(rollout=rollout):
                steps.append(rollout)
            case RunEnded(reason=reason):
                assert "rollout-4 died" in reason
            case _:
                pass
    assert audit.violations == []
    assert set(trained.values()) == {1}
    assert steps == list(range(len(steps))), "no batch was skipped or repeated"
    [store] = stores.iterdir()
    assert (store / "run.sqlite").exists()


async def _generate(url: str, key_file: Path, acknowledged: list[str], ended: threading.Event) -> None:
    """Play and post groups until the run has ended; keep the names of those that were acknowledged."""

    async def play_groups() -> None:
        async with aiohttp.ClientSession() as http:
            endpoint = Endpoint(http, url, key_file)
            while True:
                try:
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        samples = await asyncio.gather(*(play(endpoint, "1+1=", "2") for _ in range(4)))
                        acknowledged.append(await endpoint.post_group(samples))
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.2)

    # A group that nobody acknowledges is posted again and again, also after the end of the run.
    playing = asyncio.create_task(play_groups())
    await asyncio.to_thread(ended.wait)
    playing.cancel()
    await asyncio.wait([playing])


@dataclass
class Posted:
    """What is left of a run on posted groups that lost its rollout worker and then its learner."""

    folder: Path
    acknowledged: list[str]
    code: int
    left_running: dict[int, str]
    err: str


@pytest.fixture(scope="module")
def posted(tmp_path_factory: pytest.TempPathFactory) -> Posted:
    folder = tmp_path_factory.mktemp("posted")
    port, key_file = free_port(), folder / "runs" / "latest" / "agent_key"
    flags = ("--rollout-function-path", EXTERNAL, "--agent-port", str(port), "--n-samples-per-prompt", "4")
    acknowledged, ended = list[str](), threading.Event()
    generator = threading.Thread(
        target=lambda: asyncio.run(_generate(f"http://127.0.0.1:{port}", key_file, acknowledged, ended))
    )
    with job(folder, *BATCHES, *flags, "--rollout-batch-size", "4", "--over-sampling-batch-size", "4") as running:
        generator.start()
        try:
            running.says("Staleness stats", START_SECONDS)
            os.kill(running.process(WORKER), signal.SIGKILL)
            running.says_again("another rollout worker was ready", START_SECONDS)
            for _ in range(2):
                running.says_again("Staleness stats", START_SECONDS)
            os.kill(running.process("ray::LearnerRank"), signal.SIGKILL)
            code = running.ended(within=PATIENCE_SECONDS)
        finally:
            ended.set()
            generator.join()
        left = running.left_running(patience=PATIENCE_SECONDS)
        return Posted(folder, acknowledged, code, left, running.err)


def test_posted_groups_that_were_acknowledged_outlive_the_rollout_worker_and_the_run(posted: Posted) -> None:
    latest = posted.folder / "runs" / "latest"
    trained, discarded = Counter[str](), set[str]()
    for event in read_events(latest / "events.jsonl"):
        match event:
            case GroupMoved(after="trained", feed_index=name):
                trained[name] += 1
            case GroupMoved(after="dropped", reason="filtered" | "stale", feed_index=name):
                discarded.add(name)
            case _:
                pass
    assert set(trained.values()) == {1}
    with closing(SqliteRunStore(latest / "store", latest.resolve().name, read_only=True)) as store:
        stored = asyncio.run(store.read())
    assert stored is not None
    assert len(set(posted.acknowledged)) == len(posted.acknowledged) > 8
    assert set(posted.acknowledged) <= trained.keys() | discarded | set(stored.posted)


def test_a_run_without_checkpoints_says_what_it_needs_to_survive_the_loss_of_its_learner(posted: Posted) -> None:
    assert posted.code == 1
    assert posted.left_running == {}
    assert "learner-0 died" in posted.err
    assert "With --save and --save-interval" in posted.err
