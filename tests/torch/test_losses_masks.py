"""Dual clip, weights of sequences, masks and the metrics of a mismatch, compared with their formulas."""

from __future__ import annotations

from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_async.compat.slime.mismatch import compute_mis_weights_with_cp
from miles_async.config.schema import Algorithm
from miles_async.losses.masks import TokenMasks
from miles_async.losses.mismatch import mismatch
from miles_async.losses.policy import PolicyLossSettings, policy_loss
from tests.torch.test_losses_policy import columns, inputs

CASES: dict[str, dict[str, Any]] = {
    "dual clip": {"eps_clip_c": 1.3},
    "dual clip of sequences": {"eps_clip_c": 1.05, "policy_objective": "gspo", "eps_clip": 0.2},
    "TIS with a lower bound": {"off_policy_correction": "tis", "tis_clip_low": 0.7, "tis_clip": 1.5},
    "sequence TIS with a lower bound": {"off_policy_correction": "sequence", "tis_clip_low": 0.7, "tis_clip": 1.5},
    "geometric TIS": {"off_policy_correction": "geometric", "tis_clip_low": 0.95, "tis_clip": 1.1},
    "tokens outside the band": {"rejection_level": "token", "rejection_band": (0.8, 1.3)},
    "sequences outside the band": {"rejection_level": "sequence", "rejection_band": (0.5, 2.0)},
    "sequences whose geometric mean is outside": {"rejection_level": "geometric", "rejection_band": (0.9, 1.1)},
    "MIS": {"off_policy_correction": "tis", "rejection_level": "token", "rejection_band": (0.8, 1.3)},
    "veto": {"rejection_veto": 0.5},
    "OPSM": {"use_opsm": True},
    "OPSM of GSPO": {"use_opsm": True, "policy_objective": "gspo", "opsm_delta": 0.02},
    "all together": {
        "eps_clip_c": 1.3,
        "off_policy_correction": "geometric",
        "rejection_level": "sequence",
        "rejection_veto": 0.3,
        "use_opsm": True,
    },
}


def per_sequence(of_sequence: Any, sequences: Tensor, *values: Tensor) -> Tensor:
    """[m] what a function returns for the tokens of each sequence."""
    parts = []
    for number in sequences.unique():
        tokens = [one[sequences == number] for one in values]
        result = of_sequence(*tokens)
        parts.append(torch.stack([result] * len(tokens[0])) if result.ndim == 0 else result)
    return torch.cat(parts)


def written_out(x: dict[str, Tensor], algorithm: Any) -> Tensor:
    """The loss, with a loop over sequences. `algorithm` also has the settings of plug-ins."""
    old, sampled, a, sequences = (x[name] for name in ("old_logprobs", "rollout_log_probs", "advantages", "sequences"))
    log_ratio = x["logprobs"] - old
    if algorithm.policy_objective == "gspo":
        log_ratio = per_sequence(torch.mean, sequences, log_ratio)
    ratio = log_ratio.exp()
    high = 1.2 if algorithm.policy_objective != "gspo" else 1 + (algorithm.eps_clip or 4e-4)
    low = 0.8 if algorithm.policy_objective != "gspo" else 1 - (algorithm.eps_clip or 3e-4)
    objective = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
    if algorithm.eps_clip_c is not None:
        objective = torch.where(a < 0, torch.maximum(objective, algorithm.eps_clip_c * a), objective)
    if algorithm.use_opsm:
        fall = per_sequence(torch.mean, sequences, old - x["logprobs"])
        objective = torch.where((a < 0) & (fall > algorithm.opsm_delta), 0.0, objective)
    off = old - sampled
    levels = {
        "token": off.exp(),
        "sequence": per_sequence(torch.sum, sequences, off).exp(),
        "geometric": per_sequence(torch.mean, sequences, off).exp(),
    }
    bounds = algorithm.tis_clip_low, algorithm.tis_clip
    weight = {
        None: torch.ones_like(off),
        "tis": levels["token"].clamp(*bounds),
        "sequence": levels["sequence"].clamp(*bounds),
        "geometric": levels["geometric"].clamp(*bounds),
    }[algorithm.off_policy_correction]
    if algorithm.rejection_level is not None:
        lowest, highest = algorithm.rejection_band
        level = levels[algorithm.rejection_level]
        weight = weight * ((level >= lowest) & (level <= highest))
    if algorithm.rejection_veto is not None:
        weight = weight * (per_sequence(torch.min, sequences, off.exp()) >= algorithm.rejection_veto)
    return -(weight * objective * x["loss_weights"]).sum() / 100


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_formula(case: str) -> None:
    tensors = inputs()
    tensors["logprobs"].requires_grad_()
    del tensors["reference_logprobs"]
    algorithm = Algorithm.model_validate(CASES[case])

    def computed(algorithm: Algorithm) -> Tensor:
        how = PolicyLossSettings.from_algorithm(algorithm)
        loss, _ = policy_loss(tensors["logprobs"], tensors["entropy"], columns(tensors), total_tokens=100, settings=how)
        return loss

    ours, theirs = computed(algorithm), written_out(tensors, algorithm)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    [gradient], [expected] = (torch.autograd.grad(loss, tensors["logprobs"]) for loss in (ours, theirs))
    assert torch.allclose(gradient, expected, atol=1e-12)
    without = computed(Algorithm(policy_objective=algorithm.policy_objective, eps_clip=algorithm.eps_clip))
    assert abs(ours.item() - without.item()) > 1e-6


