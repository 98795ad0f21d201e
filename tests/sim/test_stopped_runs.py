"""A run that is stopped saves the steps it has taken, in whichever state it is stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import problems
from miles_async.config.schema import RunConfig
from miles_async.events import TrainerPhaseChanged
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.lineage import Lineage
from miles_async.types import Group, StepReport
from tests.configuration import run_config
from tests.sim.engines import Engines
from tests.sim.world import Trainer, World

ROLLOUTS, BATCH, STOPPED = 8, 4, 3
"""A run is stopped while it collects the batch of rollout STOPPED, so rollout STOPPED - 1 is the last one trained."""


@dataclass(kw_only=True)
class StoppedWorld(World):
    """Stops while it collects the batch of rollout `stopped`."""

    stopped: int = STOPPED

    def _on_rollout(self, rollout_id: int) -> None:
        if rollout_id == self.stopped:
            self.service.stop()


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": BATCH, "num_rollout": ROLLOUTS, "n_samples_per_prompt": 2}
    return run_config(**sizes, max_weight_staleness=3, **settings)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_stopped_run_saves_its_last_completed_step(schedule: Schedule) -> None:
    world = StoppedWorld(config=config(save="anywhere"), schedule=schedule).run()
    assert len(world.trainer.batches) == STOPPED
    assert list(world.trainer.saved) == [STOPPED - 1]
    assert world.audit.violations == []


def test_a_stopped_run_exports_its_last_completed_step() -> None:
    assert list(StoppedWorld(config=config(save_hf="anywhere")).run().trainer.saved) == [STOPPED - 1]


def test_a_stopped_run_saves_a_step_once() -> None:
    world = StoppedWorld(config=config(save="anywhere", save_interval=1)).run()
    assert list(world.trainer.saved) == list(range(STOPPED))
    phases = [event.to for event in world.trace.of(TrainerPhaseChanged)]
    assert phases.count("save") == STOPPED + 1, "one per checkpoint, and one that waits for the last"


def test_a_stopped_run_without_a_new_step_saves_nothing() -> None:
    assert StoppedWorld(config=config(save="anywhere"), stopped=0).run().trainer.saved == {}
    first = StoppedWorld(config=config(save="anywhere")).run()
    resume_from = first.trainer.saved[STOPPED - 1]
    assert StoppedWorld(config=config(save="anywhere"), resume_from=resume_from).run().trainer.saved == {}


def test_a_stopped_run_without_a_folder_saves_nothing() -> None:
    assert StoppedWorld(config=config()).run().trainer.saved == {}


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_run_that_resumes_a_stopped_run_trains_every_prompt_once(schedule: Schedule) -> None:
    prompts = ROLLOUTS * BATCH
    stopped = StoppedWorld(config=config(save="anywhere"), schedule=schedule, prompts=prompts).run()
    resume_from = stopped.trainer.saved[STOPPED - 1]
    resumed = World(config=config(), schedule=schedule, prompts=prompts, resume_from=resume_from).run()
    trained = Counter(chain.from_iterable(stopped.trainer.batches + resumed.trainer.batches))
    assert trained == Counter(f"sample_0_{i}" for i in range(prompts))


class Devices:
    """Records whether learner or engines have their memory on the shared devices. Both have it at the start."""

    def __init__(self) -> None:
        self.learner = self.engines = True


@pytest.mark.parametrize("learner", [{}, {"save": "anywhere"}])
@pytest.mark.parametrize("update_weights_interval", [1, 2])
def test_a_colocated_run_that_is_stopped_gives_the_devices_to_the_learner_before_it_reads_the_weights(
    learner: dict[str, str], update_weights_interval: int
) -> None:
    devices = Devices()

    class SharedEngines(Engines):
        async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None:
            assert devices.learner, "the weights are read from the devices"
            await super().stage(version, adapter, lineage)

        async def generate(self, group: Group) -> None:
            assert devices.engines
            await super().generate(group)

        async def offload(self) -> None:
            assert self.in_flight == 0
            devices.engines = False

        async def onload(self) -> None:
            assert not devices.learner
            devices.engines = True

    class SharedTrainer(Trainer):
        async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
            assert devices.learner
            return await super().train(rollout_id, groups)

        async def copy_state(self, rollout_id: int) -> None:
            assert devices.learner, "the state is read from the devices"
            await super().copy_state(rollout_id)

        async def offload(self) -> None:
            devices.learner = False

        async def onload(self) -> None:
            assert not devices.engines
            devices.learner = True

    world = StoppedWorld(
        config=config(colocate=True, update_weights_interval=update_weights_interval, **learner),
        schedule=Schedule.SYNCHRONOUS,
        engine_kind=SharedEngines,
        trainer_kind=SharedTrainer,
    ).run()
    assert world.audit.violations == []
    assert list(world.trainer.saved) == ([STOPPED - 1] if learner else [])


def test_an_export_after_any_rollout_may_not_overwrite_the_model_to_train(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "config.json").write_text("{}")
    (tmp_path / "five").symlink_to(tmp_path / "5")
    for folder in ("5", "five"):
        settings = config(save_hf=f"{tmp_path}/{{rollout_id}}", hf_checkpoint=str(tmp_path / folder))
        assert any("would overwrite hf_checkpoint" in sentence for sentence in problems(settings, "train_async.py"))
