"""Recording and replaying generation around the real service, under virtual time."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_async.adapters.storage.checksum import checksum
from miles_async.adapters.storage.recording_store import RecordingStore
from miles_async.errors import UserError
from miles_async.events import GroupGenerated, GroupMoved, GroupReplayed, QueueChanged, StepStarted
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.ports import Generator
from miles_async.recording import Recording
from miles_async.rollout.recording_generator import RecordingGenerator
from miles_async.rollout.recordings import RecordingContext
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.sim.engines import Engines
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Feed, World

ROLLOUTS = 12


class CountingEngines:
    """Passes calls on and remembers which groups reached the engines."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.asked: list[tuple[str, int]] = []

    async def generate(self, group: Group) -> None:
        self.asked.append((group.feed_index, group.attempt))
        await self._engines.generate(group)
        for position, sample in enumerate(group):
            # The simulated engines draw no tokens; these differ from run to run as drawn ones do.
            sample.tokens = [int(self._engines.worked_seconds * 1e6) + position] * len(sample.tokens)
            sample.rollout_log_probs = [-0.5] * sample.response_length

    async def abort(self, group: Group | None = None) -> None:
        await self._engines.abort(group)

    requests = property(lambda self: self._engines.requests)


async def _at_once(work: Any) -> Any:
    return work()


