"""Settings of the learner, the loss, the tiny model and the warm start change what is learned."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import CheckpointFunction

from miles_async.adapters.megatron.model import factory as model
from miles_async.adapters.megatron.model.environment import ATTENTION, environment
from miles_async.adapters.megatron.model.process_groups import destroy_process_groups
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.warm_start import warm_start
from miles_async.adapters.storage.warm_starts import Example
from miles_async.adapters.system.network_ports import free_port
from miles_async.adapters.weights.source import WeightSource
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import Learner, RunConfig, TinyModel
from miles_async.errors import UserError
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.learning import TINY, learning, weights_of
from workers.learner import LearnerRank

SMALL = TINY.model_dump(exclude_unset=True)
BASE = {
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "adam_beta2": 0.9,
    "weight_decay": 0.01,
    "num_rollout": 4,
    "num_steps_per_rollout": 2,
    "off_policy_correction": "tis",
}


def config(**settings: Any) -> RunConfig:
    return run_config(**BASE | settings)


def batch(seed: int) -> list[Group]:
    """Two groups of two; the engines' log-probabilities lie on both sides of the model's."""
    draw = random.Random(seed)
    return [
        Group(
            Sample(
                index=2 * g + i,
                tokens=[draw.randrange(256) for _ in range(8)],
                response_length=4,
                rollout_log_probs=[-7.0 + 3.0 * draw.random() for _ in range(4)],
                reward=float(i),
            )
            for i in range(2)
        )
        for g in range(2)
    ]


def learned(tiny: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """The weights after two batches of two optimizer steps."""
    run = config(**settings)
    with learning(tiny, run) as learner:
        for rollout in range(2):
            # Two passes over the same samples, so that the second one has a ratio that can be clipped.
            [steps] = rank_batches(batch(rollout) * 2, run, 1)
            assert learner.train(rollout, steps).finite
        return weights_of(learner)


@pytest.fixture(scope="module")
def usual(tiny: Path) -> dict[str, torch.Tensor]:
    return learned(tiny)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_settings_learn_the_same(tiny: Path, usual: dict[str, torch.Tensor]) -> None:
    assert same(learned(tiny), usual)


CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "eps_clip": (1e-4, {}),
    "eps_clip_high": (1e-4, {}),
    "sapo_temperatures": ([0.1, 3.0], {"policy_objective": "sapo"}),
    "topr_positive_weight": (0.5, {"policy_objective": "topr"}),
    "topr_negative_weight": (0.5, {"policy_objective": "topr"}),
    "kimi15_tau": (10.0, {"policy_objective": "kimi15"}),
    "dppo_threshold": (1e-3, {"policy_objective": "dppo", "off_policy_correction": "none"}),
    "m2po_budget": (10.0, {"policy_objective": "m2po", "off_policy_correction": "none"}),
    "off_policy_correction": ("none", {}),
    "icepop_band": ([0.5, 1.5], {"off_policy_correction": "icepop"}),
    "eps_clip_c": (1.0001, {}),
    "tis_clip": (0.3, {}),
    "tis_clip_low": (1.5, {}),
    "rejection_level": ("token", {}),
    "rejection_band": ([0.9, 1.1], {"rejection_level": "token"}),
    "rejection_veto": (0.5, {}),
    "use_opsm": (True, {}),
    "opsm_delta": (10.0, {"use_opsm": True}),
    "use_kl_loss": (True, {"kl_loss_coef": 1.0}),
    "kl_loss_coef": (1.0, {"use_kl_loss": True}),
    "kl_loss_type": ("k3", {"use_kl_loss": True, "kl_loss_coef": 1.0}),
    "kl_coef": (1.0, {}),
    "entropy_coef": (0.1, {}),
    "use_rollout_logprobs": (True, {}),
    "lr_warmup_fraction": (0.5, {"lr_decay_steps": 6}),
    "loss_aggregation": ("constant", {}),
    "lr": (2e-3, {}),
    "lr_warmup_steps": (3, {}),
    "lr_decay_style": ("linear", {}),
    "weight_decay": (0.5, {}),
    "adam_beta1": (0.5, {}),
    "adam_beta2": (0.5, {}),
    "clip_grad": (1e-3, {}),
    "loss_type": ("sft_loss", {}),
}
"""Another value of a setting, and the settings without which it has no effect."""


@pytest.mark.parametrize("name", CHANGES)
def test_another_value_of_a_setting_learns_other_weights(tiny: Path, usual: dict[str, torch.Tensor], name: str) -> None:
    value, given = CHANGES[name]
    before = learned(tiny, **given) if given else usual
    assert not same(learned(tiny, **given, **{name: value}), before)


@pytest.mark.parametrize(
    "setting",
    [
        {"off_policy_correction": "decoupled"},
        {"off_policy_correction": "icepop", "icepop_band": [0.2, 4.0]},
        {"off_policy_correction": "sequence"},
        {"off_policy_correction": "geometric"},
        {"advantage_estimator": "gspo"},
        {"advantage_estimator": "cispo"},
        {"policy_objective": "gmpo"},
        {"policy_objective": "sapo"},
        {"policy_objective": "dppo", "off_policy_correction": "none"},
        {"policy_objective": "m2po", "off_policy_correction": "none"},
    ],
    ids=lambda setting: next(iter(setting.values())),
)
def test_another_estimator_or_correction_learns_other_weights(
    tiny: Path, usual: dict[str, torch.Tensor], setting: dict[str, Any]
) -> None:
    assert not same(learned(tiny, **setting), usual)


def test_a_step_reports_the_mismatch_of_engine_and_learner(tiny: Path) -> None:
    run = config(get_mismatch_metrics=True)
    with learning(tiny, run) as learner:
        [[step, _]] = rank_batches(batch(0) * 2, run, 1)
        metrics = learner.train(0, [step]).metrics
    gaps = [metrics[f"mismatch_{name}"] for name in ("kl", "k3_kl", "log_ppl_abs_diff")]
    assert metrics["mismatch_training_log_ppl"] == pytest.approx(metrics["mismatch_rollout_log_ppl"] + gaps[0])
    assert gaps[1] > 0
    assert metrics["logprob_gap_mean"] >= gaps[2] > 0


def test_the_reference_model_may_be_another_checkpoint(tiny: Path, tmp_path: Path) -> None:
    create_tiny_model(TINY, tmp_path / "other", seed=2)
    kl = {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k3"}
    own = learned(tiny, **kl)
    assert not same(learned(tiny, **kl, ref_load=str(tmp_path / "other")), own)
    assert not same(learned(tiny, **kl | {"kl_loss_type": "k1"}), own)


def test_each_role_is_built_and_computes_under_its_own_environment(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine's variables, which Megatron would set for all of them when it builds the first."""
    for name, value in {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)

    def variables() -> list[str | None]:
        return [os.environ.get(name) for name in ATTENTION]

    built: list[list[str | None]] = []
    ran: dict[str, list[list[str | None]]] = {}

    def noting(settings: Learner, checkpoint: str) -> Any:
        built.append(variables())
        return load_chunks(settings, checkpoint)

    load_chunks = model._load_chunks
    monkeypatch.setattr(model, "_load_chunks", noting)
    run = config(
        advantage_estimator="ppo",
        kl_coef=0.1,
        ref_env_vars={"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"},
        critic_env_vars={"NVTE_FUSED_ATTN": "1"},
    )
    policy, critic, reference = ["1", "0", None], ["1", "1", None], ["0", "0", "1"]
    with learning(tiny, run) as learner:
        assert learner._reference is not None
        assert learner._critic is not None
        roles: dict[str, Any] = {
            "policy": learner._model,
            "critic": learner._critic.model,
            "reference": learner._reference,
        }
        for role, own in roles.items():
            own.chunks[0].register_forward_pre_hook(lambda *_, role=role: ran.setdefault(role, []).append(variables()))
        learner.train(0, rank_batches(batch(0), run, 1)[0])
    assert built == [policy, critic, reference]
    assert {role: set(map(tuple, seen)) for role, seen in ran.items()} == {
        "policy": {tuple(policy)},
        "critic": {tuple(critic)},
        "reference": {tuple(reference)},
    }
    assert variables() == policy


