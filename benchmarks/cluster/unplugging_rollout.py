"""A rollout function that unplugs a node at a chosen moment of the run: from inside, so that the moment is exact.

The file `cut.json` in the folder of the runs names the cluster, the node, the moment and the batch. After the link is
cut, the time is in the file `unplugged` beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.weights.channel import Channel
from miles_async.atomic_files import write_atomically
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.rollout.fully_async_rollout import generate_rollout_fully_async

from .nodes import LocalCluster

GENERATING = "generating"
METHODS: dict[str, tuple[type[Any], str]] = {
    "staging": (Channel, "stage"),
    "writing": (Channel, "send"),
    "announcing": (SGLangFleet, "commit"),
}
"""The method whose next call unplugs the node, by the moment."""
MOMENTS = (GENERATING, *METHODS)


def unplug(folder: Path, cut: dict[str, Any]) -> None:
    LocalCluster(cut["cluster"]).unplug(cut["node"])
    write_atomically(folder / "unplugged", str(time.time()).encode())


def unplug_at_next_call(folder: Path, cut: dict[str, Any]) -> None:
    owner, name = METHODS[cut["moment"]]
    method: Callable[..., Awaitable[Any]] = vars(owner)[name]

    @wraps(method)
    async def replacement(*arguments: Any) -> Any:
        setattr(owner, name, method)
        unplug(folder, cut)
        return await method(*arguments)

    setattr(owner, name, replacement)


async def generate_rollout(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    folder = Path(args.run_dir)
    cut = json.loads((folder / "cut.json").read_text())
    if rollout_id == cut["batch"] and not (folder / "unplugged").exists():
        if cut["moment"] == GENERATING:
            unplug(folder, cut)
        else:
            unplug_at_next_call(folder, cut)
    return await generate_rollout_fully_async(args, rollout_id, data_source, evaluation)
