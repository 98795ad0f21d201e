"""The training settings with which benchmarks that have no configuration file measured their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINING: Mapping[str, Any] = {
    "rollout_shuffle": True,
    "rollout_skip_special_tokens": True,
    "loss_aggregation": "token_mean",
    "off_policy_correction": "tis",
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "adam_beta2": 0.98,
    "max_nonfinite_batches": 3,
    "moe_router_dtype": "fp32",
}
