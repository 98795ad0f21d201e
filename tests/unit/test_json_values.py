"""Values that JSON cannot express, in metadata, labels and rewards, become plain where they enter the run."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.adapters.storage.rollout_file import load_groups, save_groups
from miles_async.json_values import json_value
from miles_async.rewards.rewarder import Rewarder
from miles_async.sample_schema import accept_values
from miles_async.types import DropReason, Group, Sample
from tests.sim.world import Trace

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ODD: dict[Any, Any] = {
    3: "a number as key",
    (1, 2): "a pair as key",
    "big": 2**70,
    "when": WHEN,
    "scores": np.array([1.5, 2.5]),
    "object": object(),
    "nested": [{None: {np.int64(4)}}],
}


@pytest.mark.parametrize(
    "value, expected",
    [
        (2**63, 2**63),
        (2**70, str(2**70)),
        (True, True),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([WHEN], dtype=object), [WHEN.isoformat()]),
        (date(2026, 1, 2), "2026-01-02"),
        (Decimal("1.5"), "1.5"),
        ({1: (2, None)}, {"1": [2, None]}),
        ("half \ud83d", "half ?"),
        ("四", "四"),
    ],
)
def test_each_value_is_converted_to_one_that_json_can_express(value: Any, expected: Any) -> None:
    assert json_value(value) == expected
    assert type(json_value(value)) is type(expected)


def odd_group() -> Group:
    sample = Sample(index=0, tokens=[1, 2], response_length=1, rollout_log_probs=[-0.5], metadata=dict(ODD))
    sample.label, sample.reward, sample.reward_key = WHEN, {"acc": 1.0, "detail": np.float32(2.0)}, "acc"
    sample.response = "half \ud83d"
    accept_values(sample)
    return Group([sample], feed_index="sample_0_0")


def test_a_dead_letter_with_odd_metadata_is_written(tmp_path: Path) -> None:
    DeadLetterFile(tmp_path / "dead.jsonl", Trace()).dead_letter(odd_group(), DropReason.FAILED, "it failed")
    [line] = (tmp_path / "dead.jsonl").read_text().splitlines()
    metadata = json.loads(line)["samples"][0]["metadata"]
    assert metadata["3"] == "a number as key"
    assert metadata["big"] == str(2**70)
    assert metadata["when"] == WHEN.isoformat()


def test_a_checkpoint_and_a_rollout_file_with_odd_metadata_are_written(tmp_path: Path) -> None:
    saved = json.loads(json.dumps(odd_group()[0].to_dict()))
    assert Sample.from_dict(saved).reward == {"acc": 1.0, "detail": 2.0}
    save_groups(tmp_path / "0.safetensors", 0, [odd_group()])
    _, [group] = load_groups(tmp_path / "0.safetensors")
    assert group[0].metadata["scores"] == [1.5, 2.5]


def test_numpy_numbers_in_a_dictionary_reward_become_plain() -> None:
    def reward(args: Any, sample: Sample) -> Any:
        return {"acc": np.float32(0.5), "steps": np.int64(3)}

    rewarder = Rewarder(reward, args=None, name="my.reward", timeout_seconds=5.0, reward_key="acc")
    group = Group([Sample(index=0)])
    asyncio.run(rewarder.score(group))
    assert group[0].reward == {"acc": 0.5, "steps": 3}
    assert isinstance(group[0].reward, dict)
    assert [type(entry) for entry in group[0].reward.values()] == [float, int]
