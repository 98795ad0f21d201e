"""The memory plan that `--check-config` prints, and the jobs that it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import problems
from miles_async.config.checks.memory import memory_problems
from miles_async.config.load import load_config
from miles_async.config.memory import adapter_elements, learner_job, memory_plan, planned_model
from miles_async.config.schema import RunConfig
from miles_async.config.table import memory_table, table
from miles_async.models.layers import ModelShape, Split, Weights
from miles_async.models.plugin import MODELS as PLUGINS
from miles_async.models.plugin import ModelPlugin
from miles_async.planning.plan import GIB, LearnerJob, highest, plan_learner
from tests.configuration import run_config
from tests.planned_models import MODELS, PLANNED, checkpoint

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "benchmarks/results/gpu-check-nvidia-h200.json"
PUBLISHED = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-4B": 4.02,
    "Qwen3-32B": 32.8,
    "Qwen2.5-7B": 7.62,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Gemma-7B": 8.54,
    "Mixtral-8x7B": 46.7,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "Qwen3-Next-80B-A3B": 79.7,
    "DeepSeek-V3": 671,
    "Qwen3.5-9B": 8.95,
    "Qwen3.5-35B-A3B": 34.66,
}
"""Billions of parameters, as the model cards and Hugging Face's pages have them."""
EIGHT: dict[str, Any] = {
    "precision": "bf16",
    "actor_num_gpus_per_node": 8,
    "rollout_batch_size": 64,
    "n_samples_per_prompt": 8,
    "rollout_max_prompt_len": 1024,
    "rollout_max_response_len": 7168,
    "gpu_memory_gib": 80,
}

EIGHT_PARTS: dict[str, Any] = {"tensor_model_parallel_size": 8, "sequence_parallel": True}


def job(tmp_path: Path, model: str, **settings: Any) -> RunConfig:
    return run_config(hf_checkpoint=checkpoint(model, tmp_path), **EIGHT | settings)


def shape_of(config: dict[str, Any]) -> ModelShape:
    name = config["model_type"]
    return (PLUGINS.find(name) if PLUGINS.has(name) else ModelPlugin()).shape(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    model = shape_of(MODELS[name])
    assert model.weights(Split()).total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize("tensor, pipeline, expert", [(2, 1, 1), (1, 4, 1), (4, 2, 4)])
@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen3-30B-A3B"])
def test_the_ranks_of_a_layout_hold_the_whole_model_and_copies_of_small_weights(
    name: str, tensor: int, pipeline: int, expert: int
) -> None:
    model = shape_of(MODELS[name])
    split = Split(tensor=tensor, expert=expert, expert_tensor=tensor)
    parts = [model.weights(split, stage, pipeline) for stage in range(pipeline)]
    held = sum(tensor * one.dense + tensor * expert * one.expert for one in parts)
    assert model.weights(Split()).total <= held
    assert held == pytest.approx(model.weights(Split()).total, rel=0.005)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "part, tokens, settings",
    [
        ("short sequences", 8192, {}),
        ("long sequence", 32_512, {}),
        ("long sequence, recomputed", 32_512, FULL),
        ("short sequences, Transformer Engine", 8192, {"transformer_impl": "transformer_engine"}),
        ("long sequence, Transformer Engine", 32_512, {"transformer_impl": "transformer_engine"}),
    ],
)
def test_the_plan_agrees_with_steps_on_an_h200(
    tmp_path: Path, part: str, tokens: int, settings: dict[str, Any]
) -> None:
    result = json.loads(MEASURED.read_text())["result"]
    found = {row["part"]: row["value"] for row in result["rows"]}
    [[_, card]] = result["versions"]["gpus"]
    lengths = {"max_tokens_per_gpu": tokens, "rollout_max_response_len": tokens - 1024}
    settings = EIGHT | {"actor_num_gpus_per_node": 1, "transformer_impl": "local"} | lengths | settings
    config = run_config(hf_checkpoint=checkpoint("Qwen3-0.6B", tmp_path), **settings)
    model = planned_model(config)
    assert model is not None
    [plan] = plan_learner(learner_job(config, model, int(card * GIB)))
    assert (plan.weights + plan.optimizer) / GIB == pytest.approx(found["state: size"], rel=0.001)
    assert (plan.peak - plan.state) / GIB == pytest.approx(found[f"{part}: memory"], rel=0.03)