@dataclass(kw_only=True)
class SkippingWorld(World):
    """A simulated run in which generation may be skipped."""

    identity: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    refused: frozenset[str] = frozenset()
    """Feed indices that the filter drops."""
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    """The contents of each group when it reached the filter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keep = self._look_at

    def _look_at(self, group: Group) -> bool:
        self.tokens[group.feed_index] = [list(sample.tokens) for sample in group]
        return group.feed_index not in self.refused

    def _generator(self, clock: VirtualClock) -> Generator:
        self.live = CountingEngines(self.fleet)
        self.recording = RecordingGenerator(
            self.live,
            self.config,
            RecordingContext(identity=self.identity, warn=self.warnings.append, offload=_at_once),
            stream=self.schedule is Schedule.FULLY_ASYNC,
            clock=clock,
            events=self.journal,
            live_version=lambda: self.service.run_state.live_version,
        )
        return self.recording

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        return await self.recording.batch(rollout_id, lambda: World._rollout(self, rollout_id, source, size))


def play(
    folder: Path,
    *,
    seed: int = 0,
    schedule: Schedule = Schedule.FULLY_ASYNC,
    steps: Sequence[int | str] = ("0-",),
    skip: dict[str, Any] | None = None,
    identity: dict[str, Any] | None = None,
    role: dict[str, Any] | None = None,
    train_seconds: float = 1.0,
    latency_seconds: float | None = None,
    refuse: int = 0,
    **rollout: Any,
) -> SkippingWorld:
    sizes = {"rollout_batch_size": 8, "num_rollout": ROLLOUTS, "n_samples_per_prompt": 2, "max_weight_staleness": 3}
    prefix = "skip_async_rollout_" if schedule is Schedule.FULLY_ASYNC else "skip_rollout_"
    of_role = {"enable": True, "dump_dir": str(folder), "steps": list(steps), **(role or {})}
    skipped = {f"{prefix}{name}": value for name, value in of_role.items()}
    skipped |= {f"skip_{name}": value for name, value in (skip or {}).items()}
    config = run_config(**sizes | rollout | skipped)
    world = SkippingWorld(
        config=config,
        schedule=schedule,
        seed=seed,
        identity=identity or {},
        train_seconds=train_seconds,
        refused=frozenset(f"sample_0_{index}" for index in range(refuse)),
    )
    if latency_seconds is not None:
        world.latency = lambda group, rng: rng.uniform(0.5, 1.5) * latency_seconds
    world.run()
    assert world.audit.violations == []
    return world


def ages(world: World) -> list[list[int]]:
    return [event.staleness for event in world.trace.of(StepStarted)]


def began(world: World) -> list[float]:
    return [event.time for event in world.trace.of(StepStarted)]


def queue_over_time(world: World) -> list[tuple[float, int, int]]:
    return [(round(event.time, 6), event.depth, event.blocked) for event in world.trace.of(QueueChanged)]


def trained(world: World) -> set[str]:
    return {feed_index for batch in world.trainer.batches for feed_index in batch}


def asked(world: SkippingWorld) -> set[str]:
    return {feed_index for feed_index, _ in world.live.asked}


def steps_on_disk(folder: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in folder.glob("*/GBS*/*/meta.json"))


def test_the_second_run_generates_nothing_and_trains_on_equal_tokens(tmp_path: Path) -> None:
    first = play(tmp_path)
    second = play(tmp_path, seed=1)
    assert trained(first) < asked(first), "some groups are under way when the run ends"
    assert second.live.asked == []
    assert second.trainer.batches == first.trainer.batches
    assert all(second.tokens[feed_index] == first.tokens[feed_index] for feed_index in trained(first))


def test_a_recording_run_waits_a_limited_time_for_groups_in_flight_when_it_ends(tmp_path: Path) -> None:
    patient = play(tmp_path / "patient", latency_seconds=20.0)
    hasty = play(tmp_path / "hasty", latency_seconds=20.0, skip={"drain_seconds": 0.5})
    assert {f"sample_0_{step}" for step in steps_on_disk(tmp_path / "patient")} == asked(patient)
    assert {f"sample_0_{step}" for step in steps_on_disk(tmp_path / "hasty")} < asked(hasty)
    assert hasty.seconds < patient.seconds


def test_a_replay_that_is_older_than_its_admission_is_no_violation_and_is_reported(tmp_path: Path) -> None:
    first = play(tmp_path, windowed_fifo_ratio=0.3)
    second = play(tmp_path, windowed_fifo_ratio=0.3, train_seconds=0.2, skip={"replay_timing": "none"})
    replayed = {event.sequence for event in second.trace.of(GroupReplayed)}
    assert replayed
    assert {event.recorded for event in second.trace.of(GroupReplayed)} <= asked(first)


def test_a_second_run_without_recordings_samples_other_tokens(tmp_path: Path) -> None:
    first, second = play(tmp_path / "a"), play(tmp_path / "b", seed=1)
    assert first.tokens != second.tokens
    assert ages(first) != ages(second)


def test_a_timed_replay_exercises_queue_window_and_staleness_as_the_live_run_did(tmp_path: Path) -> None:
    first = play(tmp_path, windowed_fifo_ratio=0.3)
    second = play(tmp_path, seed=1, windowed_fifo_ratio=0.3)
    assert max(age for batch in ages(first) for age in batch) > 0
    assert ages(second) == ages(first)
    assert queue_over_time(second)[:100] == queue_over_time(first)[:100]
    # Only the first run finished, at its end, what it was recording.
    assert second.seconds < first.seconds
    assert began(second) == pytest.approx(began(first))


def test_a_generate_function_may_change_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = CountingEngines.generate

    async def renders(self: CountingEngines, group: Group) -> None:
        await generate(self, group)
        for sample in group:
            sample.prompt = f"<user>{sample.prompt}"

    monkeypatch.setattr(CountingEngines, "generate", renders)
    play(tmp_path)
    assert play(tmp_path, seed=1).live.asked == []


def test_an_untimed_replay_takes_no_time(tmp_path: Path) -> None:
    first = play(tmp_path, latency_seconds=3.0, max_weight_staleness=None)
    recorded = steps_on_disk(tmp_path)
    second = play(tmp_path, skip={"replay_timing": "none"}, latency_seconds=3.0, max_weight_staleness=None)
    replayed = [event for event in second.trace.of(GroupGenerated) if event.sequence in recorded]
    assert {event.generation_seconds for event in replayed} == {0.0}
    assert second.seconds < 0.7 * first.seconds


def test_only_the_steps_asked_for_are_recorded_and_replayed(tmp_path: Path) -> None:
    play(tmp_path, steps=["4-10", 20])
    assert steps_on_disk(tmp_path) == [*range(4, 11), 20]
    second = play(tmp_path, steps=[5, 20, 21])
    assert asked(second) & {"sample_0_5", "sample_0_20"} == set()
    assert {"sample_0_4", "sample_0_6", "sample_0_21"} <= asked(second)


def test_a_recycled_prompt_is_generated_again(tmp_path: Path) -> None:
    """A recording that is too old would be too old again and again."""
    settings: dict[str, Any] = {"max_weight_staleness": 1, "windowed_fifo_ratio": 0.3, "max_attempts": 9}
    play(tmp_path, train_seconds=0.2, **settings)
    second = play(tmp_path, seed=1, skip={"replay_timing": "none"}, **settings)
    recycled = {moved.feed_index for moved in second.trace.of(GroupMoved) if moved.reason == DropReason.STALE}
    assert recycled & trained(second)
    assert recycled & trained(second) <= asked(second)
    assert 0 not in {attempt for feed_index, attempt in second.live.asked if feed_index in trained(second)}


def test_recording_does_not_change_a_run(tmp_path: Path) -> None:
    plain = World(config=play(tmp_path).config, seed=0).run()
    assert ages(plain) == ages(play(tmp_path / "again"))


@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.ONE_STEP_OFF])
def test_batch_functions_replay_whole_batches_by_trainer_step(tmp_path: Path, schedule: Schedule) -> None:
    first = play(tmp_path, schedule=schedule)
    assert steps_on_disk(tmp_path) == list(range(ROLLOUTS))
    second = play(tmp_path, schedule=schedule, seed=1)
    assert second.live.asked == []
    assert second.trainer.batches == first.trainer.batches
    assert second.tokens == first.tokens
    assert ages(second) == ages(first)
    assert second.seconds == pytest.approx(first.seconds)


def test_the_replay_of_an_over_sampled_batch_ends_with_the_recorded_groups(tmp_path: Path) -> None:
    """Groups that were aborted in the recorded batch are aborted again instead of being generated."""
    settings: dict[str, Any] = {"schedule": Schedule.SYNCHRONOUS, "over_sampling_batch_size": 12}
    first, second = play(tmp_path, **settings), play(tmp_path, seed=1, **settings)
    assert second.live.asked == []
    assert second.trainer.batches == first.trainer.batches


def test_a_batch_that_needs_more_than_was_recorded_generates_the_rest(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schedule": Schedule.SYNCHRONOUS, "over_sampling_batch_size": 12}
    play(tmp_path, **settings)
    second = play(tmp_path, seed=1, refuse=5, **settings)
    assert len(second.trainer.batches) == ROLLOUTS
    assert second.live.asked


def test_repeat_generates_the_first_step_and_replays_it_for_all_others(tmp_path: Path) -> None:
    world = play(tmp_path, schedule=Schedule.SYNCHRONOUS, role={"action": "repeat"})
    assert asked(world) == {f"sample_0_{i}" for i in range(8)}
    assert steps_on_disk(tmp_path) == [0]
    assert len({str(sorted(world.tokens[name] for name in batch)) for batch in world.trainer.batches}) == 1


def test_repeat_replays_the_recorded_groups_for_all_others_of_the_stream(tmp_path: Path) -> None:
    play(tmp_path, steps=["0-7"])
    second = play(tmp_path, seed=1, role={"action": "repeat"})
    assert second.live.asked == []


def test_repeat_scores_recorded_responses_against_the_label_of_their_own_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other data, or another order of the same data, has other prompts at the same positions."""
    get_samples, look_at = Feed.get_samples, SkippingWorld._look_at
    problem = "1 + 1", "2"
    seen: set[tuple[Any, Any]] = set()

    def with_problem(self: Feed, num_samples: int, adapter: str = "") -> list[Group]:
        groups = get_samples(self, num_samples, adapter)
        for sample in (sample for group in groups for sample in group):
            sample.prompt, sample.label = problem
        return groups

    def look(self: SkippingWorld, group: Group) -> bool:
        seen.update((sample.prompt, sample.label) for sample in group)
        return look_at(self, group)

    monkeypatch.setattr(Feed, "get_samples", with_problem)
    monkeypatch.setattr(SkippingWorld, "_look_at", look)
    play(tmp_path, num_rollout=1)
    problem = "5 + 5", "10"
    world = play(tmp_path, num_rollout=1, role={"action": "repeat"})
    assert world.live.asked == []
    assert seen == {("1 + 1", "2")}


