"""How signals end a run: the summary is written first, and the rollout worker has limited time to drain the run."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from miles_async.events import RunEnded
from tests.configuration import run_config
from workers import driver
from workers.driver import RunInterruptedError, StopRequest


class Subscribers:
    def __init__(self) -> None:
        self.early_summaries: list[str] = []

    def write_summary(self, end: RunEnded) -> None:
        self.early_summaries.append(end.reason)


def stop_request(drain_seconds: float = 60.0) -> StopRequest:
    subscribers: Any = Subscribers()
    return StopRequest(subscribers, drain_seconds)


def test_the_summary_is_written_as_soon_as_the_signal_arrives() -> None:
    async def interrupted() -> list[str]:
        subscribers: Any = Subscribers()
        StopRequest(subscribers, 60.0).request(signal.SIGTERM)
        written: list[str] = subscribers.early_summaries
        return written

    assert asyncio.run(interrupted()) == ["interrupted"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_names_the_signal(number: signal.Signals) -> None:
    async def interrupted() -> int:
        stop = stop_request()
        stop.handle_signals()
        os.kill(os.getpid(), number)
        with pytest.raises(RunInterruptedError):
            await stop.wait()
        return stop.exit_code

    assert asyncio.run(interrupted()) == 128 + number


@pytest.mark.virtual_time
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_run_that_does_not_end_in_time_after_a_signal_is_abandoned(number: signal.Signals) -> None:
    stop = stop_request(drain_seconds=run_config(drain_seconds=1800.0).cluster.drain_seconds)
    now = asyncio.get_running_loop().time
    sent = now()
    stop.request(number)
    with pytest.raises(RunInterruptedError):
        await driver._guard(asyncio.Event().wait(), stop.wait_until_overdue())
    assert now() - sent == 1800.0 + driver.END_SECONDS


@pytest.mark.virtual_time
async def test_a_run_that_uses_all_of_its_time_may_still_report_its_end() -> None:
    stop = stop_request(drain_seconds=10.0)
    stop.request(signal.SIGTERM)
    await driver._guard(asyncio.sleep(10.0 + driver.END_SECONDS / 2), stop.wait_until_overdue())


def test_the_second_signal_cancels_the_run() -> None:
    async def interrupted() -> None:
        stop = stop_request()
        stop.request(signal.SIGTERM)
        stop.request(signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())


def test_sighup_does_not_end_a_run_that_starts() -> None:
    async def hung_up() -> None:
        driver._ignore_hangup()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)

    asyncio.run(hung_up())
