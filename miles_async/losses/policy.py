"""The losses of a policy: policy gradient and supervised, of one micro-batch, and the metrics of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from miles_async.config.losses import clip_range, correction_of, objective_of, penalizes_advantages
from miles_async.config.schema import Algorithm
from miles_async.errors import UserError
from miles_async.losses.corrections.correction import Correction
from miles_async.losses.functions import FunctionResult, FunctionsOfMicroBatch
from miles_async.losses.masks import NO_MASKS, TokenMasks
from miles_async.losses.mismatch import mismatch
from miles_async.losses.objectives.objective import Objective, PolicyTokens
from miles_async.losses.sequences import later_sum
from miles_async.losses.tokens import TokenColumns
from miles_async.plugins import errors_of, name_of
from miles_async.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    """Choice of the objective and its coefficients."""

    objective: Objective
    correction: Correction
    own: Section
    """The section from which objective and correction read their own settings."""
    eps_clip: float
    eps_clip_high: float
    entropy_coef: float
    kl_loss_coef: float
    """Coefficient of the KL penalty that is added to the loss."""
    kl_reward_coef: float
    """Coefficient of the KL penalty that is subtracted from advantages which compare the samples of a group."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"]
    masks: TokenMasks = NO_MASKS
    mismatch_metrics: bool = False
    uses_rollout_logprobs: bool = False
    """The old log-probabilities are those of the engines, so they do not say what the learner computes."""

    @classmethod
    def from_algorithm(cls, algorithm: Algorithm) -> PolicyLossSettings:
        """The loss of an advantage estimator, with the coefficients of the configuration."""
        low, high = clip_range(algorithm)
        return cls(
            objective=objective_of(algorithm),
            correction=correction_of(algorithm),
            own=algorithm,
            eps_clip=low,
            eps_clip_high=high,
            entropy_coef=algorithm.entropy_coef,
            kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
            # Otherwise the penalty is already a part of the returns from which advantages are computed.
            kl_reward_coef=algorithm.kl_coef if penalizes_advantages(algorithm) else 0.0,
            kl_estimator=algorithm.kl_loss_type,
            masks=TokenMasks.from_algorithm(algorithm),
            mismatch_metrics=algorithm.get_mismatch_metrics,
            uses_rollout_logprobs=algorithm.use_rollout_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Statistics of a micro-batch's trained tokens; sums and maxima combine over micro-batches and ranks."""

    sums: Tensor
    """[STALENESS_CLASSES, len(SUMS)]: row i is for tokens that are i versions old; the last row also for older ones."""
    maximum: Tensor
    """[1] largest absolute difference between old and rollout log-probabilities."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Parts of further metrics. The parts of all micro-batches and ranks add up."""


SUMS = ("tokens", "objective", "clipped", "bounded", "weight", "ratio", "ratio_squared", "gap", "entropy", "kl")
"""Columns of `TokenSums.sums`."""
STALENESS_CLASSES = 5


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    columns: TokenColumns,
    *,
    total_tokens: int,
    settings: PolicyLossSettings,
    prepared: Any = None,
    functions: FunctionsOfMicroBatch | None = None,
) -> tuple[Tensor, TokenSums]:
    """Compute this micro-batch's part of the loss: its weighted sum over tokens divided by `total_tokens` of the step.

    `logprobs` and `entropy` [m] are under the weights being trained. The parts of all micro-batches and ranks add up to
    the loss of the step, independently of how samples are grouped into micro-batches: `columns.loss_weights` alone
    determines how tokens and samples are averaged. `prepared` is the result of the objective's `prepare_step`.
    `functions` are None if the user has named none.

    Raises UserError if a plug-in or a function returns tensors of another shape.
    """
    policy = _policy_terms(logprobs, columns, settings, prepared, functions)
    # Without a bonus the entropy gets no gradient, not even zeros, which `token_logprobs` would take time for.
    others = settings.entropy_coef * entropy if settings.entropy_coef else torch.zeros_like(entropy)
    kl = torch.zeros_like(policy.objective)
    if columns.reference_logprobs is not None:
        kl = kl_penalty(logprobs, columns.reference_logprobs, settings.kl_estimator)
        others = others - settings.kl_loss_coef * kl
    per_token = (policy.objective + others) * columns.loss_weights
    loss = -per_token.sum() / total_tokens
    with torch.no_grad():
        learner = _learner_logprobs(logprobs, columns, settings)
        sums = _sums(columns, learner, per_token, entropy, policy.clipped, policy.bounded, policy.weight, kl)
        if settings.mismatch_metrics:
            sums = replace(sums, metrics=_mismatch(columns, total_tokens))
    if functions is None:
        return loss, sums
    if functions.functions.reducer is not None:
        mean = functions.reduce(policy.objective, policy.kept)
        loss = mean - (others * columns.loss_weights).sum() / total_tokens
    return loss, _with_loss(sums, loss.detach(), total_tokens, policy.metrics)


