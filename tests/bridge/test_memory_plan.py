"""The memory plan must agree with real learners for families that come from Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.adapters.megatron.model.fake_ranks import measure_stages
from miles_async.batching.batch import rank_batches
from miles_async.config.memory import learner_job, planned_model
from miles_async.planning.plan import GIB, plan_learner
from tests.bridge.families import write_checkpoint
from tests.configuration import run_config
from tests.learner_memory import cpu_job, full_group, measure
from tests.planned_models import checkpoint
from tests.stack.learning import learning

SAMPLE = 128
"""Tokens."""


@pytest.mark.parametrize("family, widths", [("DeepSeek-V3", 6), ("Qwen3.5", 6), ("Qwen3.5-MoE", 6), ("gpt-oss", 8)])
def test_the_plan_agrees_with_the_tensors_of_a_learner(family: str, widths: int, tmp_path: Path) -> None:
    # The experts of gpt-oss limit the factors of their activation, which keeps two more tensors on a CPU.
    folder = write_checkpoint(family, tmp_path)
    settings = run_config(
        hf_checkpoint=str(folder),
        precision="bf16",
        transformer_impl="local",
        max_tokens_per_gpu=2 * SAMPLE,
        rollout_batch_size=1,
        n_samples_per_prompt=4,
        rollout_max_prompt_len=8,
        rollout_max_response_len=SAMPLE - 8,
    )
    [first], [steps] = (rank_batches([full_group(4, tokens)], settings, 1) for tokens in (16, SAMPLE))
    with learning(folder, settings) as learner:
        found = measure(learner, first, steps)
    [plan] = plan_learner(cpu_job(settings, widths=widths))
    for line in ("weights", "gradients", "optimizer"):
        assert getattr(plan, line) == pytest.approx(found[line], rel=0.01), line
    for line, planned in (("activations", plan.activations), ("peak", plan.peak - plan.state)):
        assert planned == pytest.approx(found[line], rel=0.1), line


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-120b", "Qwen3-Next-80B-A3B"])
def test_a_rank_has_the_planned_weights_at_the_size_of_a_published_model(name: str, tmp_path: Path) -> None:
    settings = run_config(
        hf_checkpoint=checkpoint(name, tmp_path),
        precision="bf16",
        transformer_impl="local",
        actor_num_gpus_per_node=16,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )
    model = planned_model(settings)
    assert model is not None
    [stage] = measure_stages(settings.learner, str(settings.model.hf_checkpoint), 1024)
    assert stage.weights == model.weights(learner_job(settings, model, 80 * GIB).split)