def test_transformer_engine_is_refused_where_it_cannot_run(tiny: Path) -> None:
    refused = run_config(transformer_impl="transformer_engine")
    try:
        with pytest.raises(UserError, match="Transformer Engine needs a GPU: set transformer_impl to local"):
            MegatronLearner(refused, str(tiny), 0, 1, "127.0.0.1", free_port())
    finally:
        destroy_process_groups()
    with learning(tiny, run_config(transformer_impl="local")) as learner:
        assert learner.logprobs([[1, 2, 3]])


def test_transformer_engine_is_notified_of_changed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformer_engine.pytorch.attention.dot_product_attention"
    kept = {"backend_selection_requires_update": False}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_attention_backends=kept))
    with environment({}):
        assert not kept["backend_selection_requires_update"]
    with environment({"NVTE_FLASH_ATTN": "0"}):
        assert kept["backend_selection_requires_update"]
        kept["backend_selection_requires_update"] = False
    assert kept["backend_selection_requires_update"]


def test_sft_examples_lower_their_negative_log_likelihood(tiny: Path) -> None:
    run = config(loss_type="sft_loss", lr=1e-2, num_rollout=6, num_steps_per_rollout=1)
    sft_examples = batch(0)
    with learning(tiny, run) as learner:
        sequences = [sample.tokens for group in sft_examples for sample in group]
        before = [logprob for row in learner.logprobs(sequences) for logprob in row[-4:]]
        losses = []
        for rollout in range(6):
            [steps] = rank_batches(sft_examples, run, 1)
            losses.append(learner.train(rollout, steps).metrics["loss"])
    assert losses[0] == pytest.approx(-sum(before) / len(before), abs=1e-4)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "setting, theirs",
    [
        ("num_layers", "num_hidden_layers"),
        ("hidden_size", "hidden_size"),
        ("ffn_hidden_size", "intermediate_size"),
        ("num_attention_heads", "num_attention_heads"),
        ("num_query_groups", "num_key_value_heads"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("init_std", "initializer_range"),
    ],
)
def test_the_tiny_model_has_the_configured_shape(tmp_path: Path, setting: str, theirs: str) -> None:
    shape = SMALL | {"num_attention_heads": 4, "num_query_groups": 2, "max_position_embeddings": 64, "init_std": 0.02}
    shape[setting] *= 2
    create_tiny_model(TinyModel(**shape), tmp_path / "model", seed=1)
    assert json.loads((tmp_path / "model" / "config.json").read_text())[theirs] == shape[setting]


