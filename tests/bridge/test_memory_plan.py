"""The memory plan must agree with real learners for families that come from Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.models.plugin import MODELS as PLUGINS
from miles_async.planning.plan import RankMemory, plan_learner
from tests.bridge.families import write_checkpoint
from tests.bridge.mtp import write_with_head
from tests.configuration import run_config
from tests.learner_memory import cpu_job, full_group, measure
from tests.plan_agreement import differences_of_plans
from tests.planned_models import MODELS, PLANNED
from tests.stack.learning import learning

SAMPLE = 128
"""Tokens."""


def job_on(folder: Path, **further: Any) -> RunConfig:
    return run_config(
        hf_checkpoint=str(folder),
        precision="bf16",
        moe_router_dtype="fp32",
        transformer_impl="local",
        max_tokens_per_gpu=2 * SAMPLE,
        rollout_batch_size=1,
        n_samples_per_prompt=4,
        rollout_max_prompt_len=8,
        rollout_max_response_len=SAMPLE - 8,
        **further,
    )


def planned_and_measured(settings: RunConfig, folder: Path) -> tuple[RankMemory, dict[str, int | None]]:
    """The plan of a job, and the bytes that its learner needs. What stays between steps agrees within 1 %."""
    [first], [steps] = (rank_batches([full_group(4, tokens)], settings, 1) for tokens in (16, SAMPLE))
    with learning(folder, settings) as learner:
        found = measure(learner, first, steps)
    [plan] = plan_learner(cpu_job(settings))
    for line in ("weights", "gradients", "optimizer"):
        assert getattr(plan, line) == pytest.approx(found[line], rel=0.01), line
    return plan, found


@pytest.mark.parametrize("family", ["DeepSeek-V3", "Qwen3.5", "Qwen3.5-MoE", "gpt-oss"])
def test_the_plan_agrees_with_the_tensors_of_a_learner(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    plan, found = planned_and_measured(job_on(folder), folder)
    for line, planned in (("activations", plan.activations), ("peak", plan.peak - plan.state)):
        assert planned == pytest.approx(found[line], rel=0.1), line


@pytest.mark.parametrize("family", ["DeepSeek-V3", "Qwen3.5"])
def test_the_plan_counts_an_mtp_head(family: str, tmp_path: Path) -> None:
    settings = job_on(write_with_head(family, tmp_path), enable_mtp_training=True)
    plan, found = planned_and_measured(settings, tmp_path)
    assert plan.peak - plan.state == pytest.approx(found["peak"], rel=0.1)


@pytest.mark.parametrize("name", [name for name in PLANNED if not PLUGINS.has(MODELS[name]["model_type"])])
def test_settings_and_modules_give_the_same_plan_at_the_size_of_a_published_model(name: str, tmp_path: Path) -> None:
    differences = differences_of_plans(name, tmp_path)
    assert differences == pytest.approx(PLANNED[name].differences, abs=0.06)
    assert max(map(abs, differences)) < 3
