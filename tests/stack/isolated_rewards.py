"""Rewards that tests run in grader processes. The module imports little, so that these processes start quickly."""

from __future__ import annotations

import os
from typing import Any

from miles_async.types import Sample


def evaluates(args: Any, sample: Sample) -> float:
    """A reward that runs the response as code."""
    return float(bool(eval(sample.response, {"args": args, "os": os})))


def length(args: Any, sample: Sample) -> float:
    """A reward that prints, and that depends on a setting."""
    print("output of a reward does not disturb its answer")
    return float(len(sample.response) + args.n_samples_per_prompt)


def hangs(args: Any, sample: Sample) -> float:
    while sample.response == "hang":
        pass
    return 1.0


def exits(args: Any, sample: Sample) -> float:
    raise SystemExit(3)


def process_id(args: Any, sample: Sample) -> float:
    return float(os.getpid())


def positions(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(position) for position in range(len(samples))]