def test_a_recording_of_other_settings_stops_the_run_and_names_the_field(tmp_path: Path) -> None:
    play(tmp_path, identity={"model": "a", "rollout_temperature": 1.0})
    with pytest.raises(UserError, match=r"made under other settings: rollout_temperature was 1\.0 and is 0\.7"):
        play(tmp_path, identity={"model": "a", "rollout_temperature": 0.7})


def test_a_recording_of_another_prompt_stops_the_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path)
    get_samples = Feed.get_samples

    def reworded(self: Feed, num_samples: int, adapter: str = "") -> list[Group]:
        groups = get_samples(self, num_samples, adapter)
        for group in groups:
            for sample in group:
                sample.prompt = "Think. ?"
        return groups

    monkeypatch.setattr(Feed, "get_samples", reworded)
    with pytest.raises(UserError, match="the recording of sample_0_0 was made under other settings: prompt was"):
        play(tmp_path)


def test_a_recording_that_does_not_match_may_be_ignored_with_one_warning(tmp_path: Path) -> None:
    play(tmp_path, identity={"model": "a"})
    world = play(tmp_path, identity={"model": "b"}, skip={"mismatch": "generate"})
    assert trained(world) <= asked(world)
    [warning] = world.warnings
    assert "model was 'a' and is 'b'; such steps are generated" in warning


