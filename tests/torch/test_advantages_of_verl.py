"""Advantages of verl with a KL penalty on rewards, compared with what its functions return for the same numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf, isnan
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from miles_async.adapters.megatron.model import process_groups
from miles_async.batching.advantages import ScoredSample
from miles_async.batching.batch import pack_samples, trained_columns
from miles_async.losses.functions import (
    AdvantageColumns,
    LossFunction,
    LossFunctions,
    SampleLayout,
    function_advantages,
)
from miles_async.types import Sample

REWARDS, GROUPS = [1.0, 0.0, 1.0, 0.0, 2.0], [0, 1, 0, 1, 0]
MASKS = [[1, 1, 1], [1, 0, 1, 1], [1], [1, 1], [1, 1, 1, 1]]
DIVERGENCES = [[0.5, -0.25, 1.0], [0.75, 0.5, 0.25], [2.0], [-0.5, 0.25], [1.0, 1.0, 0.5, 0.5]]
# What compute_grpo_outcome_advantage of verl (b178a3cd), with and without the deviation, and
# compute_reinforce_plus_plus_baseline_outcome_advantage return for these numbers with a coefficient of 0.2.
GRPO = [-0.39193001, -0.70710397, -0.74466693, 0.70710391, 1.13659680]
MEAN = [-0.16666669, -0.17500001, -0.31666666, 0.17500000, 0.48333329]
WHITENED = [-0.75517470, -0.78149444, -1.22893023, 0.32393560, 1.29776669]
FUNCTION = "miles_async.compat.verl.advantages.after_penalty"


def rank_advantages(members: Sequence[int], estimator: str, *, std: bool) -> Tensor:
    """[m] advantages of the trained tokens of a rank that has these samples, in one micro-batch."""
    samples = [
        Sample(
            tokens=[1, *MASKS[i]],
            response_length=len(MASKS[i]),
            loss_mask=MASKS[i],
            rollout_log_probs=[-1.0] * len(MASKS[i]),
        )
        for i in members
    ]
    scored = [ScoredSample(sample, GROUPS[i], i, REWARDS[i]) for i, sample in zip(members, samples, strict=True)]
    packed = pack_samples(scored, trained_columns(samples))
    rewards = torch.from_numpy(packed.advantages)
    columns = AdvantageColumns(
        rewards=rewards,
        old_logprobs=torch.tensor([one for i in members for one in DIVERGENCES[i]]),
        rollout_log_probs=rewards,
        divergences=torch.zeros_like(rewards),
        reference_logprobs=torch.zeros_like(rewards),
        values=None,
    )
    args = SimpleNamespace(kl_coef=0.2, kl_penalty="k1", advantage_estimator=estimator, grpo_std_normalization=std)
    functions = LossFunctions(args, advantages=LossFunction("custom_advantage_function_path", FUNCTION))
    [(found, _)] = function_advantages(functions, [(SampleLayout(packed, torch.device("cpu")), columns)])
    return found


def advantages(
    ranks: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch, estimator: str, *, std: bool
) -> list[float]:
    """The advantage of each sample, which all of its trained tokens must have. `ranks` are the samples of each rank."""
    sent: list[list[Tensor]] = [[] for _ in ranks]

    def send(column: Tensor) -> Tensor:
        sent[dist.get_rank()].append(column)
        return column

    for receives in (False, True):
        found = [0.0] * len(REWARDS)
        for rank, members in enumerate(ranks):
            of_all = map(torch.cat, zip(*sent, strict=True)) if receives else None
            monkeypatch.setattr(dist, "get_rank", partial(int, rank))
            gather = send if of_all is None else partial(_next, of_all)
            monkeypatch.setattr(process_groups, "gather_over_data_parallel", gather)
            column = rank_advantages(members, estimator, std=std)
            for i, tokens in zip(members, column.split([sum(MASKS[i]) for i in members] or [0]), strict=False):
                assert len({*map(str, tokens.tolist())}) == 1
                found[i] = float(tokens[0])
    return found


def _next(of_all: Iterator[Tensor], column: Tensor) -> Tensor:
    return next(of_all)


@pytest.mark.parametrize("ranks", [[[0, 1, 2, 3, 4]], [[0, 3], [4, 1, 2]], [[2, 1, 0, 4, 3], []]])
@pytest.mark.parametrize(
    "estimator, std, expected",
    [("grpo", True, GRPO), ("grpo", False, MEAN), ("reinforce_plus_plus_baseline", True, WHITENED)],
)
def test_a_group_is_compared_after_the_penalty_wherever_its_samples_are(
    ranks: list[list[int]], estimator: str, std: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert advantages(ranks, monkeypatch, estimator, std=std) == pytest.approx(expected, abs=1e-5)


def test_a_divergence_that_is_not_finite_makes_the_advantages_of_its_group_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DIVERGENCES", [*DIVERGENCES[:1], [inf, 0.0, 0.0], *DIVERGENCES[2:]])
    found = advantages([[0, 1], [2, 3, 4]], monkeypatch, "grpo", std=True)
    assert [*map(isnan, found)] == [False, True, False, True, False]
