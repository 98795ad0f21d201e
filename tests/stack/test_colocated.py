"""Engines and learner that share devices on the real stack. Without CUDA neither has device memory to release."""

from __future__ import annotations

import pytest

from miles_async.events import EngineChanged, StepEnded
from tests.stack.conftest import Stack

pytestmark = pytest.mark.stack


def test_colocated_engines_resume_with_the_right_weights_and_cache(stack: Stack) -> None:
    run = stack.play("train.py", "--colocate", "--num-rollout", "3", "--rollout-batch-size", "8", "--eval-size", "0")
    assert len(run.of(StepEnded)) == 3
    assert run.violations == []
    assert run.of(EngineChanged) == run.of(EngineChanged)[:1], "no engine was lost on the way"
    assert max(event.metrics["logprob_gap_max"] for event in run.of(StepEnded)) < 1e-4
