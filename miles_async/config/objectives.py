"""The objective of the policy update, and the clip range and the mean over tokens that its paper uses with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miles_async.config.schema import Algorithm
from miles_async.config.schema.algorithm import LossAggregation, PolicyObjective


@dataclass(frozen=True, slots=True)
class Published:
    """What the authors of an objective used, for settings that are unset."""

    paper: str
    """Number on arXiv and section."""
    aggregation: LossAggregation | None
    """None for token_mean where the paper does not insist on one."""
    clip: tuple[float, float] | None
    """Lower and upper clip range; None if the objective does not clip ratios."""


PUBLISHED: Mapping[PolicyObjective, Published] = {
    "ppo": Published("DAPO, arXiv 2503.14476, section 3.3", "token_mean", (0.2, 0.2)),
    "gspo": Published("arXiv 2507.18071, equation 5 and section 5.1", "sequence_mean", (3e-4, 4e-4)),
    # No lower bound: a ratio is never below 0. The paper tunes the upper one and does not name it.
    "cispo": Published("arXiv 2506.13585, section 3.1", "token_mean", (1.0, 0.2)),
    "gmpo": Published("arXiv 2507.20673, equation 4 and section 4", "sequence_mean", (0.4, 0.4)),
    "sapo": Published("arXiv 2511.20347, section 3", "sequence_mean", None),
    "dppo": Published("arXiv 2602.04879", None, None),
    "m2po": Published("arXiv 2510.01161", None, None),
}
FAR = 10
"""A clip range that is this many times the paper's is noted. DAPO's clip-higher is 1.4 times PPO's."""


def policy_objective(algorithm: Algorithm) -> PolicyObjective:
    """The objective of the policy update: the setting, else the one that the advantage estimator implies."""
    if algorithm.policy_objective is not None:
        return algorithm.policy_objective
    match algorithm.advantage_estimator:
        case "gspo" | "cispo" as objective:
            return objective
        case _:
            return "ppo"


def compares_with_sampling_policy(algorithm: Algorithm) -> bool:
    """Whether the objective's ratio is to the policy that sampled, so that a correction would count it twice."""
    return policy_objective(algorithm) in ("dppo", "m2po")


def loss_aggregation(algorithm: Algorithm) -> LossAggregation:
    """How token losses are averaged: the setting, else as in the paper of the objective."""
    return algorithm.loss_aggregation or PUBLISHED[policy_objective(algorithm)].aggregation or "token_mean"


def clip_range(algorithm: Algorithm) -> tuple[float, float]:
    """Lower and upper clip range: the settings, else those of the paper. 0 for objectives that do not clip ratios."""
    low, high = PUBLISHED[policy_objective(algorithm)].clip or (0.0, 0.0)
    if algorithm.eps_clip is not None:
        low = high = algorithm.eps_clip
    return low, high if algorithm.eps_clip_high is None else algorithm.eps_clip_high


def clips_ratios(algorithm: Algorithm) -> bool:
    """Whether the objective uses the clip range."""
    return PUBLISHED[policy_objective(algorithm)].clip is not None


def described(algorithm: Algorithm) -> str:
    """The objective's clip range and mean over tokens, for the table at start-up."""
    low, high = clip_range(algorithm)
    bounds = f"[-{low:g}, {high:g}], of log-ratios" if policy_objective(algorithm) == "gmpo" else f"-{low:g}/+{high:g}"
    clip = f"clip range {bounds}, " if clips_ratios(algorithm) else ""
    return f"{clip}{loss_aggregation(algorithm)} of token losses"


def differences(algorithm: Algorithm) -> Iterator[str]:
    """One sentence for each setting that is far from the paper of its objective. PPO's settings are not compared."""
    objective = policy_objective(algorithm)
    published = PUBLISHED[objective]
    if objective == "ppo":
        return
    low, high = published.clip or (0.0, 0.0)
    for name, value, usual in (("eps_clip", algorithm.eps_clip, low), ("eps_clip_high", algorithm.eps_clip_high, high)):
        # CISPO's paper does not name its upper bound.
        if published.clip is not None and objective != "cispo" and value is not None and value > FAR * usual:
            yield (
                f"{name} {value:g} is far from the {usual:g} that the paper of policy_objective {objective} uses "
                f"({published.paper}): unset it to use the paper's value"
            )
    if published.aggregation not in (None, loss_aggregation(algorithm)):
        yield (
            f"loss_aggregation {algorithm.loss_aggregation} differs from the paper of policy_objective {objective}, "
            f"which uses {published.aggregation} ({published.paper}): unset it to use the paper's value"
        )