def function_loss(
    logprobs: Tensor,
    entropy: Tensor,
    columns: TokenColumns,
    result: FunctionResult,
    *,
    total_tokens: int,
    settings: PolicyLossSettings,
) -> tuple[Tensor, TokenSums]:
    """The loss that a function of the user computed, with the same return values as `policy_loss`."""
    with torch.no_grad():
        zeros = torch.zeros_like(logprobs)
        learner = _learner_logprobs(logprobs, columns, settings)
        sums = _sums(columns, learner, zeros, entropy, zeros, zeros, torch.ones_like(logprobs), zeros)
    return result.loss, _with_loss(sums, result.loss.detach(), total_tokens, result.metrics)


def supervised_loss(logprobs: Tensor, *, total_tokens: int) -> Tensor:
    """Negative log-likelihood of a micro-batch's target tokens, divided by the tokens of the whole optimizer step.

    `logprobs` [m] are in nats.
    """
    return -logprobs.sum() / total_tokens


def sft_loss(logprobs: Tensor, entropy: Tensor, loss_weights: Tensor, *, total_tokens: int) -> tuple[Tensor, TokenSums]:
    """Supervised loss with the same return values as `policy_loss`, so that both use one training loop.

    `loss_weights` [m] are those of `TokenColumns`. The metric `loss` is the negative log-likelihood in nats per token,
    averaged as they determine. Nothing was sampled, so all ratios and importance weights are 1, and clipping and
    staleness are 0.
    """
    weighted = logprobs * loss_weights
    with torch.no_grad():
        tokens = torch.tensor(float(len(logprobs)), device=logprobs.device)
        known = {
            "tokens": tokens,
            "objective": weighted.sum(),
            "weight": tokens,
            "ratio": tokens,
            "ratio_squared": tokens,
            "entropy": entropy.sum(),
        }
        sums = logprobs.new_zeros(STALENESS_CLASSES, len(SUMS))
        sums[0] = torch.stack([known.get(name, torch.zeros_like(tokens)) for name in SUMS])
    return supervised_loss(weighted, total_tokens=total_tokens), TokenSums(sums=sums, maximum=sums.new_zeros(1))


@dataclass(frozen=True, slots=True)
class _PolicyTerms:
    """[m] the policy's part of each token, and what led to it."""

    objective: Tensor
    """With the weight of the off-policy correction."""
    clipped: Tensor
    weight: Tensor
    bounded: Tensor
    kept: Tensor | None = None
    """Factors of the masks that a function returned; None if none did."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def _policy_terms(
    logprobs: Tensor,
    columns: TokenColumns,
    settings: PolicyLossSettings,
    prepared: Any,
    functions: FunctionsOfMicroBatch | None,
) -> _PolicyTerms:
    """The objective bounds how far this batch's steps move the policy. The weight corrects for the difference between
    the policy before those steps and the one that sampled."""
    old = columns.old_logprobs.detach()
    log_ratio, masks = old - columns.rollout_log_probs, settings.masks
    advantages = penalized_advantages(columns, settings)
    fallen = masks.fallen(logprobs, old, advantages, columns.sequences)
    if functions is not None and functions.functions.tis is not None:
        tokens = _policy_tokens(logprobs, columns, advantages, fallen, settings, prepared)
        objective, clipped = _objective(settings, tokens, fallen)
        corrected = functions.correct(objective)
        weight = torch.where(objective == 0, 1.0, corrected.objective / objective).detach()
        bounded = (corrected.kept == 0).to(weight.dtype)
        return _PolicyTerms(corrected.objective, clipped, weight, bounded, corrected.kept, corrected.metrics)
    correction = settings.correction
    with errors_of(correction, "weight tokens"):
        weights = correction.weights(log_ratio, columns.sequences, settings.own)
        weight, bounded = _per_token(correction, weights, log_ratio)
    rejected = masks.rejected(log_ratio, columns.sequences)
    weight, bounded = weight.masked_fill(rejected, 0.0), bounded.masked_fill(rejected, 1.0)
    tokens = _policy_tokens(logprobs, columns, advantages, (weight == 0) | fallen, settings, prepared)
    objective, clipped = _objective(settings, tokens, fallen)
    return _PolicyTerms(weight * objective, clipped, weight, bounded)


def _learner_logprobs(logprobs: Tensor, columns: TokenColumns, settings: PolicyLossSettings) -> Tensor:
    """[m] under the weights before the batch's first step, or under the current ones if no pass has computed those."""
    return (logprobs if settings.uses_rollout_logprobs else columns.old_logprobs).detach()


