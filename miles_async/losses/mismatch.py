"""How far the learner's log-probabilities of sampled tokens are from those that the engines reported."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from miles_async.losses.sequences import sequence_mean, sequence_sum

LARGEST = 20.0
"""Largest log-ratio that is squared as a ratio: larger ones would overflow."""


def mismatch(logprobs: Tensor, rollout_log_probs: Tensor, sequences: Tensor) -> Mapping[str, Tensor]:
    """[m] columns by metric, from the learner's and the engines' log-probabilities [m] of trained tokens, in nats.

    The loss's mean over tokens or samples turns a column into the metric. `kl` and `k3_kl` estimate KL(engine ||
    learner). A perplexity is that of a sample. `chi2_token` and `chi2_seq` estimate the chi-squared divergence of the
    learner from the engines, with the ratios of tokens and of samples.
    Source: slime's example of mismatch correction (train_infer_mismatch_helper), whose names the metrics have.
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