def test_recordings_of_other_sizes_are_ignored_with_one_warning(tmp_path: Path) -> None:
    play(tmp_path)
    other = play(tmp_path, n_samples_per_prompt=4)
    assert trained(other) <= asked(other)
    [warning] = other.warnings
    assert "there are no recordings of GBS1_N4_inany_out1024" in warning
    assert "only of GBS1_N2_inany_out1024; every step is generated" in warning


def test_a_foreign_folder_in_the_recordings_is_set_aside(tmp_path: Path) -> None:
    play(tmp_path, num_rollout=2)
    [folder] = tmp_path.glob("*/GBS1_*")
    for file in (folder / "3").iterdir():
        file.unlink()
    (folder / "3" / "notes.txt").write_text("mine")
    second = play(tmp_path, seed=1, num_rollout=2)
    assert "sample_0_3" in asked(second)
    [warning] = second.warnings
    assert "3 is damaged (" in warning
    [aside] = folder.glob("3.damaged-*")
    assert (aside / "notes.txt").read_text() == "mine"


def test_a_damaged_recording_is_set_aside_and_its_step_is_generated_again(tmp_path: Path) -> None:
    play(tmp_path)
    [batch] = tmp_path.glob("*/GBS*/7/gen_batch.safetensors")
    batch.write_bytes(batch.read_bytes()[:-1])
    second = play(tmp_path, seed=1)
    assert asked(second) & {f"sample_0_{step}" for step in range(20)} == {"sample_0_7"}
    [warning] = second.warnings
    assert "7 is damaged (the checksum of gen_batch.safetensors does not match) and was set aside" in warning
    assert "sample_0_7" not in asked(play(tmp_path, seed=2))


def change_samples(folder: Path, step: int, change: Callable[[list[Sample]], Any]) -> None:
    """Write an entry again with changed samples, and therefore with a checksum that is right."""
    [entry] = folder.glob(f"*/GBS*/{step}")
    store = RecordingStore(entry.parent)
    loaded = store.load(step)
    [group] = loaded.recording.groups
    samples = list(group.samples)
    change(samples)
    shutil.rmtree(entry)
    store.save(step, Recording(groups=[replace(group, samples=samples)]), loaded.identity)