def _sums(
    columns: TokenColumns,
    learner: Tensor,
    per_token: Tensor,
    entropy: Tensor,
    clipped: Tensor,
    bounded: Tensor,
    weight: Tensor,
    kl: Tensor,
) -> TokenSums:
    """Add up the statistics of all trained tokens, each [m]. `learner` are the learner's log-probabilities."""
    log_ratio = learner - columns.rollout_log_probs
    # The clamp keeps the metrics finite: if the true ratio overflows, the loss reports it.
    ratio = log_ratio.clamp(-20, 20).exp()
    gap = log_ratio.abs()
    entries = (torch.ones_like(gap), per_token, clipped, bounded, weight, ratio, ratio.square(), gap, entropy, kl)
    stacked = torch.stack(entries, 1)
    classes = columns.staleness.clamp(0, STALENESS_CLASSES - 1)
    sums = stacked.new_zeros(STALENESS_CLASSES, len(SUMS)).index_add(0, classes, stacked)
    maximum = torch.cat([gap, gap.new_zeros(1)]).amax(0, keepdim=True)  # amax of no token would raise
    return TokenSums(sums=sums, maximum=maximum)


def _with_loss(sums: TokenSums, loss: Tensor, total_tokens: int, metrics: Mapping[str, Tensor]) -> TokenSums:
    """The statistics of a loss that is not the sum over tokens: a function computed or averaged it.

    The names of the function's metrics get a prefix, so that no other metric has them.
    """
    rows = sums.sums.clone()
    column = rows[:, SUMS.index("objective")]
    column[0] += -loss * total_tokens - column.sum()
    own = {f"custom_{name}": value for name, value in metrics.items()}
    return TokenSums(sums=rows, maximum=sums.maximum, metrics={**sums.metrics, **own})


def _mismatch(columns: TokenColumns, total_tokens: int) -> Mapping[str, Tensor]:
    """This micro-batch's part of each metric, which is averaged as the loss."""
    found = mismatch(columns.old_logprobs.detach(), columns.rollout_log_probs, columns.sequences)
    return {f"mismatch_{name}": (one * columns.loss_weights).sum() / total_tokens for name, one in found.items()}


def _policy_tokens(
    logprobs: Tensor,
    columns: TokenColumns,
    advantages: Tensor,
    excluded: Tensor,
    settings: PolicyLossSettings,
    prepared: Any,
) -> PolicyTokens:
    """The objective's view of a micro-batch. `excluded` [m] are the tokens that correction and masks leave out."""
    old = columns.old_logprobs.detach()
    return PolicyTokens(
        logprobs=logprobs,
        # The ratio of an excluded token may overflow. Its weight of 0 would then give NaN, in the loss and its
        # gradient.
        ratio=(torch.where(excluded, old, logprobs) - old).exp(),
        old_logprobs=old,
        rollout_log_probs=columns.rollout_log_probs,
        advantages=advantages,
        rewards=columns.rewards,
        sequences=columns.sequences,
        clip=(settings.eps_clip, settings.eps_clip_high),
        prepared=prepared,
    )


def _objective(settings: PolicyLossSettings, tokens: PolicyTokens, masked: Tensor) -> tuple[Tensor, Tensor]:
    """[m] the objective of each token, and whether it is clipped. `masked` [m] tokens have none."""
    with errors_of(settings.objective, "compute the loss"):
        values = settings.objective.compute(tokens, settings.own)
        objective, clipped = _per_token(settings.objective, values, tokens.logprobs)
    return objective.masked_fill(masked, 0.0), clipped.masked_fill(masked, 1.0)


