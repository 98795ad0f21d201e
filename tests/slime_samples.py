"""Samples as slime saves them."""

from __future__ import annotations

from typing import Any


def slime_sample(index: int, **fields: Any) -> dict[str, Any]:
    """A sample as slime's `Sample.to_dict` returns it."""
    return {
        "group_index": index // 2,
        "index": index,
        "rollout_id": None,
        "prompt": "1 + 1 =",
        "tokens": [5, 6, 7, 8],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": "2!",
        "response_length": 2,
        "label": "2",
        "reward": 1.0,
        "loss_mask": [1, 1],
        "weight_versions": ["3", "4"],
        "rollout_log_probs": [-0.1, -0.2],
        "rollout_top_p_token_ids": None,
        "rollout_routed_experts": [[[0], [0]]] * 3,
        "remove_sample": False,
        "status": "completed",
        "metadata": {"level": 3},
        "session_id": "a",
        "spec_info": {"spec_verify_ct": 0},
        "prefix_cache_info": {"cached_tokens": 0},
        "round_number": 7,
        **fields,
    }