def test_a_ratio_above_the_dual_clip_has_no_gradient_if_the_advantage_is_negative() -> None:
    logprobs = torch.tensor([5.0, 5.0, 0.5, 80.0], requires_grad=True)
    tensors = {name: tensor[:4] for name, tensor in inputs().items() if name != "reference_logprobs"}
    tensors |= {"old_logprobs": torch.zeros(4), "advantages": torch.tensor([-1.0, 1.0, -1.0, -1.0])}
    how = PolicyLossSettings.from_algorithm(Algorithm.model_validate({"eps_clip_c": 3.0}))
    loss, _ = policy_loss(logprobs, tensors["entropy"], columns(tensors), total_tokens=4, settings=how)
    [gradient] = torch.autograd.grad(loss, logprobs)
    assert [bool(one) for one in gradient] == [False, False, True, False]


def test_a_sequence_that_is_left_out_has_no_gradient_even_if_a_ratio_overflows() -> None:
    masks = TokenMasks(largest_fall=1.0)
    logprobs = torch.tensor([200.0, -600.0, 0.1], requires_grad=True)
    tensors = {name: tensor[:3] for name, tensor in inputs().items() if name != "reference_logprobs"}
    tensors |= {"old_logprobs": torch.zeros(3), "advantages": -torch.ones(3), "sequences": torch.tensor([0, 0, 1])}
    assert masks.fallen(
        logprobs, *(tensors[name] for name in ("old_logprobs", "advantages", "sequences"))
    ).tolist() == [
        True,
        True,
        False,
    ]
    how = PolicyLossSettings.from_algorithm(Algorithm(use_opsm=True, opsm_delta=1.0))
    loss, _ = policy_loss(logprobs, tensors["entropy"], columns(tensors), total_tokens=3, settings=how)
    [gradient] = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite()
    assert gradient[:2].tolist() == [0.0, 0.0]
    assert gradient[2] != 0


def test_a_sequence_with_an_improbable_token_is_vetoed() -> None:
    log_ratio = torch.tensor([0.0, -3.0, 0.0, -2.0])
    masks = TokenMasks(veto=0.1)
    assert masks.rejected(log_ratio, torch.tensor([0, 0, 1, 1])).tolist() == [True, True, False, False]


def test_without_settings_no_token_is_left_out() -> None:
    masks = TokenMasks.from_algorithm(Algorithm())
    wide, sequences = torch.tensor([-50.0, 50.0]), torch.tensor([0, 1])
    assert masks.rejected(wide, sequences).tolist() == [False, False]
    assert masks.fallen(wide, torch.zeros(2), -torch.ones(2), sequences).tolist() == [False, False]


def test_the_metrics_of_a_mismatch_have_the_values_of_their_definitions() -> None:
    """By hand: a sample of two tokens with log-ratios of 0.1 and 0.3, and one of one token with -0.2."""
    engine = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    log_ratio = torch.tensor([0.1, 0.3, -0.2], dtype=torch.float64)
    found = {name: one.tolist() for name, one in mismatch(engine + log_ratio, engine, torch.tensor([0, 0, 1])).items()}
    assert found["kl"] == pytest.approx([-0.1, -0.3, 0.2])
    assert found["k3_kl"] == pytest.approx((log_ratio.exp() - log_ratio - 1).tolist())
    assert found["rollout_log_ppl"] == pytest.approx([1.5, 1.5, 0.5])
    assert found["training_log_ppl"] == pytest.approx([1.3, 1.3, 0.7])
    assert found["log_ppl_abs_diff"] == pytest.approx([0.2, 0.2, 0.2])
    for name in ("rollout", "training"):
        assert found[f"{name}_ppl"] == pytest.approx([exp(one) for one in found[f"{name}_log_ppl"]])
    assert found["ppl_ratio"] == pytest.approx([exp(one) for one in found["log_ppl_diff"]])
    assert found["chi2_token"] == pytest.approx([(exp(0.2) + exp(0.6)) / 2 - 1] * 2 + [exp(-0.4) - 1])
    assert found["chi2_seq"] == pytest.approx([exp(0.8) - 1] * 2 + [exp(-0.4) - 1])


