"""The memory plan of the settings against that of Megatron's modules, at the sizes of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.adapters.megatron.model.fake_ranks import measure_stages
from miles_async.config.memory import learner_job, planned_model
from miles_async.planning.plan import GIB, plan_learner
from tests.configuration import run_config
from tests.planned_models import PLANNED, checkpoint

TOKENS = 4096


def differences_of_plans(name: str, folder: Path) -> list[float]:
    """How much more the plan from the settings has for the activations of each pipeline stage, in percent.

    The weights of both plans must be equal, and their peaks must agree within 3 %.
    """
    planned = PLANNED[name]
    config = run_config(
        hf_checkpoint=checkpoint(name, folder, planned.changes),
        precision="bf16",
        moe_router_dtype="fp32",
        transformer_impl="local",
        actor_num_gpus_per_node=8,
        max_tokens_per_gpu=TOKENS,
        rollout_batch_size=64,
        rollout_max_response_len=TOKENS - 64,
        **planned.settings,
    )
    model = planned_model(config)
    assert model is not None
    job = learner_job(config, model, 80 * GIB)
    measured = measure_stages(config.learner, str(config.model.hf_checkpoint), job.tokens)
    differences = []
    for from_settings, from_modules, stage in zip(
        plan_learner(job), plan_learner(job, measured), measured, strict=True
    ):
        assert stage.weights == model.weights(job.split, from_settings.stage, job.pipeline)
        assert from_settings.peak == pytest.approx(from_modules.peak, rel=0.03)
        differences.append(100 * (from_settings.activations / from_modules.activations - 1))
    return differences