def change_meta(folder: Path, step: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON of an entry and its checksum."""
    [path] = folder.glob(f"*/GBS*/{step}/meta.json")
    meta = orjson.loads(path.read_bytes())
    del meta["checksum"]
    change(meta)
    path.write_bytes(orjson.dumps(meta | {"checksum": checksum([orjson.dumps(meta, option=orjson.OPT_SORT_KEYS)])}))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda samples: samples.pop(), "has 1 samples of 2"),
        (lambda samples: samples[0].tokens.clear(), "tokens has 0 entries, fewer than response_length"),
        (lambda samples: samples[0].tokens.append(-1), "-1 is not between 0 and 2147483647"),
        (lambda samples: samples[0].rollout_log_probs.append(-1.0), "entries; response_length is"),
        (lambda samples: samples[0].rollout_log_probs.__setitem__(0, math.nan), "rollout_log_probs[0] is not finite"),
        (lambda samples: setattr(samples[0], "spans", [VersionSpan(99, 0, 1)]), "weight version 99 does not exist"),
        (lambda samples: setattr(samples[0], "spans", [VersionSpan(0, 5, 1)]), "spans must be in order"),
        (lambda samples: setattr(samples[0], "status", SampleStatus.PENDING), "is not generated completely"),
        (lambda samples: setattr(samples[0], "metadata", [1]), "metadata: expected object, got array"),
        (lambda samples: setattr(samples[0], "index", "a"), "expected int | null, got str"),
    ],
)
def test_a_recording_with_an_invalid_sample_is_set_aside_and_its_step_is_generated_again(
    tmp_path: Path, change: Callable[[list[Sample]], Any], reason: str
) -> None:
    play(tmp_path)
    change_samples(tmp_path, 7, change)
    second = play(tmp_path, seed=1)
    assert asked(second) & {f"sample_0_{step}" for step in range(20)} == {"sample_0_7"}
    [warning] = second.warnings
    assert re.search(rf"7 is damaged \(.*{re.escape(reason)}.*\) and was set aside", warning)
    assert "sample_0_7" not in asked(play(tmp_path, seed=2))


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta["groups"].clear(),
        lambda meta: meta.pop("groups"),
        lambda meta: meta.pop("format"),
        lambda meta: meta.pop("batch"),
        lambda meta: meta.update(identity=3),
        lambda meta: meta["groups"][0].update(seconds="long"),
        lambda meta: meta["groups"][0]["samples"][0]["arrays"].update(tokens=10**10),
        lambda meta: meta["groups"][0]["samples"][0]["arrays"].update(other=1),
        lambda meta: meta["groups"][0]["samples"][0].update(status="unknown"),
    ],
)
def test_a_recording_of_another_structure_is_set_aside_and_its_step_is_generated_again(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    play(tmp_path)
    change_meta(tmp_path, 7, change)
    second = play(tmp_path, seed=1)
    assert asked(second) & {f"sample_0_{step}" for step in range(20)} == {"sample_0_7"}
    [warning] = second.warnings
    assert "7 is damaged (" in warning
    assert "was set aside" in warning


def test_a_full_folder_ends_recording_with_one_warning_and_the_run_continues(tmp_path: Path) -> None:
    world = play(tmp_path, skip={"max_bytes": 5_000})
    assert 0 < len(steps_on_disk(tmp_path)) < ROLLOUTS * 8
    [warning] = world.warnings
    assert "nothing more is recorded" in warning


def test_the_head_deadline_ends_a_replay_and_the_next_attempt_is_generated(tmp_path: Path) -> None:
    play(tmp_path)
    second = play(tmp_path, seed=1, head_deadline_seconds=1.0, head_deadline_action="salvage", windowed_fifo_ratio=0.0)
    assert len(second.trainer.batches) == ROLLOUTS
    assert second.live.asked
