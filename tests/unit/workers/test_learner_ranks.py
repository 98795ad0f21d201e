"""The ranks of the learner wait for each other, so a call begins on all or on none of them, even if its caller dies."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from miles_async.adapters.ray.learner import RayLearner, RayRanks
from miles_async.adapters.storage.checkpoints import CheckpointFolder
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError
from miles_async.types import Group, LearnerProgress, Sample, StepReport
from tests.configuration import run_config
from tests.waiting import PATIENCE_SECONDS
from workers import learner_ranks
from workers.learner import LearnerRank
from workers.learner_ranks import LearnerRanks

RANKS = 2
CONFIG = run_config(rollout_batch_size=2, n_samples_per_prompt=2, actor_num_gpus_per_node=RANKS)


@pytest.fixture(autouse=True)
def _store_without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's object store returns what is put into it."""
    monkeypatch.setattr(ray, "put", lambda value: value)


class KilledError(BaseException):
    """Raised in a rollout worker that is dead."""


class Rank(LearnerRank):
    """A rank whose training takes as long as it needs until all ranks train: a collective operation."""

    def __init__(self, config: RunConfig, rank: int, folder: Path, meeting: threading.Barrier) -> None:
        super().__init__(config, rank, RANKS, folder)
        self._model_thread = ThreadPoolExecutor(1)
        self._meeting = meeting
        self.trained: list[int] = []

    async def shares_prefixes(self) -> bool:
        return False

    def _train(self, rollout_id: int, adapter: str, steps: Sequence[Any]) -> StepReport:
        self._meeting.wait()
        self.trained.append(rollout_id)
        return StepReport(seconds=1.0, tokens=1, finite=True, metrics={"memory_gib": 0.0})


class Handle:
    """Calls a rank as Ray does: the call goes on without its caller, and its arguments are copied.

    `reached` is called before and after each call is sent.
    """

    def __init__(self, rank: Any, reached: Callable[[], None] = lambda: None) -> None:
        self._rank = rank
        self._reached = reached

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self._reached()
            call = asyncio.ensure_future(getattr(self._rank, method)(*pickle.loads(pickle.dumps(arguments))))
            self._reached()
            return asyncio.shield(call)

        return SimpleNamespace(remote=remote)


def dying_at(moment: int) -> Callable[[], None]:
    """A rollout worker that dies at its `moment`-th step, and does nothing any more."""
    reached = 0

    def step() -> None:
        nonlocal reached
        reached += 1
        if reached >= moment:
            raise KilledError

    return step


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    meeting = threading.Barrier(RANKS)
    made = [Rank(CONFIG, rank, tmp_path, meeting) for rank in range(RANKS)]
    yield made
    meeting.abort()


def batch() -> list[Group]:
    def sample() -> Sample:
        return Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], reward=1.0)

    return [Group([sample(), sample()], feed_index=f"prompt_{number}", sequence=number) for number in range(2)]


@pytest.mark.parametrize("moment", range(1, 10))
async def test_a_rollout_worker_that_dies_while_it_sends_a_batch_leaves_no_rank_waiting(
    moment: int, ranks: list[Rank]
) -> None:
    handles = [Handle(rank) for rank in ranks]
    await ranks[0].lead(handles[1:])  # type: ignore[arg-type]
    step = dying_at(moment)
    dying = RayLearner(CONFIG, RayRanks([Handle(rank, step) for rank in ranks]), "run")
    with suppress(KilledError):
        await dying.train(5, batch())
    following = RayLearner(CONFIG, RayRanks(handles), "run")
    async with asyncio.timeout(PATIENCE_SECONDS):
        if (await following.progress()).rollout != 5:
            await following.train(5, batch())
        progress = await following.progress()
    assert (progress.rollout, progress.groups, progress.changed) == (5, [0, 1], "")
    assert [rank.trained for rank in ranks] == [[5]] * RANKS


