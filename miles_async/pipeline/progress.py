"""What a checkpoint remembers of the pipeline, beside the weights: how far it came, and which prompts it still owes.

A prompt that was fed but not trained when the checkpoint was written is owed: a resumed run generates it afresh, so no
prompt is lost and none is trained twice. Weight versions start again at 0: they are the engines' business, and a
resumed run has new engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.pipeline.run_state import RunState
from miles_async.ports import DataSource
from miles_async.scheduling.ledger import GroupState
from miles_async.types import Group


def progress_of(rollout_id: int, run_state: RunState, data: DataSource) -> dict[str, Any]:
    """Ready for JSON, as far as the samples' metadata is."""
    with run_state.lending:
        owed = [
            group for group in run_state.live_groups if run_state.state(group) is not GroupState.TRAINED
        ] + run_state.lent_groups
        return {"rollout": rollout_id, "data": data.state_dict(), "owed": [group.to_dict() for group in owed]}


def resume(progress: Mapping[str, Any], data: DataSource) -> int:
    """Set the data source to where it stood, owed prompts first in line; returns the rollout to begin with."""
    data.load_state_dict(progress["data"])
    data.add_samples([_afresh(each) for each in progress["owed"]])
    return int(progress["rollout"]) + 1


def _afresh(each: Mapping[str, Any]) -> Group:
    group = Group.from_dict(each)
    group.reset()
    return group