def taught(cache: Path, **settings: Any) -> tuple[Path, int]:
    """The model after a warm start whose first check succeeds, and the number of its steps."""
    short = {"warm_start_max_steps": 8, "warm_start_check_every": 2, "warm_start_accuracy": [0.0, 1.0]}
    tiny = {f"tiny_{name}": value for name, value in SMALL.items()}
    run = config(**tiny, **short | {"warm_start_batch_size": 4, "cache_dir": str(cache)} | settings)
    problems = [Example(f"{i}=", str(i)) for i in range(8)]
    made = warm_start(run, problems, problems, lambda step, loss, accuracy: None)
    return Path(made.path), made.steps


@pytest.mark.parametrize(
    "setting",
    [{"warm_start_lr": 1e-4}, {"warm_start_batch_size": 5}, {"seed": 7}],
    ids=lambda setting: next(iter(setting)),
)
def test_another_seed_of_the_warm_start_gives_another_model(tmp_path: Path, setting: dict[str, Any]) -> None:
    models = [taught(tmp_path / str(i), **each)[0] for i, each in enumerate(({}, {}, setting))]
    assert all(path.parent == tmp_path / str(i) for i, path in enumerate(models))
    usual, again, other = ((path / "model.safetensors").read_bytes() for path in models)
    assert usual == again != other


def test_a_warm_start_is_checked_at_its_interval_and_after_its_last_step(tmp_path: Path) -> None:
    assert taught(tmp_path)[1] == 2
    assert taught(tmp_path, warm_start_check_every=4)[1] == 4
    with pytest.raises(UserError, match="for 6 steps"):
        taught(tmp_path, warm_start_max_steps=6, warm_start_accuracy=[0.99, 1.0], warm_start_lr=1e-5)


@pytest.mark.parametrize(
    "setting",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
    ids=["selective", "feed-forward layers", "uniform", "block"],
)
def test_recomputed_activations_are_equal_and_not_stored(
    tiny: Path, usual: dict[str, torch.Tensor], setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = []
    backward = CheckpointFunction.backward

    def counted(*args: Any) -> Any:
        again.append(args)
        return backward(*args)

    monkeypatch.setattr(CheckpointFunction, "backward", counted)
    assert same(learned(tiny, **setting), usual)
    assert len(again) == 4, "one layer, in each of the steps"


@pytest.mark.usefixtures("free_again")
async def test_the_configured_steps_are_profiled(tiny: Path, tmp_path: Path) -> None:
    asked = {"use_pytorch_profiler": True, "profile_step_start": 0, "profile_step_end": 1}
    run = config(**asked, profile_dir=str(tmp_path / "profiles"), deterministic_mode=True)

    rank = LearnerRank(run, 0, 1, tmp_path)
    await rank.start(str(tiny), "127.0.0.1", free_port())
    assert torch.are_deterministic_algorithms_enabled()
    for rollout in range(2):
        await rank.receive_batch(rollout, [], rank_batches(batch(rollout), run, 1)[0])
        await rank.train(rollout)
    await rank._run(rank._model_thread, rank._learner.close)
    torch.use_deterministic_algorithms(False)
    files = list((tmp_path / "profiles").iterdir())
    assert [file.name for file in files] == ["rollout_0000000_rank_0.json.gz"]
    assert any(
        "mm" in event.get("name", "") for event in json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    )


@pytest.fixture
def free_again() -> Iterator[None]:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("free_again")
async def test_a_learner_rank_stays_on_its_cores_and_takes_its_threads(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))

    async def threads_of(**settings: Any) -> int:
        rank = LearnerRank(config(**settings), 0, 1, tmp_path)
        return await rank._run(rank._model_thread, torch.get_num_threads)

    assert await threads_of(learner_threads=3) == 3
    assert await threads_of(learner_cpus=[core]) == 1
    assert os.sched_getaffinity(0) == {core}


def test_weights_take_their_buffers_checks_and_timeout(tmp_path: Path) -> None:
    chosen = config(update_weight_buffer_size=7, check_weight_update_equal=True, update_weight_timeout_seconds=3.0)
    source = WeightSource([], tmp_path, chosen.weights)
    assert (source.bucket, source.verify_all, source.timeout) == (7, True, 3.0)
    usual = WeightSource([], tmp_path, config().weights)
    assert (usual.bucket, usual.verify_all) == (512 << 20, False)