@pytest.mark.parametrize(
    "tokens, layout, gib",
    [
        (2 * 2048, {}, 69.1),
        (4 * 2048, {"tensor": 2}, 55.7),
        (2 * 2048, {"pipeline": 2}, 49.8),
        (4 * 2048, {"tensor": 8}, 28.8),
    ],
)
def test_the_plan_agrees_with_published_jobs_of_megatron_lm(tokens: int, layout: dict[str, int], gib: float) -> None:
    """Llama 2 7B on eight H800, of https://github.com/NVIDIA/Megatron-LM/pull/482. It kept all logits.

    No activation is taken to be fused.
    """
    dimensions = {"intermediate_size": 11_008, "num_key_value_heads": 32, "vocab_size": 32_000}
    model = shape_of(MODELS["Llama-3.1-8B"] | dimensions)
    job = LearnerJob(
        model=model,
        ranks=8,
        split=Split(tensor=layout.get("tensor", 1), transformer_engine=True, fusion=False),
        pipeline=layout.get("pipeline", 1),
        tokens=tokens,
        sharded_optimizer=True,
        foreach_adam=False,
        chunk_entries=10**12,
    )
    assert highest(plan_learner(job)).peak / GIB == pytest.approx(gib, rel=0.06)


@pytest.mark.parametrize(
    "dimensions, layout, stages, chunks, gpus, state, peak",
    [
        ((4096, 14_336, 32, 32, 8, 256_000), {"expert": 4, "expert_tensor": 2}, 4, 1, 128, 16.49, 24.68),
        ((6144, 16_384, 56, 48, 8, 32_000), {"expert": 8, "expert_tensor": 2}, 8, 1, 128, 21.42, 26.57),
        ((4096, 14_336, 32, 32, 8, 32_000), {"expert": 8}, 4, 8, 64, 18.39, 33.07),
    ],
)
def test_the_plan_agrees_with_release_tests_of_megatron_lm(
    dimensions: tuple[int, ...],
    layout: dict[str, Any],
    stages: int,
    chunks: int,
    gpus: int,
    state: float,
    peak: float,
) -> None:
    """GiB of the last rank of Mixtral's jobs on H100, which kept all logits.

    From the golden values of https://github.com/NVIDIA/Megatron-LM (`tests/functional_tests/test_cases/mixtral`).
    """
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip((*names, "vocab_size"), dimensions, strict=True))
    model = shape_of(MODELS["Mixtral-8x7B"] | sizes)
    job = LearnerJob(
        model=model,
        ranks=gpus,
        split=Split(tensor=2, sequence=2, transformer_engine=True, **layout),
        pipeline=stages,
        chunks=chunks,
        tokens=4096,
        sharded_optimizer=True,
        foreach_adam=False,
        chunk_entries=10**12,
        softmax=10**12,
    )
    last = plan_learner(job)[-1]
    assert last.state / GIB == pytest.approx(state, rel=0.06)
    assert last.peak / GIB == pytest.approx(peak, rel=0.05)


def test_a_model_of_experts_without_their_number_has_no_plan() -> None:
    model = {name: value for name, value in MODELS["Qwen3-30B-A3B"].items() if name != "num_experts"}
    with pytest.raises(KeyError, match="num_experts"):
        shape_of(model)