def test_the_metrics_of_micro_batches_add_up_to_their_mean() -> None:
    tensors = {name: tensor for name, tensor in inputs().items() if name != "reference_logprobs"}
    how = PolicyLossSettings.from_algorithm(Algorithm(get_mismatch_metrics=True))
    sequences = tensors["sequences"]
    cut = int((sequences < 3).sum())
    totals: dict[str, float] = {}
    for rows in (slice(0, cut), slice(cut, None)):
        part = {name: tensor[rows] for name, tensor in tensors.items()}
        part["sequences"] = part["sequences"] - part["sequences"][0]
        _, sums = policy_loss(part["logprobs"], part["entropy"], columns(part), total_tokens=40, settings=how)
        for name, value in sums.metrics.items():
            totals[name] = totals.get(name, 0.0) + value.item()
    gap = tensors["rollout_log_probs"] - tensors["old_logprobs"]
    assert totals["mismatch_kl"] == pytest.approx((gap * tensors["loss_weights"]).sum().item() / 40)
    assert len(totals) == 11


EXAMPLE = {
    "off_policy_correction": "tis",
    "tis_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "tis_batch_normalize": False,
    "use_rs": False,
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
}
"""The keys of slime's `mis.yaml`."""
RATIOS, SAMPLE = torch.tensor([0.2, 1.0, 4.0, 3.0]), [[1, 1], [1, 0, 1]]


def corrected(**changes: Any) -> tuple[list[float], list[list[float]]]:
    """Weights and masks of two samples with the ratios of `RATIOS`, one of which has a token that is not trained."""
    zeros = [torch.zeros(2), torch.zeros(3)]
    logs = RATIOS.log()
    learner = [logs[:2], torch.tensor([logs[2], 9.0, logs[3]])]
    weighted, masks, _ = compute_mis_weights_with_cp(
        args=SimpleNamespace(**EXAMPLE | changes),
        pg_loss=torch.ones(5),
        train_log_probs=learner,
        rollout_log_probs=zeros,
        loss_masks=[torch.tensor(mask) for mask in SAMPLE],
        total_lengths=[4, 4],
        response_lengths=[2, 3],
    )
    return weighted.tolist(), [mask.tolist() for mask in masks]


@pytest.mark.parametrize(
    "changes, weights, masks",
    [
        ({}, [0.2, 1, 2, 0, 2], SAMPLE),
        ({"tis_mode": "clip"}, [0.5, 1, 2, 0, 2], SAMPLE),
        ({"tis_mode": "mask", "tis_upper_bound": 3.5}, [0.2, 1, 4, 0, 3], [[0, 1], [0, 0, 1]]),
        ({"tis_level": "sequence", "tis_upper_bound": 10.0}, [0.2, 0.2, 10, 0, 10], SAMPLE),
        ({"tis_level": "geometric", "tis_upper_bound": 5.0}, [0.2**0.5, 0.2**0.5, 12**0.5, 0, 12**0.5], SAMPLE),
        ({"tis_batch_normalize": True}, [0.2 / 1.3, 1 / 1.3, 2 / 1.3, 0, 2 / 1.3], SAMPLE),
        (
            {"tis_level": "sequence", "tis_upper_bound": 2.8, "tis_batch_normalize": True},
            [0.2 / 1.5, 0.2 / 1.5, 2.8 / 1.5, 0, 2.8 / 1.5],
            SAMPLE,
        ),
        ({"use_rs": True, "rs_upper_bound": 3.5}, [0.2, 1, 2, 0, 2], [[0, 1], [0, 0, 1]]),
        (
            {"use_rs": True, "rs_lower_bound": 0.1, "rs_upper_bound": 9.0, "rs_veto_threshold": 0.3},
            [0.2, 1, 2, 0, 2],
            [[0, 0], [1, 0, 1]],
        ),
        ({"off_policy_correction": None}, [1, 1, 1, 1, 1], SAMPLE),
    ],
)  # fmt: skip
def test_the_function_of_slimes_example_weights_and_rejects_tokens(
    changes: dict[str, Any], weights: list[float], masks: list[list[float]]
) -> None:
    found, found_masks = corrected(**changes)
    assert found == pytest.approx(weights)
    assert found_masks == masks
