"""Advantages, losses, off-policy correction and KL regularization."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from miles_async.losses.advantages.estimator import ADVANTAGES
from miles_async.losses.corrections.correction import CORRECTIONS
from miles_async.losses.objectives.objective import OBJECTIVES, LossAggregation
from miles_async.section import Section


class Algorithm(Section):
    """The policy-gradient algorithm: advantages, clipping, off-policy correction and KL regularization."""

    advantage_estimator: Annotated[str, ADVANTAGES] = "grpo"
    """How rewards become advantages."""
    rewards_normalization: bool = True
    """Compare the rewards of a group with each other. If off, the advantages of estimators that do so are the rewards
    themselves."""
    policy_objective: Annotated[str, OBJECTIVES] | None = None
    """Objective of the policy update, which limits how far a batch may move the policy. If unset, gspo or cispo with
    the advantage_estimator of that name, and otherwise ppo."""
    custom_loss_function_path: str | None = None
    """Function that computes the loss with loss_type custom_loss, as module.function. fn(args, tokens) returns the loss
    of each trained token, from log-probabilities and entropies. slime's form, fn(args, batch, logits,
    sum_of_sample_mean), returns a loss and metrics, and needs memory for the logits of a micro-batch."""
    custom_advantage_function_path: str | None = None
    """Function fn(args, rollout_data) that sets rollout_data["advantages"] to a tensor per sample, with an entry per
    response token, as module.function. It takes the place of a critic's advantages and of the normalization over the
    batch. If unset, advantages are those of advantage_estimator."""
    rollout_data_postprocess_path: str | None = None
    """Function fn(args, rollout_id, rollout_data) that may change rollout_data["advantages"] and
    rollout_data["loss_masks"], which have a tensor per sample with an entry per response token, as module.function.
    A mask is the factor of the policy's loss at its token, and 0 takes the token out. The function gets all samples of
    a rank before the first optimizer step on them. If unset, advantages and masks stay as they are."""
    custom_tis_function_path: str | None = None
    """Function that weights the policy's part of the loss in place of off_policy_correction, as module.function. It
    returns pg_loss, the masks of the samples, and metrics. With off_policy_correction none, it is called only with
    get_mismatch_metrics."""
    custom_pg_loss_reducer_function_path: str | None = None
    """Function that returns a function, which averages the policy's part of the loss over the tokens of a micro-batch,
    as module.function. If unset, loss_aggregation averages it. Entropy bonus and KL loss are averaged by
    loss_aggregation in each case."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount factor of later rewards per token. Only advantage_estimator ppo and reinforce_plus_plus use it."""
    lambd: float = Field(1.0, ge=0, le=1)
    """Lambda of generalized advantage estimation: 0 relies on the critic's values, 1 on the observed rewards. Only
    advantage_estimator ppo uses it."""
    normalize_advantages: bool = False
    """Normalize advantages to mean 0 and variance 1 over the tokens of a batch. Only advantage_estimator ppo uses
    it."""
    value_clip: float = Field(0.2, gt=0)
    """Clip range of the critic's values (PPO value clipping): how far a value may move from its value before the
    batch's first optimizer step while its loss still decreases."""
    num_critic_only_steps: int = Field(0, ge=0)
    """Number of rollouts at the start of the run that train only the critic. 0 trains critic and policy together from
    the start."""
    critic_load: str | None = None
    """Hugging Face checkpoint that initializes the critic below its new value head. If unset, the critic starts from
    the checkpoint of the policy."""
    critic_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the critic. It follows lr_decay_style like the policy's. If unset, lr is used."""
    critic_lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the critic's learning rate rises linearly from 0 to its peak."""
    loss_aggregation: LossAggregation | None = None
    """How token losses are averaged over an optimizer step: token_mean is the mean over all tokens (DAPO),
    sequence_mean the mean over samples of each sample's token mean (GRPO, GSPO), sequence_sum the mean over samples of
    each sample's sum over tokens, constant that mean divided by rollout_max_response_len (Dr. GRPO). All segments of an
    agent's trajectory together count as one sample. If unset, token_mean for policy_objective cispo, as in its paper,
    otherwise sequence_mean."""
    count_removed_samples: bool = True
    """Count samples without a trained token in the mean over samples, such as those that rollout_sample_filter_path
    removes. If off, loss_aggregation sequence_mean, sequence_sum and constant average over the others."""
    eps_clip: float | None = Field(None, ge=0)
    """Lower clip range of the policy ratio: ratios are clipped at 1 - eps_clip. With policy_objective gmpo, log-ratios
    are clipped at -eps_clip. If unset, as in the paper of policy_objective: 3e-4 for gspo, 1 (no bound) for cispo, 0.4
    for gmpo, otherwise 0.2."""
    eps_clip_high: float | None = Field(None, ge=0)
    """Upper clip range of the policy ratio: ratios are clipped at 1 + eps_clip_high. With policy_objective gmpo,
    log-ratios are clipped at eps_clip_high. If unset, eps_clip is used, or if that is unset too, 4e-4 for gspo, 0.4 for
    gmpo, otherwise 0.2. A larger value is DAPO's clip-higher (arXiv 2503.14476)."""
    off_policy_correction: Annotated[str, CORRECTIONS] | None = None
    """Importance weight of tokens that older weights or a different engine sampled, by the ratio of their
    probabilities. If unset, tis if generation and training overlap, otherwise none."""
    rejection_level: Literal["token", "sequence", "geometric"] | None = None
    """Leave out tokens whose ratio to the policy that sampled is outside rejection_band: the ratio of the token itself,
    of the whole sequence, or the geometric mean over the sequence. The others keep the weight of off_policy_correction.
    If unset, nothing is left out."""
    rejection_band: tuple[float, float] = (0.5, 2.0)
    """Range [low, high] of ratios that rejection_level keeps."""
    rejection_veto: float | None = Field(None, gt=0, lt=1)
    """Leave out a whole sequence if the ratio of any of its tokens is below this value. If unset, none is."""
    use_opsm: bool = False
    """Leave out sequences with a negative advantage that the current weights have made less likely: those whose mean
    log-probability has fallen by more than opsm_delta since the first optimizer step on the batch (off-policy sequence
    masking, as in slime)."""
    opsm_delta: float = Field(1e-4, ge=0)
    """Fall of the mean log-probability, in nats per token, from which use_opsm leaves a sequence out."""
    get_mismatch_metrics: bool = False
    """Report how far the learner's log-probabilities are from the engines': KL divergences, perplexities and
    chi-squared divergences, as slime's metrics. Samples without an advantage are computed too."""
    use_rollout_logprobs: bool = False
    """Take the log-probabilities of the engines as those of the policy before the batch's first step. The policy ratio
    then corrects for older weights and other engines too, so off_policy_correction has no effect, and a batch of
    several steps needs no further forward pass. Training and engines must compute nearly equal log-probabilities."""
    overlong_buffer_len: int | None = Field(None, ge=1)
    """Number of tokens before rollout_max_response_len over which the penalty on long responses grows from 0 to
    overlong_penalty (soft overlong punishment, DAPO, arXiv 2503.14476). If unset, long responses are not penalized."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Amount subtracted from the reward of a response that reaches rollout_max_response_len. It needs
    overlong_buffer_len."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus. 0 disables it."""
    use_kl_loss: bool = False
    """Add the KL divergence from a frozen reference model to the loss. The reference model is kept in memory beside the
    policy."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL loss that use_kl_loss adds. With 0, the divergence is only measured."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL divergence, for both the KL loss and the KL penalty on rewards: k1 is the log-ratio, k2 half
    of its square, k3 the unbiased estimator of low variance, and
    low_var_kl is k3 with at most 10 per token, as in slime."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty that is subtracted from the reward of each token. With advantage_estimator ppo,
    reinforce_plus_plus and reinforce_plus_plus_baseline this happens before advantages are estimated and normalized,
    with the other estimators afterwards. Above 0, a frozen reference model is kept in memory beside the policy. 0
    disables the penalty."""
    ref_load: str | None = None
    """Hugging Face checkpoint of the reference model. If unset, the reference is the checkpoint from which training
    starts."""
