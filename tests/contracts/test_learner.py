"""The contract of `ports.Learner`, for the real learner over ranks that compute nothing, and for the simulator's.

`tests/stack/test_contracts_of_learners.py` checks it on Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from miles_async.adapters.ray.learner import RayLearner, RayRanks
from miles_async.ports import Learner
from miles_async.types import Group, LearnerProgress, StepReport
from tests.configuration import run_config
from tests.sim.lost_workers import LastingTrainer
from tests.sim.virtual_time import VirtualClock
from tests.stored_batches import finished_group
from tests.unit.workers.test_rollout_workers import Method

Saved = Callable[[int], dict[str, Any]]


class IdleRank:
    """A rank of the learner that answers as `workers.learner.LearnerRank` does, and trains nothing."""

    def __init__(self) -> None:
        self._last = LearnerProgress(rollout=-1, groups=(), report=None, version=0, staged=False, changed=None)
        self._folder: Path | None = None
        self._sequences: list[int] = []
        self.shares_prefixes, self.finish_state = Method(lambda: False), Method(lambda written: None)
        self.receive_batch = Method(self._receive)
        self.on_all = Method(lambda method, *arguments: [self._calls[method](*arguments)])
        self._calls: dict[str, Callable[..., Any]] = {
            "train": self._train,
            "progress": lambda: self._last,
            "copy_state": self._copy,
            "write_state": list,
            "work_seconds": lambda: 1.5,
        }

    def _receive(self, rollout: int, sequences: list[int], batch: Any) -> None:
        self._sequences = sequences

    def _train(self, rollout: int, adapter: str) -> StepReport:
        report = StepReport(seconds=0.5, tokens=0, finite=True, metrics={"memory_gib": 0.0})
        self._last = LearnerProgress(
            rollout=rollout, groups=self._sequences, report=report, version=0, staged=False, changed=""
        )
        return report

    def _copy(self, folder: str | None, export: str | None) -> None:
        assert folder is not None


@pytest.fixture(params=["real", "simulated"])
def learner(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[], Learner], Saved]:
    """Creates a learner inside the event loop, and reads the progress in the checkpoint of a rollout."""
    if request.param == "real":
        # Without a Ray cluster, its object store returns what is put into it.
        monkeypatch.setattr(ray, "put", lambda value: value)
        config = run_config(save=str(tmp_path), n_samples_per_prompt=2, rollout_batch_size=2)

        def read(rollout: int) -> dict[str, Any]:
            [path] = tmp_path.rglob(f"*{rollout}/**/progress.json")
            return dict(json.loads(path.read_text()))

        return lambda: RayLearner(config, RayRanks([IdleRank()]), "run"), read
    trainers: list[LastingTrainer] = []

    def create() -> Learner:
        trainers.append(LastingTrainer(VirtualClock(), 0.0, lambda rollout: True, keeps_batches=True, save_seconds=0.0))
        return trainers[-1]

    return create, lambda rollout: dict(trainers[-1].saved[rollout])


def batch() -> list[Group]:
    return [finished_group(number) for number in (3, 4)]


async def test_a_new_learner_has_trained_nothing(learner: tuple[Callable[[], Learner], Saved]) -> None:
    progress = await learner[0]().progress()
    assert (progress.rollout, list(progress.groups), progress.report, progress.version) == (-1, [], None, 0)


async def test_a_report_counts_all_tokens_of_the_batch(learner: tuple[Callable[[], Learner], Saved]) -> None:
    report = await learner[0]().train(0, batch())
    assert report.tokens == sum(len(sample.tokens) for group in batch() for sample in group)
    assert report.finite
    assert report.seconds >= 0


@pytest.mark.parametrize("packed", [(3, 4), (4, 5)])
async def test_a_batch_is_trained_whether_it_or_another_one_was_packed_before(
    learner: tuple[Callable[[], Learner], Saved], packed: tuple[int, int]
) -> None:
    trained = learner[0]()
    await trained.train(0, [finished_group(number) for number in (1, 2)])
    trained.pack([finished_group(number) for number in packed])
    await trained.train(1, batch())
    assert list((await trained.progress()).groups) == [3, 4]


async def test_progress_names_the_last_batch_and_its_groups(learner: tuple[Callable[[], Learner], Saved]) -> None:
    trained = learner[0]()
    report = await trained.train(0, batch())
    progress = await trained.progress()
    assert (progress.rollout, list(progress.groups), progress.changed) == (0, [3, 4], "")
    assert progress.report is not None
    assert (progress.report.seconds, progress.report.finite) == (report.seconds, True)


async def test_the_work_of_a_learner_never_decreases(learner: tuple[Callable[[], Learner], Saved]) -> None:
    trained = learner[0]()
    before = await trained.work_seconds()
    await trained.train(0, batch())
    assert 0 <= before <= await trained.work_seconds()


async def test_a_checkpoint_has_the_progress_that_was_written_with_it(
    learner: tuple[Callable[[], Learner], Saved],
) -> None:
    create, saved = learner
    trained = create()
    for rollout in range(2):
        await trained.train(rollout, batch())
        await trained.copy_state(rollout)
        progress = {"rollout": rollout, "owed": [group.prompt_dict() for group in batch()]}
        await trained.write_state(rollout, progress)
        assert progress.items() <= saved(rollout).items()