async def test_a_batch_that_reached_only_one_rank_is_replaced_by_the_next_one(ranks: list[Rank]) -> None:
    handles = [Handle(rank) for rank in ranks]
    await ranks[0].lead(handles[1:])  # type: ignore[arg-type]
    await RayRanks(handles).give_batch(0, 5, [0, 1], [])
    learner = RayLearner(CONFIG, RayRanks(handles), "run")
    assert (await learner.progress()).rollout == -1
    await learner.train(5, batch()[:1])
    assert (await learner.progress()).groups == [0]


class DifferentRanks:
    """The first of two ranks, of which only this one has trained the last batch."""

    async def on_all(self, method: str) -> list[LearnerProgress]:
        return [
            LearnerProgress(rollout=rollout, groups=(), report=None, version=3, staged=True, changed=None)
            for rollout in (4, 3)
        ]


async def test_ranks_of_which_only_some_have_trained_the_last_batch_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = list[Any]()
    monkeypatch.setattr(ray, "kill", killed.append)
    actors = [Handle(DifferentRanks()), Handle(None)]
    with pytest.raises(FatalError, match=r"ranks differ now: rollout 4, version 3; rollout 3, version 3$"):
        await RayLearner(CONFIG, RayRanks(actors), "run").progress()
    assert killed == actors


LIMIT = 100.0


class Replaced:
    """The actors of a learner that is replaced, on a clock that advances by half the limit when a rank is asked."""

    def __init__(self, advance: Callable[[], None], works: bool) -> None:
        self.now = 0.0
        self.asked = 0
        self.started = asyncio.Event()
        self._advance = advance
        self._works = works

    async def work_seconds(self) -> float:
        self.asked += 1
        self.now += LIMIT / 2
        self._advance()
        return float(self.asked) if self._works else 0.0

    async def start(self, *arguments: Any) -> None:
        await self.started.wait()

    async def claim_port(self, host: str) -> int:
        return 1

    async def lead(self, others: Any) -> None: ...

    async def on_all(self, method: str, *arguments: Any) -> list[Any]:
        return [await getattr(self, method)(*arguments)]

    async def load_state(self, folder: str) -> None: ...

    async def begin(self, *counts: Any) -> None: ...


@pytest.fixture
def ray_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(learner_ranks, "WORK_POLL_SECONDS", 0.0)


def replaced_learner(actor: Replaced, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> LearnerRanks:
    monkeypatch.setattr(learner_ranks, "time", SimpleNamespace(monotonic=lambda: actor.now))
    handle: Any = Handle(actor)
    return LearnerRanks(config, "run", lambda rank, name: handle, "127.0.0.1")


@pytest.mark.usefixtures("ray_kills_nothing")
async def test_a_learner_may_load_for_longer_than_the_limit_if_its_ranks_work(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Replaced(lambda: actor.started.set() if actor.now > 5 * LIMIT else None, works=True)
    await replaced_learner(actor, run_config(), monkeypatch).replace("model", None, LIMIT)
    assert actor.now > 5 * LIMIT


@pytest.mark.usefixtures("ray_kills_nothing")
async def test_a_learner_that_does_not_advance_is_given_up_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Replaced(lambda: None, works=False)
    with pytest.raises(TimeoutError):
        await replaced_learner(actor, run_config(), monkeypatch).replace("model", None, LIMIT)
    assert actor.now == LIMIT


@pytest.mark.usefixtures("ray_kills_nothing")
async def test_the_check_of_a_large_checkpoint_may_take_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, checked, on_reads = threading.Event(), threading.Event(), list[Callable[[int], None]]()

    def newest_of(self: CheckpointFolder, run: str, on_read: Callable[[int], None]) -> None:
        """Checks files until `checked` is set; each byte is read when a rank is asked."""
        on_reads.append(on_read)
        begun.set()
        checked.wait()

    def read_a_byte() -> None:
        begun.wait()
        on_reads[0](1)
        if actor.now > 5 * LIMIT:
            checked.set()
            actor.started.set()

    monkeypatch.setattr(CheckpointFolder, "newest_of", newest_of)
    actor = Replaced(read_a_byte, works=False)
    await replaced_learner(actor, run_config(save="anywhere"), monkeypatch).replace("model", None, LIMIT)
    assert actor.now > 5 * LIMIT