@pytest.mark.parametrize(
    "file, model, gpus", [("qwen3-4b-8gpu.yaml", "Qwen3-4B", 8), ("qwen3-30b-a3b-16gpu.yaml", "Qwen3-30B-A3B", 16)]
)
def test_a_configuration_fits_and_prints_the_plan_of_the_documentation(
    tmp_path: Path, file: str, model: str, gpus: int
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    flags = ["--hf-checkpoint", checkpoint(model, tmp_path), "--prompt-data", str(tmp_path / "prompts.jsonl")]
    for saving in ([], ["--save", str(tmp_path)]):
        config = load_config(["--config", str(ROOT / "configs" / file), *flags, *saving], entry="train_async.py")
        plan = memory_plan(config)
        assert plan is not None
        assert plan.learner_fits
        assert plan.engine_fits
        assert config.learner.ranks + config.engine.rollout_num_gpus == gpus
        printed = table(config, "train_async.py")
        assert printed.endswith(memory_table(plan, "bf16"))
        if not saving:
            assert memory_table(plan, "bf16") in (ROOT / "docs/how-to/memory.md").read_text()


@pytest.mark.parametrize("name", PLANNED)
def test_the_documentation_shows_how_well_both_plans_of_a_model_agree(name: str) -> None:
    differences = ", ".join(f"{percent:+.1f} %" for percent in PLANNED[name].differences)
    row = f"| {name} | {PLANNED[name].layout} | {differences} |"
    assert row in (ROOT / "docs/how-to/memory.md").read_text().splitlines()


@pytest.mark.parametrize(
    "model, settings, reason",
    [
        ("Qwen3-32B", {}, "tensor_model_parallel_size 8 with sequence_parallel true, and optimizer_cpu_offload true"),
        ("Qwen3-4B", {"max_tokens_per_gpu": 131_072}, "mostly for activations"),
        ("Qwen3-4B", {"max_tokens_per_gpu": 32_768, "rollout_max_response_len": 16_384}, "recompute_granularity full"),
        ("Qwen3-30B-A3B", {"actor_num_nodes": 2}, "mostly for gradients and weights"),
        ("Llama-3.1-70B", {"rollout_num_gpus": 8, "actor_num_nodes": 8}, "an engine rank needs 133.9 GiB"),
        ("Qwen3-32B", EIGHT_PARTS, "set optimizer_cpu_offload true, or actor_num_nodes 2"),
        ("Qwen3-32B", EIGHT_PARTS | {"host_memory_gib": 512}, "set actor_num_nodes 2"),
        (
            "Qwen3-32B",
            {"use_distributed_optimizer": False, "tensor_model_parallel_size": 8},
            "distributed_optimizer true",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_refused_with_settings_that_do(
    tmp_path: Path, model: str, settings: dict[str, Any], reason: str
) -> None:
    config = job(tmp_path, model, **settings)
    sentences = list(memory_problems(config))
    assert any(reason in sentence for sentence in sentences), sentences
    advice = [sentence.split(": set ")[1].split(", or ")[0] for sentence in sentences]
    config = job(tmp_path, model, **settings | _settings(" ".join(advice)))
    assert list(memory_problems(config)) == []
    assert not [sentence for sentence in problems(config, "train_async.py") if "divisible" in sentence]


def _settings(advice: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+_\w+|precision) ([\w.]+|\{.*?\})", advice))


def test_a_model_that_no_two_settings_make_fit_needs_more_devices(tmp_path: Path) -> None:
    [sentence, *_] = memory_problems(job(tmp_path, "DeepSeek-V3", gpu_memory_gib=24))
    assert sentence.endswith("use more devices, or a smaller model: no two settings make it fit")


def test_copies_that_exceed_the_host_memory_are_refused(tmp_path: Path) -> None:
    shorter = {"colocate": True, "tensor_model_parallel_size": 2}
    config = job(tmp_path, "Qwen3-4B", host_memory_gib=32, **shorter)
    [sentence] = memory_problems(config)
    assert "host_memory_gib is 32" in sentence
    assert "unset colocate" in sentence
    assert list(memory_problems(job(tmp_path, "Qwen3-4B", host_memory_gib=512, **shorter))) == []


def test_a_colocated_learner_stages_weights_on_its_device_unless_another_transport_reads_them(tmp_path: Path) -> None:
    plans = [
        memory_plan(job(tmp_path, "Qwen3-4B", colocate=True, **transport))
        for transport in ({}, {"weight_transfer": "disk"})
    ]
    ipc, disk = (plan for plan in plans if plan is not None)
    assert ipc.learner is not None
    assert disk.learner is not None
    share = disk.host - ipc.host
    window = 512 << 20
    assert (ipc.learner.staged, disk.learner.staged) == (share // EIGHT["actor_num_gpus_per_node"] + window, 0)
    assert ipc.learner.peak > disk.learner.peak


def test_an_optimizer_that_does_not_fit_into_the_host_memory_is_refused(tmp_path: Path) -> None:
    offloaded = EIGHT_PARTS | {"optimizer_cpu_offload": True, "host_memory_gib": 512}
    [sentence] = memory_problems(job(tmp_path, "Qwen3-32B", **offloaded))
    assert "need 549.3 GiB of host memory, but host_memory_gib is 512: lower optimizer_offload_fraction" in sentence
    assert list(memory_problems(job(tmp_path, "Qwen3-32B", **offloaded, optimizer_offload_fraction=0.5))) == []


@pytest.mark.parametrize(
    "settings, optimizer, gradients, step, host",
    [
        ({}, 12, 4, 0, 0),
        ({"optimizer_cpu_offload": True}, 0, 4, 0, 16),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, 9, 4, 0, 4),
        ({"optimizer_cpu_offload": True, "main_grads_dtype": "bf16"}, 0, 2, 0, 16),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}, 8, 4, 8, 0),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, 10, 4, 4, 0),
    ],
)
def test_the_plan_counts_the_bytes_of_the_optimizer_for_each_weight(
    tmp_path: Path, settings: dict[str, Any], optimizer: int, gradients: int, step: int, host: int
) -> None:
    config = job(tmp_path, "Qwen3-32B", transformer_impl="transformer_engine", **EIGHT_PARTS | settings)
    model = planned_model(config)
    assert model is not None
    job_of_ranks = learner_job(config, model, 80 * GIB)
    [plan] = plan_learner(job_of_ranks)
    weights, staged = model.weights(job_of_ranks.split).total, model.weights(Split()).total * 2 // 8
    assert (plan.optimizer, plan.gradients, plan.step, plan.host - staged) == pytest.approx(
        [weights * size for size in (optimizer, gradients, step, host)], abs=16
    )


def test_the_plan_counts_adapters_of_the_experts_that_a_rank_holds(tmp_path: Path) -> None:
    """128 experts of 768 columns in each of 48 layers, on four expert-parallel pairs of tensor-parallel ranks."""
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4}
    config = job(tmp_path, "Qwen3-30B-A3B", lora_rank=8, **layout)
    model = planned_model(config)
    assert model is not None
    attention = 2 * (4096 // 2 + 2048) + 2 * (512 // 2 + 2048)
    experts = 32 * 3 * (768 // 2 + 2048)
    assert learner_job(config, model, 80 * GIB).adapters == Weights(8 * attention, 8 * experts)
    assert adapter_elements(config) == 48 * 8 * (2 * (4096 + 2048) + 2 * (512 + 2048) + 128 * 3 * (768 + 2048))


def test_matrices_that_experts_share_are_counted_once_on_a_rank_and_for_each_expert_in_files(tmp_path: Path) -> None:
    """They are as wide as the model: 2,048."""
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4}
    own, shared = (
        job(tmp_path, "Qwen3-30B-A3B", lora_rank=8, experts_shared_outer_loras=one, **layout) for one in (False, True)
    )
    model = planned_model(own)
    assert model is not None
    of_own, of_shared = (learner_job(config, model, 80 * GIB).adapters for config in (own, shared))
    assert of_own.expert - of_shared.expert == 31 * 3 * 8 * 2048
    assert adapter_elements(shared, in_files=True) == adapter_elements(own)
    elements = adapter_elements(own)
    assert elements is not None
    assert adapter_elements(shared) == elements - 48 * 127 * 3 * 8 * 2048


def test_an_engine_whose_adapters_do_not_fit_is_refused_with_a_limit_that_fits(tmp_path: Path) -> None:
    """An adapter of rank 64 has 3.4 billion elements. An engine has room for ten versions, and for the model itself."""
    adapters = {"lora_rank": 64, "max_weight_staleness": 8, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2}
    config = job(tmp_path, "Qwen3-30B-A3B", **EIGHT_PARTS | adapters)
    [problem] = [one for one in memory_problems(config) if one.startswith("an engine rank")]
    assert "of buffers for adapters and the 8192 tokens of the longest sample" in problem
    assert "or max_weight_staleness" in problem or "set max_weight_staleness" in problem


def test_the_table_shows_the_memory_of_an_engine_s_adapters(tmp_path: Path) -> None:
    config = job(tmp_path, "Qwen3-4B", rollout_num_gpus=8, lora_rank=32, max_weight_staleness=2)
    engine = next(line for line in table(config, "train_async.py").splitlines() if line.startswith("engine "))
    # Five buffers of 66,060,288 elements in bf16.
    assert "weights 7.5 GiB, adapters 0.6 GiB, KV cache" in engine


def test_the_optimizer_first_copies_the_weights_of_all_ranks_to_main_memory(tmp_path: Path) -> None:
    config = job(tmp_path, "Qwen3-4B", actor_num_nodes=8, optimizer_cpu_offload=True)
    model = planned_model(config)
    assert model is not None
    [plan] = plan_learner(learner_job(config, model, 80 * GIB))
    assert plan.host == pytest.approx(4 * (1 + 1 / 64) * model.weights(Split()).total, rel=0.001)


def test_recomputing_more_layers_than_a_stage_has_is_refused(tmp_path: Path) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 20}
    config = job(tmp_path, "Qwen3-4B", **full, pipeline_model_parallel_size=2)
    assert [one for one in problems(config, "train_async.py") if "recompute" in one] == [
        "recompute_num_layers 20 is more than the 18 layers of a pipeline stage: set it to 18 or less, or lower "
        "pipeline_model_parallel_size"
    ]


