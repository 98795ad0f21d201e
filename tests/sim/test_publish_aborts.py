"""With `pause_generation_mode` abort, every publish aborts what is at the engines. Long responses still end."""

from __future__ import annotations

from collections import Counter

import pytest

from miles_async.events import GroupMoved, PublishEnded, StepEnded
from miles_async.types import DropReason, Group
from tests.configuration import run_config
from tests.sim.engines import Engines
from tests.sim.world import World

BATCHES = 30
LONG_SECONDS = 25.0
LONG = {f"sample_0_{i}" for i in (5, 40, 77)}


PAUSING_SECONDS = 0.3


class AbortingEngines(Engines):
    """A pause aborts all requests, as SGLang does in this mode, also those that arrive before it takes effect."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.sends: Counter[str] = Counter()
        """How often each prompt was sent to the engines."""

    async def generate(self, group: Group) -> None:
        self.sends[group.feed_index] += 1
        await super().generate(group)

    async def pause(self, mode: str) -> None:
        assert mode == "abort"
        await self._clock.sleep(PAUSING_SECONDS)
        await self.abort()
        await self._clock.sleep(PAUSING_SECONDS)
        await super().pause(mode)


def play(*, max_weight_staleness: int | None, partial_rollout: bool = False) -> World:
    config = run_config(
        pause_generation_mode="abort",
        rollout_batch_size=8,
        num_rollout=BATCHES,
        max_weight_staleness=max_weight_staleness,
        partial_rollout=partial_rollout,
        max_attempts=2,
    )
    world = World(
        config=config,
        engine_kind=AbortingEngines,
        latency=lambda group, rng: LONG_SECONDS if group.feed_index in LONG else 1.0,
    ).run()
    assert len(world.trace.of(StepEnded)) == BATCHES
    assert world.audit.violations == []
    assert world.dead_letters.letters == []
    return world


@pytest.mark.parametrize("max_weight_staleness", [1, 3, None])
@pytest.mark.parametrize("partial_rollout", [False, True])
def test_a_long_response_ends_although_publishes_abort_it(
    max_weight_staleness: int | None, partial_rollout: bool
) -> None:
    world = play(max_weight_staleness=max_weight_staleness, partial_rollout=partial_rollout)
    trained = {prompt for batch in world.trainer.batches for prompt in batch}
    assert trained >= LONG
    if not partial_rollout:
        # Each time is one restart from the first token.
        assert max(world.fleet.sends[name] for name in LONG) <= 8  # type: ignore[attr-defined]


def test_an_abort_by_a_publish_ends_no_attempt() -> None:
    world = play(max_weight_staleness=3)
    moves = [move for move in world.trace.of(GroupMoved) if move.reason == DropReason.ABORTED]
    last_publish = max(event.time for event in world.trace.of(PublishEnded))
    assert [move for move in moves if move.time < last_publish] == []
    assert {move.attempt for move in world.trace.of(GroupMoved)} == {0}


def test_partial_rollout_continues_the_tokens_of_an_aborted_response() -> None:
    """The version spans show that tokens of several versions were kept."""
    versions: dict[str, set[int]] = {}

    class Watching(AbortingEngines):
        async def generate(self, group: Group) -> None:
            await super().generate(group)
            versions[group.feed_index] = {span.version for span in group[0].spans}

    config = run_config(pause_generation_mode="abort", rollout_batch_size=8, num_rollout=BATCHES, partial_rollout=True)
    World(config=config, engine_kind=Watching, latency=lambda group, rng: 4.0 + rng.random()).run()
    assert max(map(len, versions.values())) > 1
