"""The loss and the gradients of a step are those that slime's own code computes from the same batch and weights.

It needs a checkout of slime: `SLIME_CHECKOUT=/path/to/slime pytest tests/stack/test_slime_loss.py`. slime's functions
get the logits of the real learner, in float32 on one rank.
"""

from __future__ import annotations

import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.advantages import PreStepValues
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import TrainStep, rank_batches
from miles_async.config.schema import RunConfig, TinyModel
from miles_async.losses.functions import LossFunctions
from miles_async.losses.policy import SUMS, objective_sum
from miles_async.rollout.contract import flat_args
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.learning import gradients_now, learning
from tests.torch.recorded_losses.record import functions_of

CHECKOUT = os.environ.get("SLIME_CHECKOUT")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="SLIME_CHECKOUT names no checkout of github.com/THUDM/slime")

PROMPTS, SAMPLES = 4, 4
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.2, "loss_aggregation": "sequence_mean"}
GSPO = {"advantage_estimator": "gspo"}
SUPERVISED = {"loss_type": "sft_loss"}
MIS: Mapping[str, Any] = {
    "use_tis": True,
    "custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    "tis_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "tis_batch_normalize": False,
    "use_rs": False,
    "rs_lower_bound": 0.5,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
}
"""The arguments of slime's example of mismatch correction."""


