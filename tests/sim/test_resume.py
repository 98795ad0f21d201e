"""A run that is resumed from a checkpoint loses no prompt and trains none twice."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from itertools import chain
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError
from miles_async.events import StepStarted
from miles_async.pipeline.checkpoint import progress_of, resume
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.pipeline.run_state import RunState
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, VersionSpan
from tests.configuration import run_config
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import DirectJournal, Feed, Trace, World, held_prompts_of, lifecycle_of

ROLLOUTS, BATCH = 20, 8


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": BATCH, "num_rollout": ROLLOUTS, "n_samples_per_prompt": 2}
    return run_config(**sizes, max_weight_staleness=3, **settings)


def test_checkpoints_are_written_at_the_configured_interval_and_at_the_end() -> None:
    def written(**learner: object) -> list[int]:
        return list(World(config=config(**learner)).run().trainer.saved)

    assert written() == []
    assert written(save="anywhere") == [19]
    assert written(save="anywhere", save_interval=7) == [6, 13, 19]
    assert written(save="anywhere", save_interval=10) == [9, 19]
    assert written(save_hf="anywhere/{rollout_id}", save_interval=10) == [9, 19]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_resumed_run_trains_every_prompt_once(schedule: Schedule) -> None:
    prompts = ROLLOUTS * BATCH
    first = World(config=config(save="anywhere", save_interval=7), schedule=schedule, prompts=prompts).run()
    resumed = World(config=config(), schedule=schedule, prompts=prompts, resume_from=first.trainer.saved[6]).run()
    assert [step.rollout for step in resumed.trace.of(StepStarted)] == list(range(7, 20))
    trained = Counter(chain.from_iterable(first.trainer.batches[:7] + resumed.trainer.batches))
    assert trained == Counter(f"sample_0_{i}" for i in range(prompts))
    assert resumed.audit.violations == []


class OwnFunction(World):
    """A user-defined batch function whose prompts are still unfinished when a step ends."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = source.get_samples(BATCH + 1)
        source.add_samples([groups.pop()])
        for group in groups:
            group[0].metadata["begun"] = True
        await asyncio.sleep(5.0)
        for group in groups:
            for sample in group:
                sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-0.5]
                sample.spans, sample.reward = [VersionSpan(source.live_version, 0, 1)], 1.0
        return groups


def test_a_checkpoint_contains_the_prompts_that_a_user_function_works_on() -> None:
    prompts = ROLLOUTS * BATCH + 1
    settings: dict[str, Any] = {"schedule": Schedule.ONE_STEP_OFF, "prompts": prompts}
    first = OwnFunction(config=config(save="anywhere", save_interval=7), **settings).run()
    owed = {group["feed_index"] for group in first.trainer.saved[6]["owed"]}
    assert len(owed) == BATCH + 1, "also the prompt that it gave back"
    metadata = [group["samples"][0]["metadata"] for group in first.trainer.saved[6]["owed"]]
    assert not any("begun" in values for values in metadata), "as they were taken"
    resumed = OwnFunction(config=config(), resume_from=first.trainer.saved[6], **settings).run()
    trained = Counter(chain.from_iterable(first.trainer.batches[:7] + resumed.trainer.batches))
    assert set(trained.values()) == {1}
    assert owed <= set(trained)


class Grabbed(Feed):
    """While the position of the data is recorded, a rollout function in another thread takes a prompt."""

    def __init__(self, run_state: RunState) -> None:
        super().__init__()
        self.held = held_prompts_of(run_state, self)
        source = RolloutSource(
            data=self,
            run_state=run_state,
            held=self.held,
            collector=None,  # type: ignore[arg-type]
            evaluator=None,  # type: ignore[arg-type]
            schedule=Schedule.ONE_STEP_OFF,
        )
        self.taker = threading.Thread(target=source.get_samples, args=(1,))

    def position(self) -> dict[str, Any]:
        self.taker.start()
        self.taker.join(0.02)
        return super().position()


async def test_a_prompt_that_is_taken_while_a_checkpoint_is_recorded_is_kept() -> None:
    run_state = RunState(VirtualClock(), DirectJournal(Trace()))
    feed = Grabbed(run_state)
    noted = progress_of(0, run_state, lifecycle_of(run_state, feed), feed.held.snapshot)
    feed.taker.join()
    assert noted["data"]["next"] == len(noted["owed"])


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    plain = World(config=config()).run()
    saving = World(config=config(save="anywhere", save_interval=5), save_seconds=3.0).run()
    waiting = World(config=config(save="anywhere", save_interval=5, async_save=False), save_seconds=3.0).run()
    assert list(saving.trainer.saved) == list(waiting.trainer.saved) == [4, 9, 14, 19]
    assert saving.seconds == pytest.approx(plain.seconds + 3.0, abs=0.5), "only the last one is waited for"
    assert waiting.seconds > saving.seconds + 2 * 3.0 - 1.0
    assert saving.audit.violations == []


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_cause() -> None:
    saving = World(config=config(save="anywhere", save_interval=5), save_error="the disk is full")
    with pytest.raises(FatalError, match="the disk is full"):
        saving.run()
    assert len(saving.trace.of(StepStarted)) < 9, "within the seconds that writing takes"


def test_a_slow_checkpoint_delays_the_next_one_and_none_is_lost() -> None:
    saving = World(config=config(save="anywhere", save_interval=1), save_seconds=7.0).run()
    assert list(saving.trainer.saved) == list(range(ROLLOUTS))


def test_a_restored_prompt_is_generated_from_the_start_and_its_attempts_still_count() -> None:
    first = World(config=config(save="anywhere", save_interval=7)).run()
    progress = {**first.trainer.saved[6], "rollout": 6}
    assert progress["owed"]
    for owed in progress["owed"]:
        owed["attempt"] = 1
        assert owed["samples"][0].keys() == {"index", "prompt", "prompt_tokens", "label", "metadata"}
        owed["samples"][0]["prompt_tokens"] = [5]
    feed = Feed(2)
    resume(progress, feed, DirectJournal(Trace()))
    for group in feed.get_samples(len(progress["owed"])):
        assert (group.attempt, group[0].tokens, group[0].rollout_log_probs) == (1, [5], [])
