"""Sums by reasoning-gym. Its import takes a second, so test files that name this module share a process."""

from __future__ import annotations

from typing import Any

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.source import BufferedSource
from tests.configuration import run_config

CHAIN_SUM = {"reasoning_gym_task": "chain_sum"}


def open_gym(**data: Any) -> BufferedSource:
    """Opens a source of short sums; `data` overrides its settings."""
    settings = CHAIN_SUM | {
        "reasoning_gym_settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        "reasoning_gym_size": 2000,
        "eval_size": 64,
        "prompt_template": "{expression}",
    }
    return open_data(run_config(**settings | data, n_samples_per_prompt=1))