def test_without_the_memory_of_the_gpus_nothing_is_printed_or_refused(tmp_path: Path) -> None:
    config = job(tmp_path, "DeepSeek-V3", gpu_memory_gib=None)
    assert memory_plan(config) is None
    assert list(memory_problems(config)) == []
    assert "memory" not in [line.split()[0] for line in table(config, "train_async.py").splitlines()]


def test_the_table_shows_what_fills_the_memory(tmp_path: Path) -> None:
    config = job(tmp_path, "Qwen3-4B", rollout_num_gpus=8)
    rows = {line.split()[0]: line for line in table(config, "train_async.py").splitlines()}
    assert "at most on a learner rank, of 76.0 GiB, which a plan uses of gpu_memory_gib 80" in rows["memory"]
    assert "weights 7.5 GiB, KV cache" in rows["engine"]
    assert rows.keys() >= {"weights", "gradients", "optimizer", "layers", "backward", "logits", "publish", "host"}


def test_the_table_has_the_size_of_an_adapter_or_says_why_it_is_unknown(tmp_path: Path) -> None:
    def row(config: RunConfig) -> str:
        return next(line for line in table(config, "train_async.py").splitlines() if line.startswith("adapters"))

    # 36 layers of 32 * (6,656 + 2 * 3,584 + 6,656 + 3 * 12,288): the widths of both sides of each linear layer.
    assert row(job(tmp_path, "Qwen3-4B", lora_rank=32)).split()[1] == "66,060,288"
    unread = row(run_config(hf_checkpoint="model.gguf", lora_rank=32))
    assert unread.split()[1] == "unknown"
    assert unread.endswith("; the dimensions of model.gguf are read when the run starts")


def test_later_stages_of_a_pipeline_keep_fewer_micro_batches(tmp_path: Path) -> None:
    config = job(tmp_path, "Qwen3-32B", pipeline_model_parallel_size=4)
    model = planned_model(config)
    assert model is not None
    first, *_, last = plan_learner(learner_job(config, model, 80 * GIB))
    assert first.activations == pytest.approx(4 * last.activations, rel=0.05)
    assert (first.logits, last.logits > 0) == (0, True)