def _per_token(plugin: Objective | Correction, values: tuple[Tensor, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return `values` if both have one entry per token."""
    shapes = [list(value.shape) for value in values]
    if shapes != [[len(like)]] * 2:
        raise UserError(
            f"{name_of(plugin)} returned tensors of the shapes {shapes} for {len(like)} tokens: return two with one "
            "entry per token"
        )
    return values


def penalized_advantages(columns: TokenColumns, settings: PolicyLossSettings) -> Tensor:
    """[m] advantages less the KL penalty of the token and of all later ones of its sequence, if rewards have one."""
    if columns.reference_logprobs is None or not settings.kl_reward_coef:
        return columns.advantages
    # A penalty on the reward of a token counts for every earlier token of the response too.
    penalty = kl_penalty(columns.old_logprobs.detach(), columns.reference_logprobs, settings.kl_estimator)
    return columns.advantages - settings.kl_reward_coef * later_sum(penalty, columns.sequences)


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled; 0 where both agree.

    `k1`, the log-ratio, is unbiased but may be negative. `k2`, half its square, has the right gradient. `k3` is
    unbiased and never negative. Source: Schulman, "Approximating KL divergence", 2020. `low_var_kl` is slime's `k3`,
    which is at most 10.
    """
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    estimate = log_ratio.exp() - 1 - log_ratio
    return estimate.clamp(max=10) if estimator == "low_var_kl" else estimate


def objective_sum(sums: Tensor) -> float:
    """Sum of the objective over all tokens of `TokenSums.sums`; not finite if the loss is not finite."""
    return float(sums[:, SUMS.index("objective")].sum())


def policy_metrics(sums: Tensor, maximum: Tensor, skipped: Sequence[float]) -> Mapping[str, float]:
    """Compute the metrics of an optimizer step from its `TokenSums`, combined over micro-batches and ranks.

    `skipped` has STALENESS_CLASSES entries: the trained tokens that took no pass because their advantage is zero.
    `loss`, `loss_tokens` and the token shares are over all trained tokens. All other metrics are over the computed
    tokens, and are missing if no token was computed. `ess`, `clip_fraction`, `bounded_fraction` and `logprob_gap_mean`
    are also given per staleness class, such as `ess_staleness_2`.

    - `loss`: Mean loss of a token. A policy-gradient loss is near 0 and does not fall while the policy learns. Worry if
      it is not a number: the batch is skipped, and the FAQ has the causes.
    - `loss_tokens`: Number of trained tokens of a step.
    - `computed_fraction`: Fraction of the trained tokens that took a pass, because their advantage is not 0. Worry if
      it is near 0: all samples of most groups have the same reward. Choose other prompts, or a dynamic filter.
    - `ess`: Effective sample size of the unbounded importance ratios, divided by the number of tokens (Kish 1965); 1 is
      on-policy. Worry if it falls below half of its usual value: lower `--max-weight-staleness` or `--lr`.
    - `clip_fraction`: Fraction of tokens whose objective is clipped, so that they have no gradient. Worry if it exceeds
      0.2: lower `--lr`, or take fewer steps per batch (`--num-steps-per-rollout`).
    - `bounded_fraction`: Fraction of tokens whose importance weight the off-policy correction limits or sets to 0.
      Worry if it exceeds 0.2: samples are too stale, or the engines compute other log-probabilities than the learner.
    - `logprob_gap_mean`: Mean distance in nats between the log-probabilities of the engines and of the learner, before
      the batch's first step, or in each step with `--use-rollout-logprobs`. Worry if it is high in the first batches,
      when no sample is stale: the engines do not compute the learner's model.
    - `logprob_gap_max`: The largest such distance of a token.
    - `importance_weight`: Mean importance weight of the tokens, after the correction. Worry if it is far from 1: the
      samples are from another policy than the one that is trained.
    - `entropy`: Mean entropy of the policy in nats per token. Worry if it falls to 0: the policy gives one answer only.
      Raise `--eps-clip-high` or `--entropy-coef`.
    - `kl`: Mean KL divergence from the reference model in nats per token; 0 without one. Worry if it grows without a
      higher reward: raise `--kl-loss-coef` or `--kl-coef`.
    - `token_share_staleness`: Fraction of the trained tokens in each staleness class. The name continues with the
      class, such as `_2`; `_4_or_more` is the last one.
    """
    total = dict(zip(SUMS, sums.sum(0).tolist(), strict=True))
    tokens, trained = total["tokens"], total["tokens"] + sum(skipped)
    metrics = {
        "loss": -total["objective"] / max(trained, 1.0),
        "loss_tokens": trained,
        "computed_fraction": tokens / max(trained, 1.0),
    }
    if tokens:
        metrics |= {
            **_off_policy_metrics(total),
            "logprob_gap_max": maximum.item(),
            "importance_weight": total["weight"] / tokens,
            "entropy": total["entropy"] / tokens,
            "kl": total["kl"] / tokens,
        }
    for staleness, (row, class_skipped) in enumerate(zip(sums.tolist(), skipped, strict=True)):
        name = f"{staleness}_or_more" if staleness == STALENESS_CLASSES - 1 else str(staleness)
        class_total = dict(zip(SUMS, row, strict=True))
        if class_total["tokens"]:
            class_metrics = _off_policy_metrics(class_total)
            metrics |= {f"{metric}_staleness_{name}": value for metric, value in class_metrics.items()}
        if class_trained := class_total["tokens"] + class_skipped:
            metrics[f"token_share_staleness_{name}"] = class_trained / trained
    return metrics


def _off_policy_metrics(total: Mapping[str, float]) -> dict[str, float]:
    tokens = total["tokens"]
    return {
        "ess": total["ratio"] ** 2 / max(tokens * total["ratio_squared"], 1e-30),
        "clip_fraction": total["clipped"] / tokens,
        "bounded_fraction": total["bounded"] / tokens,
        "logprob_gap_mean": total["gap"] / tokens,
    }
