"""Where warm-started checkpoints lie. The driver looks here too, so nothing heavy is imported."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from miles_async.config.schema import RunConfig

Problems = Sequence[tuple[str, str]]
"""Prompts and their answers."""

NOTE = "warm_start.json"
"""Beside the weights: how they came about. A checkpoint is moved into the cache whole, with its note."""

_RECIPE = 4
"""Raise when a change in how models are taught makes other models from the same settings."""


@dataclass(frozen=True, slots=True)
class WarmStarted:
    path: str
    """Folder of the Hugging Face checkpoint."""
    cached: bool
    """It was made before; nothing was trained now."""
    accuracy: float | None
    """Greedy accuracy on the check problems when it was made; None where nothing was taught."""
    steps: int
    seconds: float
    """Spent now: next to nothing when cached."""


def cached_checkpoint(config: RunConfig, problems: Problems, check: Problems) -> Path:
    """The cache's folder for what these settings, versions and problems make."""
    what = {
        "recipe": _RECIPE,
        "model": config.model.model_dump(mode="json"),
        # What the template makes of the problems is in them.
        "warm_start": config.warm_start.model_dump(mode="json", exclude={"cache_dir", "warm_start_template"}),
        "learner": config.learner.model_dump(include={"adam_beta1", "adam_beta2", "weight_decay", "clip_grad", "seed"}),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "mbridge", "transformers")},
        "problems": [list(problems), list(check)],
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]
    return Path(config.warm_start.cache_dir).expanduser() / key


def find_warm_start(config: RunConfig, problems: Problems, check: Problems) -> WarmStarted | None:
    """The checkpoint to start from, where nothing has to be taught for it any more."""
    started = time.monotonic()
    if config.model.hf_checkpoint is not None and config.warm_start.warm_start_max_steps == 0:
        return WarmStarted(config.model.hf_checkpoint, True, None, 0, 0.0)
    place = cached_checkpoint(config, problems, check)
    if not place.exists():
        return None
    made = json.loads((place / NOTE).read_text())
    return WarmStarted(str(place), True, made["accuracy"], made["steps"], time.monotonic() - started)
