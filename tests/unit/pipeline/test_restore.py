"""What a rollout worker that continues a run does with a learner that is ahead of the store."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.errors import FatalError
from miles_async.pipeline.restore import Restorer
from miles_async.pipeline.run_state import RunState
from miles_async.scheduling.lineage import Lineage
from miles_async.types import LearnerProgress
from tests.sim.virtual_time import VirtualClock

pytestmark = pytest.mark.virtual_time


async def test_a_version_whose_adapter_the_store_does_not_know_ends_the_run_with_a_sentence() -> None:
    """The disk was full when the version was announced, and the rollout worker was lost before it had room again."""
    unused: Any = None
    run_state = RunState(VirtualClock(), unused)
    run_state.lineages = {"code": Lineage(versions=[0, 2]), "math": Lineage(versions=[1])}
    run_state.announced_version = 2
    restorer = Restorer(run_state, unused, unused, unused, unused, trains_off_lineage=False)
    learner = LearnerProgress(rollout=4, groups=(), report=None, version=3, staged=True, changed=None)
    with pytest.raises(FatalError, match="has staged version 3, but the store ends before it"):
        restorer._next_versions(learner, 4, [])
