"""The judge of `make chaos` accepts resumed runs, and finds prompts that were lost or trained twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chaos.cases import KINDS, PARTS, Strike, draw
from benchmarks.chaos.judge import SAMPLES_PER_PROMPT, STALENESS_LIMIT, RunPart, detected, recovered, violations
from miles_async.config.schema.faults import Fault
from miles_async.events import Event, GroupMoved, ProcessSilent, StepEnded
from miles_async.fault_points import all_points
from tests.configuration import run_config
from tests.sim.world import World

ROLLOUTS = 12
CONFIG = run_config(
    num_rollout=ROLLOUTS,
    rollout_batch_size=8,
    n_samples_per_prompt=SAMPLES_PER_PROMPT,
    max_weight_staleness=STALENESS_LIMIT,
    save="anywhere",
    save_interval=4,
)


def as_stored(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of a simulated checkpoint in the form of the real data source."""
    position = {"epoch_id": 0, "sample_index": progress["data"]["next"] * SAMPLES_PER_PROMPT}
    return {"owed": progress["owed"], "data": position}


def until_batch(events: list[Event], rollout: int) -> list[Event]:
    """The events until a batch ended, as if the driver had died then."""
    [end] = [at for at, event in enumerate(events) if isinstance(event, StepEnded) and event.rollout == rollout]
    return events[:end]


@pytest.fixture(scope="module")
def lineage() -> tuple[list[RunPart], dict[str, Any]]:
    """A run that ended after its seventh batch, and the run that resumed it from the checkpoint after its fourth."""
    first = World(config=CONFIG, seed=1).run()
    resumed = World(config=CONFIG, seed=2, resume_from=first.trainer.saved[3]).run()
    parts = [
        RunPart(events=until_batch(first.trace.events, 7)),
        RunPart(events=resumed.trace.events),
    ]
    return parts, as_stored(resumed.trainer.saved[ROLLOUTS - 1])


def test_a_run_that_ended_and_was_resumed_is_accepted(lineage: tuple[list[RunPart], dict[str, Any]]) -> None:
    parts, progress = lineage
    assert violations(parts, progress, ROLLOUTS) == []


def test_a_prompt_that_was_trained_before_the_checkpoint_and_again_after_it_is_found(
    lineage: tuple[list[RunPart], dict[str, Any]],
) -> None:
    (first, resumed), progress = lineage
    trained = [event.feed_index for event in first.events if isinstance(event, GroupMoved) and event.after == "trained"]
    again = {event.sequence for event in resumed.events if isinstance(event, GroupMoved) and event.after == "trained"}
    renamed = [
        replace_prompt(event, trained[0]) if isinstance(event, GroupMoved) and event.sequence == min(again) else event
        for event in resumed.events
    ]
    found = violations([first, replace(resumed, events=renamed)], progress, ROLLOUTS)
    assert f"1 prompts were trained twice in the lineage: {trained[0]}" in found


def replace_prompt(event: GroupMoved, feed_index: str) -> GroupMoved:
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    return GroupMoved(**values | {"feed_index": feed_index})


def test_a_prompt_that_the_last_checkpoint_does_not_owe_is_found(
    lineage: tuple[list[RunPart], dict[str, Any]],
) -> None:
    parts, progress = lineage
    lost, *owed = progress["owed"]
    assert violations(parts, {**progress, "owed": owed}, ROLLOUTS) == [f"1 prompts were lost: {lost['feed_index']}"]


def test_a_batch_that_was_skipped_is_found(lineage: tuple[list[RunPart], dict[str, Any]]) -> None:
    (first, resumed), progress = lineage
    skipping = [event for event in resumed.events if not (isinstance(event, StepEnded) and event.rollout == 6)]
    assert "batches [6] were trained [0] times" in violations(
        [first, replace(resumed, events=skipping)], progress, ROLLOUTS
    )


def test_a_run_has_recovered_when_it_generates_and_trains_again(lineage: tuple[list[RunPart], dict[str, Any]]) -> None:
    [first, _], _ = lineage
    steps = [event.time for event in first.events if isinstance(event, StepEnded)]
    seconds = recovered([first], steps[2])
    assert seconds is not None
    assert seconds > 0
    assert recovered([first], steps[-1]) is None


def test_a_strike_is_detected_when_its_own_process_falls_silent_after_it() -> None:
    strike = Strike(part="learner", kind="stop", point=None, call=1, delay=0.0)
    silences = [
        ("rollout", 101.0, 2.0),
        ("learner-0", 102.0, 7.0),
        ("learner-0", 104.5, 4.0),
        ("learner-0", 105.5, 5.0),
    ]
    events = [ProcessSilent(time=time, process=name, seconds=seconds) for name, time, seconds in silences]
    assert detected([RunPart(events=events)], strike, 100.0, None) == 4.5
    assert detected([RunPart(events=events[:2])], strike, 100.0, None) is None
    assert detected([RunPart(events=[])], strike, 100.0, ended=103.0) == 3.0


def test_a_series_is_drawn_by_its_seed_and_strikes_every_part() -> None:
    strikes = [strike for number in range(200) for strike in draw(3, number)]
    assert strikes == [strike for number in range(200) for strike in draw(3, number)]
    assert {strike.part for strike in strikes} == {*PARTS, "store_disk", "second_run"}
    assert {strike.point for strike in strikes} <= {None, *all_points()}


@pytest.mark.parametrize("warm", [False, True])
def test_one_round_of_a_series_kills_and_stops_every_process_and_each_fault_is_possible(warm: bool) -> None:
    first = [draw(5, number, warm=warm)[0] for number in range(sum(map(len, KINDS.values())))]
    assert {(part, kind) for part in PARTS for kind in ("kill", "stop")} <= {(each.part, each.kind) for each in first}
    for strike in first:
        assert strike.point is None or Fault.model_validate(strike.fault).points
