"""A run on posted groups loses its rollout worker, and then the head node of Ray, which ends it."""

from __future__ import annotations

import asyncio
import json
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
from miles_async.adapters.system.network_ports import claim_port
from miles_async.events import Event, GroupMoved, RunEnded, StepEnded
from miles_async.observability.trace.event_log import read_events
from tests.stack.job import job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS

EXTERNAL = "miles_async.rollout.external_rollout.generate_rollout"
BATCHES = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")
WORKER = "ray::RolloutWorker"


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
    """What is left of the run."""

    folder: Path
    acknowledged: list[str]
    code: int
    left_running: dict[int, str]
    err: str
    events: list[Event]


@pytest.fixture(scope="module")
def posted(tmp_path_factory: pytest.TempPathFactory) -> Posted:
    folder = tmp_path_factory.mktemp("posted")
    port, key_file = claim_port(), folder / "runs" / "latest" / "agent_key"  # the run binds it when its engine is ready
    flags = ["--rollout-function-path", EXTERNAL, "--agent-port", str(port.number), "--n-samples-per-prompt", "4"]
    flags += ["--rollout-batch-size", "4", "--over-sampling-batch-size", "4"]
    acknowledged, ended = list[str](), threading.Event()
    generator = threading.Thread(
        target=lambda: asyncio.run(_generate(f"http://127.0.0.1:{port.number}", key_file, acknowledged, ended))
    )
    with job(folder, *BATCHES, *flags) as running:
        generator.start()
        try:
            running.says("Staleness stats", START_SECONDS)
            os.kill(running.process(WORKER), signal.SIGKILL)
            running.says_again("a new rollout worker was ready", START_SECONDS)
            for _ in range(2):  # the line of the second batch follows the step of the first one
                running.says_again("Staleness stats", START_SECONDS)
            os.kill(running.process("gcs_server"), signal.SIGKILL)
            code, left = running.ended(within=PATIENCE_SECONDS), running.left_running()
        finally:
            ended.set()
            generator.join()
            port.release()
        events = list(read_events(folder / "runs" / "latest" / "events.jsonl"))
        return Posted(folder, acknowledged, code, left, running.err, events)


def test_posted_groups_that_were_acknowledged_outlive_the_rollout_worker_and_the_run(posted: Posted) -> None:
    latest = posted.folder / "runs" / "latest"
    trained, discarded = Counter[str](), set[str]()
    for event in posted.events:
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


def test_a_run_that_loses_the_ray_head_node_ends_with_an_error_message_and_a_summary(posted: Posted) -> None:
    assert posted.code == 1
    assert posted.left_running == {}
    assert "train_async.py: the head node of Ray at " in posted.err
    assert "Traceback" not in posted.err
    [end] = [event for event in posted.events if isinstance(event, RunEnded)]
    summary = json.loads((posted.folder / "runs" / "latest" / "summary.json").read_text())
    assert "has not answered" in end.reason == summary["reason"]


def test_no_batch_is_skipped_or_repeated_for_a_lost_rollout_worker(posted: Posted) -> None:
    steps = [event.rollout for event in posted.events if isinstance(event, StepEnded)]
    assert steps == list(range(len(steps)))
