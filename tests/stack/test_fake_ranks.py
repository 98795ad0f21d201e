"""The memory plan of the settings must agree with Megatron's modules, at the sizes of published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.megatron.model.fake_ranks import measure_stages
from miles_async.config.memory import learner_job, planned_model
from miles_async.planning.plan import GIB, plan_learner
from tests.configuration import run_config
from tests.planned_models import checkpoint
from workers.memory_plan import main

TOKENS = 4096
TENSOR = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
EXPERT = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4}
JOBS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {},
    "Qwen3-4B": {"context_parallel_size": 2},
    "Qwen2.5-7B": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "Llama-3.1-8B": TENSOR | {"pipeline_model_parallel_size": 2},
    "Gemma-7B": TENSOR,
    "Mixtral-8x7B": EXPERT,
    "Qwen3-30B-A3B": EXPERT | {"expert_tensor_parallel_size": 1},
}


@pytest.mark.parametrize("name", JOBS)
def test_settings_and_modules_give_the_same_plan(tmp_path: Path, name: str) -> None:
    config = run_config(
        hf_checkpoint=checkpoint(name, tmp_path),
        precision="bf16",
        transformer_impl="local",
        actor_num_gpus_per_node=8,
        max_tokens_per_gpu=TOKENS,
        rollout_batch_size=64,
        rollout_max_response_len=TOKENS - 64,
        **JOBS[name],
    )
    model = planned_model(config)
    assert model is not None
    job = learner_job(config, model, 80 * GIB)
    measured = measure_stages(config.learner, str(config.model.hf_checkpoint), job.tokens)
    for from_settings, from_modules, stage in zip(
        plan_learner(job), plan_learner(job, measured), measured, strict=True
    ):
        assert stage.weights == model.weights(job.split, from_settings.stage, job.pipeline)
        assert from_settings.activations == pytest.approx(from_modules.activations, rel=0.03)
        assert from_settings.peak == pytest.approx(from_modules.peak, rel=0.03)
    # Which experts get a token depends on its contents, which fake tensors do not have.
    assert all((stage.kept is None) == (name in ("Mixtral-8x7B", "Qwen3-30B-A3B")) for stage in measured)


def test_make_plan_prints_the_plan_of_the_settings_and_that_of_the_modules(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    flags = ["--hf-checkpoint", checkpoint("Qwen3-0.6B", tmp_path), "--gpu-memory-gib", "80", "--rm-type", "math"]
    assert main([*flags, "--prompt-data", str(tmp_path / "prompts.jsonl"), "--transformer-impl", "local"]) == 0
    from_settings, from_modules = capfd.readouterr().out.split("with the weights and activations of Megatron's modules")
    for plan in (from_settings, from_modules):
        assert "weights        1.1 GiB  bf16" in plan
