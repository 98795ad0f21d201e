"""Functions of users that compute the loss: what they get, what their results become, and the page about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from miles_async.batching.advantages import ScoredSample
from miles_async.batching.batch import PackedBatch, pack_samples, trained_columns
from miles_async.config.schema import Algorithm
from miles_async.errors import UserError
from miles_async.losses.functions import (
    AdvantageColumns,
    FunctionsOfMicroBatch,
    LossFunction,
    LossFunctions,
    SampleLayout,
    function_advantages,
)
from miles_async.losses.objectives.objective import PolicyTokens
from miles_async.losses.policy import PolicyLossSettings, policy_loss
from miles_async.losses.tokens import TokenColumns
from miles_async.types import Sample
from tests.configuration import run_config

PAGE = Path(__file__).parents[2] / "docs/how-to/write-a-loss.md"
CPU = torch.device("cpu")
VOCABULARY = 7
ARGS = SimpleNamespace(rollout_temperature=1.0, kl_coef=0.5, tis_clip=2.0)
MASKS = [[1, 1, 1], [0, 0], [1, 0, 1, 0], [0, 1, 1]]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The code of the page, as one module."""
    module = ModuleType("my_losses")
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, vars(module))
    return module


def batch() -> PackedBatch:
    """Four samples: one is trained as a whole, one not at all, and two in parts."""
    samples = [
        Sample(tokens=list(range(1, 3 + len(mask))), response_length=len(mask), loss_mask=list(mask),
               rollout_log_probs=[-1.0] * len(mask))
        for mask in MASKS
    ]  # fmt: skip
    scored = [ScoredSample(sample, i // 2, i, float(i + 1)) for i, sample in enumerate(samples)]
    return pack_samples(scored, trained_columns(samples))


def columns(packed: PackedBatch, weights: float = 1.0) -> TokenColumns:
    count = len(packed.targets)
    torch.manual_seed(1)
    return TokenColumns(
        old_logprobs=-torch.rand(count) - 0.5,
        rollout_log_probs=-torch.rand(count) - 0.5,
        advantages=torch.from_numpy(packed.advantages),
        rewards=torch.from_numpy(packed.rewards),
        loss_weights=torch.full((count,), weights),
        sequences=torch.from_numpy(packed.sequences),
        staleness=torch.zeros(count, dtype=torch.int64),
    )


def named(function: Callable[..., Any], setting: str = "custom_loss_function_path") -> LossFunction:
    loaded = LossFunction.__new__(LossFunction)
    loaded._function, loaded._name, loaded.takes_logits = function, f"{setting} my.function", False
    return loaded


def called(functions: LossFunctions, weights: float = 1.0) -> FunctionsOfMicroBatch:
    packed = batch()
    layout = SampleLayout(packed, CPU)
    return FunctionsOfMicroBatch(functions, layout, columns(packed, weights), total_tokens=14, trajectories=4)


def test_a_response_lasts_from_its_first_to_its_last_trained_token() -> None:
    layout = SampleLayout(batch(), CPU)
    assert layout.response_lengths == [3, 3, 2]
    assert layout.total_lengths == [5, 5, 5]
    assert [one.tolist() for one in layout.tokens] == [[1, 2, 3, 4, 5]] * 3
    spread = layout.spread(torch.arange(1.0, 8.0))
    assert spread.tolist() == [1, 2, 3, 4, 0, 5, 6, 7]
    assert layout.trained(spread).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert layout.of_samples(torch.tensor([1.0, 1, 1, 3, 3, 4, 4])).tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    "settings, is_called",
    [
        ({"off_policy_correction": "tis"}, True),
        ({"off_policy_correction": "none"}, False),
        ({"off_policy_correction": "none", "get_mismatch_metrics": True}, True),
    ],
)
def test_the_function_of_off_policy_weights_needs_a_correction_or_the_mismatch_metrics(
    settings: dict[str, Any], is_called: bool
) -> None:
    run = run_config(custom_tis_function_path="tests.stack.user_losses.truncated", **settings)
    assert (LossFunctions.load(run, ARGS).tis is not None) is is_called


TIS = Algorithm(off_policy_correction="tis", loss_aggregation="token_mean")


def test_the_loss_of_the_page_is_the_built_in_loss(page: ModuleType) -> None:
    logprobs, entropy = (columns(batch()).old_logprobs + 0.3 * torch.randn(7)).requires_grad_(), torch.rand(7)
    own = called(LossFunctions(ARGS, loss=named(page.clipped_loss)))
    expected, sums = policy_loss(
        logprobs, entropy, own.columns, total_tokens=14, settings=PolicyLossSettings.from_algorithm(TIS)
    )
    result = own.token_loss(logprobs, entropy)
    assert result.loss.item() == pytest.approx(expected.item())
    [ours], [theirs] = (torch.autograd.grad(value, logprobs) for value in (result.loss, expected))
    assert torch.allclose(ours, theirs)
    assert result.metrics["weight"].item() == pytest.approx(sums.sums[0, 4].item() / 14)


@pytest.mark.parametrize("per_token, weights", [(True, 1.0), (False, 0.5)])
def test_the_loss_of_logits_of_the_page_is_the_likelihood_of_trained_tokens(
    page: ModuleType, per_token: bool, weights: float
) -> None:
    own = called(LossFunctions(ARGS, named(page.likelihood_of_good_answers), per_token=per_token), weights)
    logits = torch.randn(15, VOCABULARY, requires_grad=True)
    result = own.logits_loss(logits)
    packed = batch()
    # Sample 1, the tokens 5 to 8, is not trained. Sample 2 ends with a token that is not trained, 14.
    predictors = torch.tensor([1, 2, 3, 6, 8, 12, 13])
    assert packed.targets.tolist() == [2, 3, 4, 11, 13, 18, 19]
    rows = logits.log_softmax(-1)[predictors].gather(1, torch.from_numpy(packed.tokens[packed.targets])[:, None])[:, 0]
    assert result.loss.item() == pytest.approx((-rows * own.columns.advantages * weights).sum().item() / 14, rel=1e-5)


def test_the_correction_of_the_page_leaves_far_tokens_out(page: ModuleType) -> None:
    own = called(LossFunctions(ARGS, tis=named(page.reject_far_tokens)))
    own.columns.rollout_log_probs[2] = -9.0
    corrected = own.correct(torch.arange(1.0, 8.0))
    ratio = (own.columns.old_logprobs - own.columns.rollout_log_probs).exp()
    expected = torch.where(ratio < 2.0, ratio, 0.0) * torch.arange(1.0, 8.0)
    assert torch.allclose(corrected.objective, expected)
    assert corrected.kept.tolist() == (ratio < 2.0).float().tolist()
    assert corrected.metrics["rejected"].item() == pytest.approx((ratio >= 2.0).sum().item() / 14)


def test_the_mean_of_the_page_divides_by_its_constant(page: ModuleType) -> None:
    own = called(LossFunctions(ARGS, reducer=named(page.mean_over_constant), per_token=False))
    assert own.reduce(torch.arange(1.0, 8.0), None).item() == pytest.approx(-28 / 1024 / 4)
    kept = torch.tensor([0.0, 1, 1, 1, 1, 1, 1])
    assert own.reduce(torch.arange(1.0, 8.0), kept).item() == pytest.approx(-27 / 1024 / 4)


def test_the_advantages_of_the_page_subtract_later_penalties(page: ModuleType) -> None:
    packed = batch()
    one = AdvantageColumns(
        rewards=torch.from_numpy(packed.advantages),
        old_logprobs=torch.zeros(7),
        rollout_log_probs=torch.zeros(7),
        divergences=torch.arange(1.0, 8.0),
        reference_logprobs=None,
        values=None,
    )
    functions = LossFunctions(ARGS, advantages=named(page.advantages_with_penalty))
    [(advantages, returns)] = function_advantages(functions, [(SampleLayout(packed, CPU), one)])
    assert advantages.tolist() == [1 - 3, 1 - 2.5, 1 - 1.5, 3 - 4.5, 3 - 2.5, 4 - 6.5, 4 - 3.5]
    assert returns is not None


def test_the_plugin_of_the_page_clips_at_half_of_its_width(page: ModuleType) -> None:
    ratio, zeros = torch.tensor([1.5, 0.5, 1.1]), torch.zeros(3)
    tokens = PolicyTokens(
        logprobs=ratio.log(),
        ratio=ratio,
        old_logprobs=zeros,
        rollout_log_probs=zeros,
        advantages=torch.ones(3),
        rewards=torch.ones(3),
        sequences=torch.arange(3),
        clip=(0.0, 0.0),
    )
    objective, clipped = page.Corridor().compute(tokens, page.Corridor.Settings())
    assert objective.tolist() == pytest.approx([1.2, 0.5, 1.1])
    assert clipped.tolist() == [1, 0, 0]


def test_a_micro_batch_without_trained_tokens_calls_no_function() -> None:
    packed = pack_samples([], [])
    function = named(raising)
    functions = LossFunctions(ARGS, loss=function, advantages=function, tis=function, reducer=function)
    own = FunctionsOfMicroBatch(functions, SampleLayout(packed, CPU), columns(packed), total_tokens=3, trajectories=1)
    assert own.logits_loss(torch.zeros(0, VOCABULARY)).loss.item() == 0
    assert own.correct(torch.zeros(0)).objective.tolist() == []
    assert own.reduce(torch.zeros(0), None).item() == 0


def raising(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("weights")


SCALAR = "return a tensor of shape [7]"


@pytest.mark.parametrize(
    "function, sentence",
    [
        (raising, "raised KeyError: 'weights': correct the function"),
        (lambda args, tokens: tokens.logprobs.sum(), f"returned a tensor of shape [] as the loss: {SCALAR}"),
        (lambda args, tokens: None, f"returned NoneType as the loss: {SCALAR}"),
        (lambda args, tokens: (tokens.logprobs, 3), "returned int: return the loss, or the loss and a dictionary of"),
        (lambda args, tokens: (tokens.logprobs, {"a": 3}), f"returned int as a: {SCALAR}"),
    ],
)
def test_a_result_of_another_form_is_refused_in_one_sentence(function: Callable[..., Any], sentence: str) -> None:
    own = called(LossFunctions(ARGS, loss=named(function)))
    with pytest.raises(UserError) as refused:
        own.token_loss(torch.zeros(7), torch.zeros(7))
    assert str(refused.value).startswith(f"custom_loss_function_path my.function {sentence}")


@pytest.mark.parametrize(
    "data, sentence",
    [
        ({}, "returned NoneType: return nothing, and set rollout_data['advantages'] to a tensor per sample"),
        ({"advantages": [torch.zeros(3)]}, "returned list: return nothing, and set rollout_data['advantages'] to 3"),
        (
            {"advantages": [torch.zeros(3)] * 3},
            "returned a tensor of shape [3] as rollout_data['advantages'][N]: return a tensor of shape [2]",
        ),
    ],
)
def test_advantages_of_another_form_are_refused_in_one_sentence(data: dict[str, list[Tensor]], sentence: str) -> None:
    packed, zeros = batch(), torch.zeros(7)
    one = AdvantageColumns(
        rewards=zeros,
        old_logprobs=zeros,
        rollout_log_probs=zeros,
        divergences=zeros,
        reference_logprobs=None,
        values=None,
    )
    functions = LossFunctions(ARGS, advantages=named(lambda args, rollout: rollout.update(data)))
    with pytest.raises(UserError) as refused:
        function_advantages(functions, [(SampleLayout(packed, CPU), one)])
    assert str(refused.value).startswith(f"custom_loss_function_path my.function {sentence}")


def test_values_that_are_not_finite_are_logged_with_the_name_of_the_function() -> None:
    own = called(LossFunctions(ARGS, loss=named(lambda args, tokens: -tokens.logprobs / 0)))
    with structlog.testing.capture_logs() as logs:
        result = own.token_loss(torch.full((7,), -1.0), torch.zeros(7))
    assert not result.loss.isfinite()
    [entry] = logs
    assert entry["function"] == "custom_loss_function_path my.function"
    assert entry["advice"] == "return finite numbers, or the step is skipped"
