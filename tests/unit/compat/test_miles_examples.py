"""Functions of Miles with one argument `input` run unchanged.

`MILES_CHECKOUT=/path/to/miles pytest tests/unit/compat/test_miles_examples.py`, tried with commit 31f1ca96.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_async import cpu_compat
from miles_async.columns.column import NO_LIMITS
from miles_async.config.user_functions import load_function
from miles_async.rollout.contract import call_rollout_function
from miles_async.sample_schema import accept_values, check_columns
from miles_async.types import Sample, SampleStatus
from tests.sim.test_building_blocks import Run
from tests.sim.test_functions_of_miles import Source
from tests.unit.compat.slime_names import checkout, names_of_slime


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The checkout, whose modules import torchvision."""
    found = checkout("miles")
    cpu_compat.install()
    monkeypatch.syspath_prepend(str(found))
    with names_of_slime():
        yield found


async def test_the_rollout_class_of_an_example_adds_the_metrics_of_its_agents(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Agents(Source):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            groups = super().get_samples(num_samples)
            for group in groups:
                for sample in group:
                    sample.metadata["agent_metrics"] = {"turns": 3, "total_time": 2.0}
            return groups

    monkeypatch.syspath_prepend(str(folder / "examples" / "swe-agent-harbor-docker"))
    function = load_function("generate.RolloutFn", setting="rollout_function_path")
    source: Any = Agents()
    args, metrics = Run().args(rollout_batch_size=2), dict[str, Any]()
    groups: Any = await call_rollout_function(function, args, 0, source, evaluation=False, metrics=metrics)
    assert [sample.reward for group in groups for sample in group] == [1.0] * 4
    assert (metrics["agent/turns_mean"], metrics["agent/total_time_max"]) == (3.0, 2.0)


async def test_the_generate_function_of_the_guide_posts_to_the_router(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Callable[[list[str]], Any]
) -> None:
    # Under its own name, a function of this project takes its place.
    shutil.copy(folder / "miles/rollout/generate_hub/single_turn.py", tmp_path / "from_the_guide.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    function = load_function("from_the_guide.generate", setting="custom_generate_function_path")
    sample = Sample(index=0, prompt="6 x 7?")
    sample.use_lists()
    finished = await function(await arguments(["It is 42."]), sample, {"max_new_tokens": 64})
    accept_values(finished, keeps_objects=True)
    check_columns(finished, NO_LIMITS, newest_version=7)
    assert (finished.response, finished.status) == ("It is 42.", SampleStatus.COMPLETED)
    assert len(finished.rollout_log_probs) == finished.response_length == len("It is 42.")
