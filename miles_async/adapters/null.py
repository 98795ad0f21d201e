"""Null objects for the parts of the stack that a run does not start.

A run with `--debug-rollout-only` has no learner: a training step takes no time and changes no weights, so all weight
versions are the same weights. A run with `--debug-train-only`, and supervised training without evaluation, has no
engines: publishing weights has no effect, and generating is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_async.errors import FatalError
from miles_async.scheduling.lineage import Lineage
from miles_async.types import EngineLoad, Group, LearnerProgress, SendOutcome, StepReport


class NullLearner:
    """Implements the `Learner` and `WeightChannel` ports without a learner."""

    def pack(self, groups: Sequence[Group]) -> None: ...

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        return StepReport(seconds=0.0, tokens=0, finite=True)

    async def progress(self) -> LearnerProgress:
        return LearnerProgress(rollout=None, groups=(), report=None, version=0, staged=True, changed=None)

    async def work_seconds(self) -> float:
        return 0.0

    async def copy_state(self, rollout_id: int) -> None: ...

    async def write_state(self, rollout_id: int, progress: Mapping[str, Any]) -> None: ...

    async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None: ...

    async def send(self, version: int, engine: str) -> SendOutcome:
        return SendOutcome(engine=engine, seconds=0.0, bytes=0)

    async def connect(self, engines: Sequence[str]) -> None: ...

    async def compare(self, engine: str) -> None: ...

    async def drop(self, engine: str) -> None: ...

    async def fall_back(self, engine: str) -> str | None:
        return None

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


class NullEngines:
    """Implements the `Fleet`, `Generator`, `Requests` and `Rewarder` ports without engines.

    `routed` names one engine, because publishing a version needs at least one engine that accepts it.
    """

    in_flight = in_line = 0
    busy_seconds = 0.0

    @property
    def requests(self) -> NullEngines:
        return self

    async def generate(self, group: Group) -> None:
        raise FatalError(f"group {group.feed_index} was sent to an engine, but this run has no engines")

    async def score(self, group: Group) -> None:
        raise FatalError(f"group {group.feed_index} was sent to its reward, but this run only trains")

    async def abort(self, group: Group | None = None) -> None: ...

    def routed(self) -> Sequence[str]:
        return ("no-engine",)

    def serving(self) -> bool:
        return True

    def members(self) -> Sequence[str]:
        return ()

    async def loads(self) -> Sequence[EngineLoad]:
        return ()

    async def pause(self, mode: str) -> None: ...

    async def commit(self, engine: str, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def fence(self, engine: str, reason: str) -> None: ...

    async def admit(self, engine: str) -> None: ...

    async def dismiss(self, engine: str) -> None: ...

    async def check(self, engine: str) -> None: ...

    async def restart(self, engine: str) -> None: ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def check_router(self) -> None: ...
