"""How far the learner's log-probabilities of sampled tokens are from those that the engines reported."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from miles_async.losses.sequences import sequence_mean, sequence_sum

LARGEST = 20.0
"""Largest log-ratio that is squared as a ratio: larger ones would overflow."""


def mismatch(logprobs: Tensor, rollout_log_probs: Tensor, sequences: Tensor) -> Mapping[str, Tensor]:
    """[m] columns by metric, from the learner's and the engines' log-probabilities [m] of trained tokens, in nats.

    The loss's mean over tokens or samples turns a column into the metric, whose name begins with `mismatch_`.
    Source: slime's example of mismatch correction (train_infer_mismatch_helper), whose names the metrics have.

    - `training_log_ppl`: Logarithm of a sample's perplexity, as the learner computes it.
    - `training_ppl`: Perplexity of a sample, as the learner computes it.
    - `rollout_log_ppl`: Logarithm of a sample's perplexity, from the engines' log-probabilities.
    - `rollout_ppl`: Perplexity of a sample, from the engines' log-probabilities.
    - `kl`: Estimate of KL(engine || learner) in nats per token. Worry if it is high in the first batches, when no
      sample is stale: the engines do not compute the learner's model.
    - `k3_kl`: An estimate of the same that is never negative.
    - `log_ppl_diff`: `training_log_ppl` minus `rollout_log_ppl`.
    - `log_ppl_abs_diff`: The absolute value of this difference.
    - `ppl_ratio`: `training_ppl` divided by `rollout_ppl`.
    - `chi2_token`: Estimate of the chi-squared divergence of the learner from the engines, from ratios of tokens.
    - `chi2_seq`: The same from ratios of samples.
    """
    learner, engine = (-sequence_mean(values, sequences) for values in (logprobs, rollout_log_probs))
    log_ratio = logprobs - rollout_log_probs
    ratio = log_ratio.clamp(-LARGEST, LARGEST).exp()
    sequence_ratio = sequence_sum(log_ratio, sequences).clamp(-LARGEST, LARGEST).exp()
    return {
        "training_log_ppl": learner,
        "training_ppl": learner.exp(),
        "rollout_log_ppl": engine,
        "rollout_ppl": engine.exp(),
        "kl": -log_ratio,
        "k3_kl": log_ratio.exp() - log_ratio - 1,
        "log_ppl_diff": learner - engine,
        "log_ppl_abs_diff": (learner - engine).abs(),
        "ppl_ratio": (learner - engine).exp(),
        "chi2_token": sequence_mean(ratio.square(), sequences) - 1,
        "chi2_seq": sequence_ratio.square() - 1,
    }
