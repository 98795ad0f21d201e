"""Functions of a user compute the loss on the real learner, on one rank and with tensor and context parallelism.

Run as a script this file is those ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port, free_port
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig, TinyModel
from miles_async.errors import UserError
from miles_async.losses.functions import LossFunctions
from miles_async.rollout.contract import flat_args
from miles_async.types import Group
from tests.configuration import run_config
from tests.stack.forked_ranks import fork_ranks, run_ranks
from tests.stack.learning import gradients_of, uneven_groups
from tests.stack.test_learner_parallel import most_apart

HERE = "tests.stack.user_losses"
OF_TOKENS = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.loss_of_tokens"}
OF_LOGITS = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.loss_of_logits"}
PARTS = {
    "custom_advantage_function_path": f"{HERE}.advantages_of_rewards",
    "custom_tis_function_path": f"{HERE}.truncated",
    "custom_pg_loss_reducer_function_path": f"{HERE}.mean_of_samples",
}
OF_USERS: dict[str, dict[str, Any]] = {"tokens": OF_TOKENS, "logits": OF_LOGITS, "parts": PARTS}
FUNCTIONS: dict[str, dict[str, Any]] = {"none": {}} | OF_USERS
BY_MASKS = {"masked": {"rollout_data_postprocess_path": f"{HERE}.later_tokens_only"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "context parallel": {"context_parallel_size": 2},
    "data parallel": {},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
MEANS = ("token_mean", "sequence_mean")
CASES = [
    (layout, functions, MEANS[(row + column) % 2])
    for row, layout in enumerate(LAYOUTS)
    for column, functions in enumerate(OF_USERS)
]
"""Each two of a layout, functions and a mean are in a case together."""
BUILT_IN = [("one rank", "none", mean) for mean in MEANS]
MASKED = [(layout, "masked", "token_mean") for layout in ("one rank", "data parallel")]


FIXED: dict[str, Any] = {
    "lr": 1e-4,
    "max_tokens_per_gpu": 40,
    "rollout_temperature": 0.8,
    "grpo_std_normalization": False,
    "off_policy_correction": "tis",
}


def config(layout: str, functions: str, mean: str) -> RunConfig:
    ranks = 1 if layout == "one rank" else 2
    return run_config(
        actor_num_gpus_per_node=ranks,
        loss_aggregation=mean,
        **FIXED | LAYOUTS[layout] | (FUNCTIONS | BY_MASKS)[functions],
    )


def groups() -> list[Group]:
    """Responses of uneven lengths, one of which has tokens in its middle that are not trained."""
    batch = uneven_groups(0)
    batch[1][2].loss_mask = [1, 0, 0, 1, 1]
    return batch


def learner_of(root: Path, run: RunConfig, rank: int, ranks: int, port: int) -> MegatronLearner:
    functions = LossFunctions.load(run, flat_args(run))
    return MegatronLearner(run, str(root / "model"), rank, ranks, "127.0.0.1", port, functions)


def learn(rank: int, root: Path, layout: str, ports: dict[tuple[str, str, str], int]) -> None:
    """Takes a step in each case of a layout. Each learner has its own port, because ranks start at different times."""
    torch.set_num_threads(1)
    ranks = 1 if layout == "one rank" else 2
    for case, port in ports.items():
        run, out = config(*case), root.joinpath(*case)
        learner = learner_of(root, run, rank, ranks, port)
        [step] = rank_batches(groups(), run, ranks)[rank]
        gradients = gradients_of(learner, step)
        metrics = dict(learner.train(0, [step]).metrics)
        learner.close()
        if rank == 0:
            out.mkdir(parents=True)
            save_file(gradients, out / "gradients.safetensors")
            (out / "metrics.json").write_text(json.dumps(metrics))


def trained_once(root: Path, run: RunConfig, batch: list[Group] | None = None) -> dict[str, torch.Tensor]:
    """The gradients of a step on one rank."""
    learner = learner_of(root, run, 0, 1, free_port())
    try:
        return gradients_of(learner, rank_batches(batch or groups(), run, 1)[0][0])
    finally:
        learner.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("functions")
    create_tiny_model(TinyModel(num_layers=2, hidden_size=32, ffn_hidden_size=64), root / "model", seed=1)
    with run_ranks("tests.stack.test_loss_functions", root):
        pass
    return root


def metrics_of(out: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((out / "metrics.json").read_text())
    return found


@pytest.mark.parametrize("layout, functions, mean", CASES)
def test_functions_of_the_user_compute_the_gradients_of_the_same_built_in_loss(
    runs: Path, layout: str, functions: str, mean: str
) -> None:
    expected, found = runs / "one rank/none" / mean, runs / layout / functions / mean
    assert most_apart(found / "gradients.safetensors", expected / "gradients.safetensors") < 1e-5
    ours, theirs = metrics_of(found), metrics_of(expected)
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-5)
    if mean == "token_mean":
        assert ours["custom_weight"] == pytest.approx(theirs["importance_weight"], rel=1e-5)


@pytest.mark.parametrize(
    "setting, other",
    [
        ("custom_advantage_function_path", "opposite_advantages"),
        ("custom_tis_function_path", "half"),
        ("custom_pg_loss_reducer_function_path", "half_of_the_sum"),
    ],
    ids=list(PARTS),
)
def test_another_function_of_a_part_learns_other_weights(runs: Path, setting: str, other: str) -> None:
    """Gradients of the opposite sign or of half the size."""
    usual = load_file(runs / "one rank/parts/token_mean/gradients.safetensors")
    found = trained_once(
        runs, run_config(loss_aggregation="token_mean", **FIXED, **PARTS | {setting: f"{HERE}.{other}"})
    )
    factor = -1.0 if other == "opposite_advantages" else 0.5
    assert all(torch.allclose(found[name], factor * gradient, atol=1e-6) for name, gradient in usual.items())


@pytest.mark.parametrize("functions", list(FUNCTIONS))
def test_advantages_that_a_function_changes_afterwards_are_those_of_the_loss(runs: Path, functions: str) -> None:
    """Gradients of the opposite sign."""
    usual = load_file(runs / "one rank/none/token_mean/gradients.safetensors")
    settings = {**FIXED, **FUNCTIONS[functions], "loss_aggregation": "token_mean"}
    found = trained_once(runs, run_config(**settings, rollout_data_postprocess_path=f"{HERE}.turned_around"))
    assert all(torch.allclose(found[name], -gradient, atol=1e-6) for name, gradient in usual.items())


def test_tokens_that_a_function_masks_are_in_no_form_of_the_loss(runs: Path) -> None:
    def learned(**settings: Any) -> dict[str, torch.Tensor]:
        return trained_once(runs, run_config(loss_aggregation="token_mean", **FIXED, **settings))

    masked = {
        name: learned(rollout_data_postprocess_path=f"{HERE}.later_tokens_only", **settings)
        for name, settings in FUNCTIONS.items()
    }
    assert most_different(masked["none"], learned()) > 1e-3
    assert all(most_different(masked["none"], other) < 1e-5 for other in masked.values())


def without_first_trained_tokens() -> list[Group]:
    batch = groups()
    for sample in (one for group in batch for one in group):
        mask = list(sample.loss_mask or [1] * sample.response_length)
        mask[mask.index(1)] = 0
        sample.loss_mask = mask
    return batch


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage_estimator": "gspo", "off_policy_correction": "none"},
        {"policy_objective": "gmpo"},
        {"policy_objective": "m2po", "off_policy_correction": "none"},
        {"off_policy_correction": "sequence"},
        {"rejection_level": "geometric", "rejection_band": [0.9, 1.1]},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_a_token_that_a_function_masks_trains_as_one_that_the_data_exclude(
    runs: Path, settings: dict[str, Any]
) -> None:
    """Neither ratios of sequences nor the mean over tokens contain it."""
    usual = FIXED | settings | {"loss_aggregation": "token_mean"}
    masked = trained_once(runs, run_config(**usual, rollout_data_postprocess_path=f"{HERE}.later_tokens_only"))
    excluded = trained_once(runs, run_config(**usual), without_first_trained_tokens())
    assert most_different(masked, trained_once(runs, run_config(**usual))) > 1e-3
    assert most_different(masked, excluded) < 1e-5


def test_masks_of_a_function_mean_the_same_on_several_data_parallel_ranks(runs: Path) -> None:
    one, two = (load_file(runs.joinpath(*case) / "gradients.safetensors") for case in MASKED)
    assert most_different(one, two) < 1e-5


def most_different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_function_that_takes_the_masks_away_is_refused(runs: Path) -> None:
    path = f"{HERE}.without_masks"
    with pytest.raises(UserError, match=f"^rollout_data_postprocess_path {path} .*leave rollout_data.'loss_masks'."):
        trained_once(runs, run_config(**FIXED, rollout_data_postprocess_path=path))


@pytest.mark.parametrize(
    "function, sentence",
    [
        ("of_another_shape", r"returned a tensor of shape \[\] as the loss: return a tensor of shape \[\d+\]"),
        ("raising", "raised KeyError: 'weights': correct the function"),
        ("loss_of_nobody", "module tests.stack.user_losses has no function 'loss_of_nobody'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_in_one_sentence(runs: Path, function: str, sentence: str) -> None:
    path = f"{HERE}.{function}"
    run = run_config(loss_type="custom_loss", custom_loss_function_path=path, max_tokens_per_gpu=40)
    with pytest.raises(UserError, match=rf"^custom_loss_function_path '?{path}'?:? .*{sentence}"):
        trained_once(runs, run)


if __name__ == "__main__":
    for name in LAYOUTS:
        claimed = {case: claim_port() for case in [*BUILT_IN, *CASES, *MASKED] if case[0] == name}
        numbers = {case: port.number for case, port in claimed.items()}
        fork_ranks(1 if name == "one rank" else 2, learn, Path(sys.argv[1]), name, numbers)