def of_the_example(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our settings and slime's arguments with the function of the example."""
    theirs = {**MIS, **changes}
    own = {name: value for name, value in theirs.items() if name not in ("custom_tis_function_path", "use_tis")}
    path = "miles_async.compat.slime.mismatch.compute_mis_weights_with_cp"
    return {"off_policy_correction": "tis", "custom_tis_function_path": path, "custom_args": own}, theirs


CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "clip-higher": ({"eps_clip_high": 0.28}, {"eps_clip_high": 0.28}),
    "KL loss k1": (KL, KL),
    "KL loss low_var_kl": ({**KL, "kl_loss_type": "low_var_kl"}, {**KL, "kl_loss_type": "low_var_kl"}),
    "TIS": ({"off_policy_correction": "tis"}, {"use_tis": True}),
    "mean over tokens": ({"loss_aggregation": "token_mean"}, {"calculate_per_token_loss": True}),
    "entropy": ({"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    "Dr. GRPO's advantages": ({"grpo_std_normalization": False}, {"grpo_std_normalization": False}),
    "raw rewards": ({"rewards_normalization": False}, {"rewards_normalization": False}),
    "dual clip": ({"eps_clip_c": 1.1, "eps_clip_high": 10.0}, {"eps_clip_c": 1.1, "eps_clip_high": 10.0}),
    "TIS with a lower bound": (
        {"off_policy_correction": "tis", "tis_clip_low": 0.8},
        {"use_tis": True, "tis_clip_low": 0.8},
    ),
    "OPSM": ({"use_opsm": True}, {"use_opsm": True}),
    "OPSM with GSPO": ({"use_opsm": True, "advantage_estimator": "gspo", **CLIP}, {"use_opsm": True, **GSPO}),
    "dual clip with GSPO": ({"eps_clip_c": 1.01, "advantage_estimator": "gspo", **CLIP}, {"eps_clip_c": 1.01, **GSPO}),
    "sequence TIS": ({"off_policy_correction": "sequence"}, {**MIS, "tis_level": "sequence"}),
    "geometric TIS": (
        {"off_policy_correction": "geometric", "tis_clip_low": 0.8, "tis_clip": 1.5},
        {**MIS, "tis_level": "geometric", "tis_mode": "clip", "tis_lower_bound": 0.8, "tis_upper_bound": 1.5},
    ),
    "masked tokens": (
        {"off_policy_correction": "tis", "rejection_level": "token"},
        {**MIS, "tis_mode": "mask", "tis_lower_bound": 0.5},
    ),
    "masked sequences": (
        {"off_policy_correction": "tis", "rejection_level": "geometric", "rejection_band": (0.7, 1.6)},
        {**MIS, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.7, "rs_upper_bound": 1.6},
    ),
    "veto": (
        {"off_policy_correction": "tis", "rejection_level": "token", "rejection_veto": 0.3},
        {**MIS, "use_rs": True, "rs_level": "token", "rs_veto_threshold": 0.3},
    ),
    "slime's example of mismatch correction": of_the_example(
        use_rs=True, rs_level="geometric", rs_lower_bound=0.5, rs_veto_threshold=0.3, tis_batch_normalize=True
    ),
    "the example with weights of sequences": of_the_example(
        tis_level="sequence", tis_mode="clip", tis_lower_bound=0.5, tis_batch_normalize=True
    ),
    "the example with masks": of_the_example(tis_mode="mask", tis_lower_bound=0.6),
    "gspo": ({"advantage_estimator": "gspo", **CLIP}, GSPO),
    "cispo": ({"advantage_estimator": "cispo", **CLIP}, {"advantage_estimator": "cispo"}),
    "supervised": (SUPERVISED, SUPERVISED),
    "supervised, mean over tokens": (
        {**SUPERVISED, "loss_aggregation": "token_mean"},
        {**SUPERVISED, "calculate_per_token_loss": True},
    ),
}
"""Our settings and slime's arguments, where they are not the defaults."""
SLIME_DEFAULTS: Mapping[str, Any] = {
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "n_samples_per_prompt": SAMPLES,
    "rollout_batch_size": PROMPTS,
    "loss_type": "policy_loss",
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "log_probs_chunk_size": -1,
    "allgather_cp": False,
    "rollout_temperature": 0.8,
    "rollout_top_p": 1.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0,
    "custom_tis_function_path": None,
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
}


class SlimeLoss:
    """slime's loss, as a function of `custom_loss_function_path`."""

    def __init__(self, slime: ModuleType, arguments: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self._loss_function, self._arguments = slime.loss_function, Namespace(**{**SLIME_DEFAULTS, **arguments})
        samples = [sample for group in groups for sample in group]
        rewarded = [SimpleNamespace(get_reward_value=lambda _, reward=sample.reward: reward) for sample in samples]
        manager = SimpleNamespace(args=self._arguments, custom_reward_post_process_func=None)
        _, advantages = slime.post_process_rewards(manager, rewarded)
        self._advantages = {tuple(sample.tokens): one for sample, one in zip(samples, advantages, strict=True)}

    def __call__(
        self, args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss before Megatron divides it by the samples, or the tokens, of the step."""
        # Masks of our micro-batches end with the last trained token of a sample.
        tokens = [next(one for one in self._advantages if one[: len(part)] == tuple(part.tolist()))
                  for part in batch["unconcat_tokens"]]  # fmt: skip
        batch["advantages"] = [
            torch.full((length,), self._advantages[one])
            for one, length in zip(tokens, batch["response_lengths"], strict=True)
        ]
        batch["rollout_mask_sums"] = [mask.sum() for mask in batch["loss_masks"]]
        loss, _, log = self._loss_function(self._arguments, batch, 1, 1, logits)
        assert log["keys"][0] == "loss"
        return loss, {}


@pytest.fixture(scope="module")
def slime() -> Iterator[ModuleType]:
    """slime's modules. Its package for Megatron imports Transformer Engine, which the loss does not need."""
    assert CHECKOUT is not None
    folder = Path(CHECKOUT)
    before, ours = set(sys.modules), sys.modules.pop("examples", None)
    for name in ("slime.backends.megatron_utils", "examples"):  # this project has examples, too
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
    sys.path.insert(0, CHECKOUT)
    try:
        loss = import_module("slime.backends.megatron_utils.loss")
        names = functions_of(folder / "slime/ray/rollout.py", {"_post_process_rewards"}, {"torch": torch})
        vars(loss)["post_process_rewards"] = names["_post_process_rewards"]
        # Compiled functions compute the same; compiling them takes minutes.
        with torch.compiler.set_stance("force_eager"):
            yield loss
    finally:
        sys.path.remove(CHECKOUT)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("slime", "examples"):
                del sys.modules[name]
        sys.modules.pop("examples", None)
        if ours is not None:
            sys.modules["examples"] = ours


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy and the reference model, with different weights."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    shape = TinyModel(num_layers=2, hidden_size=64, ffn_hidden_size=128)
    for seed, name in enumerate(("policy", "reference")):
        create_tiny_model(shape, root / name, seed=seed)
    return root


def groups() -> list[Group]:
    """Responses of uneven lengths, one with tokens that are not trained. Engines gave their tokens probabilities from a
    fifth to twice those of the policy."""
    draw = random.Random(0)
    batch = [
        Group(
            Sample(
                index=SAMPLES * number + i,
                tokens=[draw.randrange(256) for _ in range(5 + 3 * i + number)],
                response_length=3 + i,
                rollout_log_probs=[-4.5 - 2.5 * draw.random() for _ in range(3 + i)],
                reward=draw.random(),
            )
            for i in range(SAMPLES)
        )
        for number in range(PROMPTS)
    ]
    for group in batch:
        group[2].loss_mask = [1, 0, 0, 1, 1]
    return batch


def step_result(
    learner: MegatronLearner, step: TrainStep, values: PreStepValues
) -> tuple[float, float, dict[str, Tensor]]:
    """The loss of a step, the share of its tokens that are clipped, and its gradients."""
    sums, *_ = learner._policy_gradients(step, values)
    clipped = float(sums[:, SUMS.index("clipped")].sum()) / step.total_tokens
    return -objective_sum(sums) / step.total_tokens, clipped, gradients_now(learner)


def use_loss(learner: MegatronLearner, run: RunConfig, loss: SlimeLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("loss_of_slime")
    vars(module)["loss"] = lambda args, batch, logits, sum_of_sample_mean: loss(args, batch, logits, sum_of_sample_mean)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    custom = run.model_copy(update={
        "learner": run.learner.model_copy(update={"loss_type": "custom_loss"}),
        "algorithm": run.algorithm.model_copy(update={"custom_loss_function_path": "loss_of_slime.loss"}),
    })  # fmt: skip
    learner._functions = LossFunctions.load(custom, flat_args(custom))
    learner._settings = custom.learner


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_loss_and_the_gradients_of_slime(
    slime: ModuleType, models: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = CASES[case]
    run = run_config(
        ref_load=str(models / "reference"),
        rollout_temperature=0.8,
        rollout_batch_size=PROMPTS,
        n_samples_per_prompt=SAMPLES,
        num_steps_per_rollout=2,
        max_tokens_per_gpu=60,
        lr=5e-3,
        **ours,
    )
    batch = groups()
    with learning(models / "policy", run) as learner:
        learner._functions = LossFunctions.load(run, flat_args(run))
        [[first, second]] = rank_batches(batch, run, 1)
        before_first, before_second = learner._pre_step_values(0, [first, second])
        learner._policy_step(first, before_first, lambda: None).apply()
        loss, clipped, gradients = step_result(learner, second, before_second)
        if ours.get("loss_type") != "sft_loss":
            assert 0.05 < clipped < 0.95, "the first step moved the policy so far that some tokens are clipped"
        use_loss(learner, run, SlimeLoss(slime, theirs, batch), monkeypatch)
        their_loss, _, their_gradients = step_result(learner, second, before_second)
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    apart = max((gradients[name] - one).abs().max().item() for name, one in their_gradients.items()) / largest
    print(f"{case}: loss {loss:.9f}, of slime {their_loss:.9f}; gradients differ by {apart:.1e} of the largest")
    assert largest > 1e-3
    assert loss == pytest.approx(their_loss, rel=1e-5, abs=1e-7)
    assert gradients.keys() == their_gradients.keys()
    assert apart < 1e-5
