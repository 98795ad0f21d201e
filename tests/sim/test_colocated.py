"""Engines and learner share devices: each releases its memory before the other takes it."""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.lineage import Lineage
from miles_async.types import Group, StepReport
from tests.configuration import run_config
from tests.sim.engines import Engines
from tests.sim.world import Trainer, World


class Sharing:
    """Records whether learner or engines have their memory on the devices. The learner has it at the start."""

    def __init__(self) -> None:
        self.learner, self.engines = True, False
        self.handed_over = 0


def test_engines_and_learner_use_the_devices_alternately() -> None:
    sharing = Sharing()

    class SharedEngines(Engines):
        async def generate(self, group: Group) -> None:
            assert sharing.engines
            assert not sharing.learner
            await super().generate(group)

        async def commit(self, engine: str, version: int) -> None:
            assert sharing.engines
            assert not sharing.learner
            await super().commit(engine, version)

        async def offload(self) -> None:
            assert self.in_flight == 0
            sharing.engines = False

        async def onload(self) -> None:
            assert (sharing.learner, sharing.engines) == (False, False), "SGLang would end"
            sharing.engines = True

        async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None:
            assert sharing.learner
            await super().stage(version, adapter, lineage)

    class SharedTrainer(Trainer):
        async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
            assert sharing.learner
            assert not sharing.engines
            sharing.handed_over += 1
            return await super().train(rollout_id, groups)

        async def offload(self) -> None:
            sharing.learner = False

        async def onload(self) -> None:
            assert not sharing.engines
            sharing.learner = True

    settings = run_config(rollout_batch_size=4, num_rollout=5, n_samples_per_prompt=2, colocate=True)
    world = World(
        config=settings,
        schedule=Schedule.SYNCHRONOUS,
        engine_kind=SharedEngines,
        trainer_kind=SharedTrainer,
        problems=3,
    ).run()
    assert sharing.handed_over == 5
    assert world.audit.violations == []
