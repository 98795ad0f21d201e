"""A rollout function of a user whose worker generates in its own thread, on real engines."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from typing import Any

from miles_async.events import GroupGenerated, StepStarted
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout import fully_async
from miles_async.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from miles_async.types import Group, Sample
from tests.stack.conftest import Stack

ROLLOUTS, BATCH, CONCURRENCY = 6, 4, 6
finished: queue.Queue[list[Sample]] = queue.Queue()
workers: list[threading.Thread] = []


@fully_async(keeps_groups=True)
def rollout(args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool = False) -> list[list[Sample]]:
    """A plain function, which runs in a thread; the worker has another thread with its own event loop."""
    if not workers:
        workers.append(threading.Thread(target=asyncio.run, args=(work(args, data_source),), daemon=True))
        workers[0].start()
    return [finished.get() for _ in range(args.rollout_batch_size)]


async def work(args: Any, data_source: RolloutSource) -> None:
    """Keep groups in flight, without end."""
    state = GenerateState(args)
    in_flight: set[asyncio.Task[None]] = set()

    async def generate(group: Group) -> None:
        finished.put(await generate_and_rm_group(args, list(group), state.sampling_params.copy()))

    while True:
        while len(in_flight) < CONCURRENCY and (groups := data_source.get_samples(1)):
            task = asyncio.create_task(generate(groups[0]))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        await asyncio.sleep(0.05)


def test_the_worker_of_a_user_trains_within_the_staleness_limit(stack: Stack) -> None:
    run = stack.play(
        "train_async.py",
        *("--rollout-function-path", "tests.stack.test_rollout_function_worker.rollout"),
        *("--num-rollout", str(ROLLOUTS), "--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "4"),
        *("--max-weight-staleness", "1", "--windowed-fifo-ratio", "null", "--eval-size", "0"),
    )
    ages = Counter(age for step in run.of(StepStarted) for age in step.staleness)
    assert (ages.total(), max(ages)) == (ROLLOUTS * BATCH, 1)
    assert all(event.by_worker for event in run.of(GroupGenerated))
    assert run.violations == []
