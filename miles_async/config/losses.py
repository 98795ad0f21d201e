"""The plug-ins of the loss that a configuration selects, and what a run derives from them."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.schema import Algorithm, RunConfig
from miles_async.losses.advantages.estimator import ADVANTAGES, AdvantageEstimator
from miles_async.losses.corrections.correction import CORRECTIONS, Correction
from miles_async.losses.objectives.objective import OBJECTIVES, LossAggregation, Objective

FAR = 10
"""A clip range that is this many times the paper's is noted. DAPO's clip-higher is 1.4 times PPO's."""


def objective_name(algorithm: Algorithm) -> str:
    """The objective of the policy update: the setting, else the one that the advantage estimator selects."""
    return algorithm.policy_objective or estimator_of(algorithm).objective or "ppo"


def objective_of(algorithm: Algorithm) -> Objective:
    """The plug-in of the objective. Raises UserError if it cannot be used, like the next two functions."""
    return OBJECTIVES.find(objective_name(algorithm))


def correction_of(algorithm: Algorithm) -> Correction:
    """The plug-in of the off-policy correction: the setting, else the one for tokens that current weights sampled."""
    return CORRECTIONS.find(algorithm.off_policy_correction or "none")


def estimator_of(algorithm: Algorithm) -> AdvantageEstimator:
    """The plug-in of the advantage estimator."""
    return ADVANTAGES.find(algorithm.advantage_estimator)


def normalizes_in_driver(algorithm: Algorithm) -> bool:
    """Whether advantages are normalized over the batch before it is divided among the learner's ranks."""
    return _normalizes(algorithm) and not normalizes_on_rank(algorithm)


def normalizes_on_rank(algorithm: Algorithm) -> bool:
    """Whether the learner normalizes the returns of REINFORCE++, because they differ from token to token.

    A KL penalty is part of them, and only the learner knows the log-probabilities under the reference model, or later
    rewards are discounted.
    """
    return _normalizes(algorithm) and (algorithm.kl_coef > 0 or discount(algorithm) < 1)


def discount(algorithm: Algorithm) -> float:
    """The factor of a reward per token before it; 1 for estimators that do not read `gamma`."""
    return algorithm.gamma if estimator_of(algorithm).discounts else 1.0


def _normalizes(algorithm: Algorithm) -> bool:
    return estimator_of(algorithm).normalizes_batch and algorithm.custom_advantage_function_path is None


def corrects(algorithm: Algorithm) -> bool:
    """Whether tokens that another policy sampled are weighted by the ratio to that policy."""
    return calls_tis_function(algorithm) or correction_of(algorithm).corrects


def calls_tis_function(algorithm: Algorithm) -> bool:
    """Whether a function of the user weights the tokens. As in slime, it needs a correction or the mismatch metrics."""
    has_path = algorithm.custom_tis_function_path is not None
    return has_path and (correction_of(algorithm).corrects or algorithm.get_mismatch_metrics)


def penalizes_advantages(algorithm: Algorithm) -> bool:
    """Whether the KL penalty on rewards is subtracted from finished advantages."""
    return not (estimator_of(algorithm).penalizes_rewards or algorithm.custom_advantage_function_path)


def skips_zero_advantages(config: RunConfig) -> bool:
    """Whether samples whose advantage is zero need no pass through the model.

    This holds if every term of the loss is a multiple of the advantage, and no token affects the terms of other
    samples, as the objective declares. It does not hold for

    - supervised fine-tuning, which has no advantages;
    - a critic, from which the advantages come and which trains on all samples;
    - MTP heads, which learn from all samples;
    - a loss, advantages or a mean that functions of the user compute;
    - metrics of all log-probabilities that the engines reported;
    - rewards that the learner normalizes over the batch, whose advantages are not 0;
    - the KL loss, the KL penalty on rewards and the entropy bonus, which have a gradient at every token.
    """
    algorithm = config.algorithm
    functions = (
        algorithm.custom_advantage_function_path,
        algorithm.custom_tis_function_path,
        algorithm.custom_pg_loss_reducer_function_path,
        algorithm.rollout_data_postprocess_path,
    )
    return (
        config.learner.loss_type == "policy_loss"
        and not config.learner.enable_mtp_training
        and objective_of(algorithm).scales_with_advantage
        and not estimator_of(algorithm).trains_critic
        and not normalizes_on_rank(algorithm)
        and not any(functions)
        and not algorithm.get_mismatch_metrics
        and not config.keeps_reference
        and algorithm.entropy_coef == 0
    )


def loss_aggregation(algorithm: Algorithm) -> LossAggregation:
    """How token losses are averaged: the setting, else as in the paper of the objective."""
    return algorithm.loss_aggregation or objective_of(algorithm).aggregation or "sequence_mean"


def clip_range(algorithm: Algorithm) -> tuple[float, float]:
    """Lower and upper clip range: the settings, else those of the paper. 0 for objectives that do not clip ratios."""
    low, high = objective_of(algorithm).clip or (0.0, 0.0)
    if algorithm.eps_clip is not None:
        low = high = algorithm.eps_clip
    return low, high if algorithm.eps_clip_high is None else algorithm.eps_clip_high


def described(algorithm: Algorithm) -> str:
    """The objective's clip range and mean over tokens, for the table at start-up."""
    objective, (low, high) = objective_of(algorithm), clip_range(algorithm)
    bounds = f"[-{low:g}, {high:g}], of log-ratios" if objective.clips_log_ratios else f"-{low:g}/+{high:g}"
    clip = "" if objective.clip is None else f"clip range {bounds}, "
    return f"{clip}{loss_aggregation(algorithm)} of token losses"


def differences(algorithm: Algorithm) -> Iterator[str]:
    """One sentence for each setting that is far from the paper of its objective."""
    objective = objective_of(algorithm)
    if objective.paper is None:
        return
    of_paper = f"the paper of policy_objective {objective_name(algorithm)}"
    advice = f"({objective.paper}): unset it to use the paper's value"
    if objective.clip is not None and objective.clip_is_published:
        set_values = (algorithm.eps_clip, algorithm.eps_clip_high)
        for name, value, usual in zip(("eps_clip", "eps_clip_high"), set_values, objective.clip, strict=True):
            if value is not None and value > FAR * usual:
                yield f"{name} {value:g} is far from the {usual:g} that {of_paper} uses {advice}"
    if objective.aggregation not in (None, loss_aggregation(algorithm)):
        yield (
            f"loss_aggregation {algorithm.loss_aggregation} differs from {of_paper}, which uses "
            f"{objective.aggregation} {advice}"
        )
