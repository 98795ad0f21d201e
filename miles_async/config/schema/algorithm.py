"""Advantages, losses, off-policy correction and KL regularization."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from miles_async.section import Section

PolicyObjective = Literal["ppo", "gspo", "cispo", "gmpo", "sapo", "dppo", "m2po"]
LossAggregation = Literal["token_mean", "sequence_mean", "constant"]


class Algorithm(Section):
    """The policy-gradient algorithm: advantages, clipping, off-policy correction and KL regularization."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    """How rewards become advantages. grpo, gspo and cispo compare the samples of a group; gspo and cispo also set
    policy_objective to their own name. reinforce_plus_plus normalizes rewards over the batch, and
    reinforce_plus_plus_baseline first subtracts the mean of the group. ppo trains a critic and estimates generalized
    advantages (GAE)."""
    policy_objective: PolicyObjective | None = None
    """Objective of the policy update, which limits how far a batch may move the policy. ppo clips the ratio of each
    token, gspo (arXiv 2507.18071) the ratio of the whole sequence. cispo (arXiv 2506.13585) clips the weight of each
    token's gradient and keeps the gradient. gmpo (arXiv 2507.20673) takes the geometric mean of a sequence's clipped
    ratios. sapo (arXiv 2511.20347) replaces the clip by a smooth gate. dppo (arXiv 2602.04879) limits the change of a
    token's probability, and m2po (arXiv 2510.01161) the second moment of the log-ratios of an optimizer step; both
    measure the change from the policy that sampled, so they need off_policy_correction none. If unset, gspo or cispo
    with the advantage_estimator of that name, and otherwise ppo."""
    sapo_temperatures: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)
    """Temperatures of the gate of policy_objective sapo, for positive and for negative advantages. A higher temperature
    makes the gradient fade sooner as the ratio moves away from 1."""
    dppo_threshold: float = Field(0.2, gt=0, le=1)
    """Change of a token's probability beyond which policy_objective dppo stops its gradient."""
    m2po_budget: float = Field(0.04, gt=0)
    """Largest mean square of log-ratios in an optimizer step with policy_objective m2po, over the tokens that moved in
    the direction of their advantage. Their ratios are clipped at the bound that brings the mean down to this budget."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount factor of later rewards per token. Only advantage_estimator ppo uses it."""
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
    grpo_std_normalization: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards. Turn this off for Dr. GRPO (arXiv
    2503.20783)."""
    loss_aggregation: LossAggregation | None = None
    """How token losses are averaged over an optimizer step: token_mean is the mean over all tokens (DAPO),
    sequence_mean the mean over samples of each sample's token mean (GRPO, GSPO), constant the sum over tokens divided
    by the number of samples times rollout_max_response_len (Dr. GRPO). All segments of an agent's trajectory together
    count as one sample. If unset, as in the paper of policy_objective: sequence_mean for gspo, gmpo and sapo, otherwise
    token_mean."""
    eps_clip: float | None = Field(None, ge=0)
    """Lower clip range of the policy ratio: ratios are clipped at 1 - eps_clip. With policy_objective gmpo, log-ratios
    are clipped at -eps_clip. If unset, as in the paper of policy_objective: 3e-4 for gspo, 1 (no bound) for cispo, 0.4
    for gmpo, otherwise 0.2."""
    eps_clip_high: float | None = Field(None, ge=0)
    """Upper clip range of the policy ratio: ratios are clipped at 1 + eps_clip_high. With policy_objective gmpo,
    log-ratios are clipped at eps_clip_high. If unset, eps_clip is used, or if that is unset too, 4e-4 for gspo, 0.4 for
    gmpo, otherwise 0.2. A larger value is DAPO's clip-higher (arXiv 2503.14476)."""
    off_policy_correction: Literal["tis", "decoupled", "icepop", "sequence", "none"] = "tis"
    """Importance weight of tokens that older weights or a different engine sampled: tis is the truncated ratio of each
    token, decoupled the ratio without truncation, icepop the ratio inside icepop_band and 0 outside it, sequence the
    truncated ratio of the whole sequence. none trains such tokens as if they were on-policy."""
    tis_clip: float = Field(2.0, gt=0)
    """Upper bound of the importance weight with off_policy_correction tis or sequence."""
    icepop_band: tuple[float, float] = (0.5, 5.0)
    """Range [low, high] of importance ratios that off_policy_correction icepop trains on. Tokens outside this range are
    excluded from the loss."""
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
    kl_loss_coef: float = Field(0.001, ge=0)
    """Coefficient of the KL loss that use_kl_loss adds."""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence, for both the KL loss and the KL penalty on rewards: k1 is the log-ratio, k2 half
    of its square, k3 the unbiased estimator of low variance."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty that is subtracted from the reward of each token. With advantage_estimator ppo,
    reinforce_plus_plus and reinforce_plus_plus_baseline this happens before advantages are estimated and normalized,
    with the other estimators afterwards. Above 0, a frozen reference model is kept in memory beside the policy. 0
    disables the penalty."""
    ref_load: str | None = None
    """Hugging Face checkpoint of the reference model. If unset, the reference is the checkpoint from which training
    starts."""
