"""Which reports of the engines count as progress of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from miles_async.adapters.null import NullEngines
from miles_async.pipeline.monitor import WORK_POLL_SECONDS, follow_engine_load
from miles_async.pipeline.run_state import RunState
from miles_async.scheduling.ledger import Ledger
from miles_async.types import EngineLoad, Group, Sample
from tests.sim.virtual_time import VirtualClock, run_virtual
from tests.sim.world import DirectJournal, Trace

POLLS = 20
SECONDS = POLLS * WORK_POLL_SECONDS


class Reporting(NullEngines):
    """Reports the next number at each request: None if the engine does not answer, and nothing more at the end."""

    def __init__(self, numbers: Sequence[int | None], held: bool) -> None:
        """The numbers are those of the tokens that running requests hold, or of the tokens that were generated."""
        self._numbers: Iterator[int | None] = iter(numbers)
        self._held = held

    async def loads(self) -> Sequence[EngineLoad]:
        for number in self._numbers:
            if number is None:
                return []
            generated, held = (0, number) if self._held else (number, 0)
            return [EngineLoad(source="e", kv_usage=0.5, queued=0, generated=generated, held=held)]
        return await asyncio.Future()


def seconds_without_progress(
    numbers: Sequence[int | None],
    *,
    waits: bool = True,
    asks: bool = True,
    request_seconds: float = 1e9,
    posts: Sequence[float] = (),
    held: bool = False,
) -> float:
    """After `POLLS` requests for the load. Groups are posted at the given times."""

    async def follow() -> float:
        clock, journal = VirtualClock(), DirectJournal(Trace())
        run_state = RunState(clock, journal)
        run_state.waits_for_groups = waits
        for number, at in enumerate(posts, start=1):
            group = Group([Sample(index=0)], feed_index=f"posted_{number}")
            asyncio.get_running_loop().call_at(at, journal.post, group, number, None)
        following = asyncio.create_task(
            follow_engine_load(run_state, Ledger(), Reporting(numbers, held), lambda: asks, request_seconds, None)
        )
        await clock.sleep(SECONDS + 0.1)
        following.cancel()
        return run_state.idle_seconds

    return run_virtual(follow())


def test_tokens_of_the_engines_are_progress() -> None:
    assert seconds_without_progress(range(100, 100 + POLLS)) < WORK_POLL_SECONDS


def test_tokens_of_steps_too_slow_to_be_counted_are_progress() -> None:
    assert seconds_without_progress(range(100, 100 + POLLS), held=True) < WORK_POLL_SECONDS


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    "numbers",
    [
        [0] * POLLS,
        [7] * POLLS,
        [7, None] * (POLLS // 2),
        [None] * POLLS,
        [7, 3] + [3] * (POLLS - 2),
        [7, 8],
    ],
    ids=["none", "the same number", "lost between", "no answer", "started again", "the request hangs"],
)
def test_an_engine_that_makes_no_tokens_is_no_progress(numbers: Sequence[int | None], held: bool) -> None:
    assert seconds_without_progress(numbers, held=held) >= SECONDS - 2 * WORK_POLL_SECONDS


def test_tokens_after_a_restart_of_the_engine_are_progress() -> None:
    numbers = [1000] * (POLLS - 2) + [3, 4]
    assert seconds_without_progress(numbers) < WORK_POLL_SECONDS


def test_tokens_for_other_clients_are_no_progress_of_a_run_that_has_no_requests() -> None:
    assert seconds_without_progress(range(POLLS), asks=False) > SECONDS


def test_tokens_do_not_hide_a_learner_that_hangs() -> None:
    assert seconds_without_progress(range(POLLS), waits=False) > SECONDS


def test_tokens_of_requests_that_never_end_are_progress_for_the_time_limit_of_a_request() -> None:
    waited = seconds_without_progress(range(POLLS), request_seconds=SECONDS / 2)
    assert SECONDS / 2 <= waited < SECONDS / 2 + 2 * WORK_POLL_SECONDS


def test_a_group_that_an_external_generator_has_posted_is_progress() -> None:
    assert seconds_without_progress([0] * POLLS, asks=False, posts=[SECONDS - 2]) < 2
