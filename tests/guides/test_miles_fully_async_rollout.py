"""The fully async rollout page of Miles, in its order: the command, the tuning knobs and the lines to monitor."""

from __future__ import annotations

import io
import re
from typing import Any

from miles_async.config.generation import schedule_of
from miles_async.config.load import load_config
from miles_async.config.schema import RunConfig
from miles_async.events import Stalled
from miles_async.observability.console.program_lines import PlainLines
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason
from tests.configuration import run_config
from tests.sim.world import World

GENERATION = ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "64"]
RECIPE = ["--reasoning-gym-task", "chain_sum", "--rm-type", "reasoning_gym", *GENERATION]
"""The argument groups of a synchronous run, which the page leaves as they are."""
FUNCTION = ["--rollout-function-path", "fully_async_rollout.generate_rollout_fully_async"]


def typed(entry: str, *flags: str) -> RunConfig:
    return load_config([*RECIPE, *flags], entry=entry)


# --- Enable it ------------------------------------------------------------------------------------------------------


def test_the_other_entry_point_and_the_rollout_function_make_a_run_fully_asynchronous() -> None:
    assert schedule_of(typed("train.py"), "train.py") is Schedule.SYNCHRONOUS
    assert schedule_of(typed("train_async.py", *FUNCTION), "train_async.py") is Schedule.FULLY_ASYNC


def test_the_function_without_the_other_entry_point_runs_synchronously() -> None:
    assert schedule_of(typed("train.py", *FUNCTION), "train.py") is Schedule.SYNCHRONOUS


# --- Tuning knobs ---------------------------------------------------------------------------------------------------


def test_every_tuning_knob_is_a_flag() -> None:
    knobs = "--rollout-batch-size 32 --sglang-server-concurrency 64 --global-batch-size 128 --num-steps-per-rollout 2"
    run = typed(
        "train_async.py", *FUNCTION, *knobs.split(), "--n-samples-per-prompt", "8", "--max-weight-staleness", "2"
    )
    assert (run.rollout.rollout_batch_size, run.engine.sglang_server_concurrency) == (32, 64)
    assert (run.learner.global_batch_size, run.learner.num_steps_per_rollout) == (128, 2)
    assert run.rollout.max_weight_staleness == 2


def test_the_output_queue_holds_1000_groups() -> None:
    assert typed("train_async.py", *FUNCTION).rollout.queue_capacity == 1000


def simulated(**settings: Any) -> World:
    sizes = {"rollout_batch_size": 8, "num_rollout": 40, "n_samples_per_prompt": 2}
    return World(config=run_config(**sizes | settings)).run()


def test_no_group_that_is_older_than_the_limit_is_trained() -> None:
    limited = simulated(max_weight_staleness=1)
    assert limited.audit.violations == []
    assert limited.service.lifecycle.ledger.dropped[DropReason.STALE] == 0, "admission keeps groups fresh"


# --- What to monitor ------------------------------------------------------------------------------------------------


def test_the_lines_to_grep_for_are_printed() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    world = simulated(max_weight_staleness=1, num_rollout=2)
    for event in [*world.trace.events, Stalled(time=1.0, seconds=60.0, queue=0, collected=5, wanted=32)]:
        lines.observe(event)
    for pattern in (
        r"Global worker queue size: \d+",
        r"Staleness stats: recycled=\d+, avg_staleness=\d+\.\d+, max_staleness=\d+",
        r"Warning: No progress for \d+s\. Queue size: \d+, Collected: \d+/\d+",
    ):
        assert re.search(f"^{pattern}$", stream.getvalue(), re.MULTILINE)
