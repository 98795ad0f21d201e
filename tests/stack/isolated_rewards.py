"""Rewards that tests run in grader processes. The module imports little, so that these processes start quickly."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_async.rewards.plugin import Reward, RunsIn
from miles_async.types import Sample


def evaluates(args: Any, sample: Sample) -> float:
    """A reward that runs the response as code."""
    return float(bool(eval(sample.response, {"args": args, "os": os})))


class Evaluates(Reward):
    """The same reward as a plug-in."""

    runs_in = RunsIn.CHILD

    def score(self, args: Any, sample: Sample) -> float:
        return evaluates(args, sample)


class Runs(Reward):
    """A reward of code: whether a response is an expression that Python can evaluate."""

    runs_in = RunsIn.CHILD

    def score(self, args: Any, sample: Sample) -> float:
        try:
            eval(sample.response)
        except Exception:
            # The response may raise anything.
            return 0.0
        return 1.0


def answers_the_next_request(args: Any, sample: Sample) -> float:
    """A reward that writes answers into every open pipe."""
    for number in range(3, 64) if sample.response == "forge" else ():
        with suppress(OSError):
            os.write(number, b'{"reward": 1.0}\n' * 100)
    return 0.0


def length(args: Any, sample: Sample) -> float:
    """A reward that prints, and that depends on a setting."""
    print("output of a reward does not disturb its answer")
    return float(len(sample.response) + args.n_samples_per_prompt)


def hangs(args: Any, sample: Sample) -> float:
    while sample.response == "hang":
        pass
    return 1.0


def exits(args: Any, sample: Sample) -> float:
    os._exit(3)


def process_id(args: Any, sample: Sample) -> float:
    return float(os.getpid())


def positions(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(position) for position in range(len(samples))]


def kills_itself(args: Any, sample: Sample) -> float:
    if sample.response == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def is_killed_once(args: Any, sample: Sample) -> float:
    if not (mark := Path(sample.response)).exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


_together = asyncio.Barrier(3)


async def meets(args: Any, sample: Sample) -> float:
    """Ends only if three samples are scored at once."""
    await _together.wait()
    if sample.response == "down":
        raise ConnectionError("the judge is down")
    return 1.0


def blocks() -> None:
    time.sleep(600)


async def waits_or_blocks(args: Any, sample: Sample) -> float:
    if sample.response == "block":
        blocks()
    if sample.response == "wait":
        await asyncio.sleep(600)
    return 1.0


def brevity(args: Any, sample: Sample) -> float:
    """The opposite of `length`: 1 for one token."""
    return 1.0 / max(sample.response_length, 1)


def digits(args: Any, sample: Sample) -> float:
    """The share of a response's characters that are digits. It varies among answers of an untrained model."""
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
