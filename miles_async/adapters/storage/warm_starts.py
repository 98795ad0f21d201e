"""The cache of warm-started checkpoints. The driver searches the cache too, so this module imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from miles_async.config.schema import RunConfig
from miles_async.types import Prompt


class Example(NamedTuple):
    """A supervised example of a warm start."""

    prompt: Prompt
    answer: str
    tools: list[dict[str, Any]] | None = None
    """The tools that the chat template gets if the prompt is a list of messages."""


Problems = Sequence[Example]

NOTE = "warm_start.json"
"""File next to the weights with the accuracy and the number of steps of the warm start."""

_RECIPE = 4
"""Part of the cache key. Increase it if a code change makes the same settings produce a different model."""


@dataclass(frozen=True, slots=True)
class WarmStarted:
    """The checkpoint that a run starts from."""

    path: str
    """Folder of the Hugging Face checkpoint."""
    cached: bool
    """True if the checkpoint existed already and nothing was trained."""
    accuracy: float | None
    """Greedy accuracy on the check problems after the warm start, 0 to 1; None without a warm start."""
    steps: int
    """Optimizer steps of the warm start."""
    seconds: float
    """Seconds that this run spent; close to 0 if the checkpoint was cached."""


def cached_checkpoint(config: RunConfig, problems: Problems, check: Problems) -> Path:
    """Return the cache folder for these settings, library versions and problems, whether or not it exists."""
    key_values = {
        "recipe": _RECIPE,
        "model": config.model.model_dump(mode="json"),
        # They decide how prompts become tokens.
        "chat_template": [config.data.apply_chat_template, config.data.apply_chat_template_kwargs],
        # The problems already contain the text that template and function produce.
        "warm_start": config.warm_start.model_dump(
            mode="json", exclude={"cache_dir", "warm_start_template", "warm_start_examples_path"}
        ),
        "learner": config.learner.model_dump(include={"adam_beta1", "adam_beta2", "weight_decay", "clip_grad", "seed"}),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers")},
        "problems": [list(problems), list(check)],
    }
    key = hashlib.sha256(json.dumps(key_values, sort_keys=True).encode()).hexdigest()[:20]
    return Path(config.warm_start.cache_dir).expanduser() / key


def find_warm_start(config: RunConfig, problems: Problems, check: Problems) -> WarmStarted | None:
    """Return the checkpoint to start from if it needs no training; None if a warm start has to be run."""
    started = time.monotonic()
    if config.model.hf_checkpoint is not None and config.warm_start.warm_start_max_steps == 0:
        return WarmStarted(config.model.hf_checkpoint, True, None, 0, 0.0)
    path = cached_checkpoint(config, problems, check)
    if not path.exists():
        return None
    note = json.loads((path / NOTE).read_text())
    return WarmStarted(str(path), True, note["accuracy"], note["steps"], time.monotonic() - started)
