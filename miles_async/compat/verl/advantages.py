"""Advantages of verl's estimators with a KL penalty on rewards, as a function for `custom_advantage_function_path`.

Source: `apply_kl_penalty` of `verl/trainer/ppo/ray_trainer.py`, and `verl/trainer/ppo/core_algos.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from miles_async.losses.advantages.estimator import ADVANTAGES
from miles_async.losses.advantages.statistics import whiten


def after_penalty(args: Any, rollout_data: dict[str, Any]) -> None:
    """Compare the rewards of each group less the KL penalty of each whole response.

    `rewards_normalization` must be off, so that `rollout_data["rewards"]` are the rewards. The samples of a group may
    be on several data-parallel ranks, which all must call this function. `args.kl_penalty` is the estimator of the
    divergence (`losses/policy.py`). If a reward or a penalty is not finite, advantages are NaN, so that the learner
    skips the step.
    """
    # The driver loads this module, too, when it checks the configuration.
    import torch
    import torch.distributed as dist

    from miles_async.adapters.megatron.model.cpu import on_cpu
    from miles_async.adapters.megatron.model.process_groups import gather_over_data_parallel
    from miles_async.losses.policy import kl_penalty

    # Without a penalty there may be no reference. Both are 0 where a token is not trained.
    logprobs = rollout_data["log_probs"]
    both = zip(logprobs, rollout_data["ref_log_probs"] or logprobs, strict=True)
    divergences = [kl_penalty(old, reference, args.kl_penalty) for old, reference in both]
    penalized = zip(rollout_data["rewards"], divergences, strict=True)
    columns = (
        [reward - args.kl_coef * float(one.sum()) for reward, one in penalized],
        rollout_data["groups"],
        [int(mask.sum()) for mask in rollout_data["loss_masks"]],
        [dist.get_rank()] * len(divergences),
    )
    device = "cpu" if on_cpu() else "cuda"
    scores, groups, tokens, ranks = (
        gather_over_data_parallel(torch.tensor(column, dtype=torch.float64, device=device)).tolist()
        for column in columns
    )
    advantages = zip(_compared(args, scores, groups, tokens), ranks, strict=True)
    own = [advantage for advantage, rank in advantages if rank == dist.get_rank()]
    rollout_data["advantages"] = [torch.full_like(one, value) for one, value in zip(divergences, own, strict=True)]


def _compared(args: Any, scores: Sequence[float], groups: Sequence[float], tokens: Sequence[float]) -> Sequence[float]:
    """The advantage of each sample of the batch from its score, the number of its group and its trained tokens."""
    estimator = ADVANTAGES.find(args.advantage_estimator)
    members: dict[float, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    advantages = [0.0] * len(scores)
    for positions in members.values():
        own = [scores[position] for position in positions]
        for position, value in zip(positions, estimator.advantages(own, [1.0] * len(own), args), strict=True):
            advantages[position] = value
    return whiten(advantages, tokens) if estimator.normalizes_batch else advantages
