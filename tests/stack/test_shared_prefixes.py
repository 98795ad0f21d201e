"""The gradients of a real learner do not depend on whether common prefixes and logits are computed once or in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.utils import unwrap_model

from miles_async.adapters.megatron.model import flex_attention
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.sglang.launch import WITHOUT_COMPILER
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import Algorithm, RunConfig, TinyModel
from miles_async.losses.objectives.objective import LossAggregation
from tests.configuration import run_config
from tests.stack.learning import gradients_of, learning, prompted_groups

ESTIMATORS = get_args(Algorithm.model_fields["advantage_estimator"].annotation)
AGGREGATIONS = get_args(LossAggregation)
OBJECTIVES = ("ppo", "gspo", "cispo", "gmpo", "sapo", "dppo", "m2po", "reinforce", "topr", "kimi15")
VARIANTS: list[dict[str, Any]] = [
    *(
        {"advantage_estimator": estimator, "loss_aggregation": aggregation}
        for estimator in ESTIMATORS
        for aggregation in AGGREGATIONS
    ),
    {"off_policy_correction": "tis"},
    *({"policy_objective": objective, "off_policy_correction": "none"} for objective in OBJECTIVES),
    {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    create_tiny_model(TinyModel(num_layers=2, hidden_size=64, ffn_hidden_size=128), path, seed=1)
    return path


def config(tiny: Path, **settings: Any) -> RunConfig:
    return run_config(max_tokens_per_gpu=60, ref_load=str(tiny), **settings)


def gradients(learner: MegatronLearner, run: RunConfig, *, share_prefixes: bool) -> dict[str, torch.Tensor]:
    [[step]] = rank_batches(prompted_groups(0), run, 1, share_prefixes=share_prefixes)
    computed = sum(batch.computed_tokens for batch in step.micro_batches)
    assert (computed < sum(len(batch.tokens) for batch in step.micro_batches)) is share_prefixes
    return gradients_of(learner, step)


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest gradient."""
    assert ours.keys() == theirs.keys()
    largest = max(tensor.abs().max().item() for tensor in theirs.values())
    assert largest > 0
    return max((tensor - theirs[name]).abs().max().item() for name, tensor in ours.items()) / largest


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: " ".join(map(str, variant.values())))
def test_shared_prefixes_leave_the_gradient_unchanged(tiny: Path, variant: dict[str, Any]) -> None:
    run = config(tiny, **variant)
    with learning(tiny, run) as learner:
        shared, plain = (gradients(learner, run, share_prefixes=share) for share in (True, False))
    assert difference(shared, plain) < 1e-5


def test_logits_in_chunks_leave_the_gradient_unchanged(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tiny, entropy_coef=0.01)
    with learning(tiny, run) as learner:
        whole = gradients(learner, run, share_prefixes=True)
        layer = learner._model.output_layer
        assert layer is not None
        monkeypatch.setattr(layer, "chunk_entries", 7 * layer.columns)
        assert difference(gradients(learner, run, share_prefixes=True), whole) < 1e-5


def test_flex_attention_leaves_the_gradient_unchanged(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tiny, entropy_coef=0.01, share_prefixes=True)
    with learning(tiny, run) as learner:
        plain = gradients(learner, run, share_prefixes=False)
    monkeypatch.setattr(flex_attention, "has_gradients", lambda: True)
    # torch refuses to compute gradients on CPUs, because it compiles no kernel for them. Without a kernel it can.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    # As in a learner's process on a machine without a GPU; torch's own setting makes it an error to compile nothing.
    for name, value in WITHOUT_COMPILER.items():
        monkeypatch.setenv(name, value)
    with learning(tiny, run) as learner:
        attention = unwrap_model(learner._model.chunks[0]).decoder.layers[0].self_attention.core_attention
        assert isinstance(attention, flex_attention.FlexAttention)
        assert learner.shares_prefixes
        assert difference(gradients(learner, run, share_prefixes=True), plain) < 1e-5


@pytest.mark.parametrize("setting", [None, False])
def test_a_gpu_keeps_its_attention_unless_shared_prefixes_are_set(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, setting: bool | None
) -> None:
    monkeypatch.setattr(flex_attention, "has_gradients", lambda: True)
    with learning(tiny, config(tiny, share_prefixes=setting)) as learner:
        attention = unwrap_model(learner._model.chunks[0]).decoder.layers[0].self_attention.core_attention
        assert not isinstance(attention, flex_attention.FlexAttention)
        assert not learner.shares_prefixes


def test_local_layers_on_a_gpu_take_positions_and_never_read_the_bounds_of_sequences(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(tiny)
    with learning(tiny, run) as learner:
        plain = gradients(learner, run, share_prefixes=False)
    monkeypatch.setattr(flex_attention, "has_gradients", lambda: True)
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", pytest.fail)
    with learning(tiny, run) as learner:
        assert difference(gradients(learner, run, share_prefixes=False), plain) < 1e-6
