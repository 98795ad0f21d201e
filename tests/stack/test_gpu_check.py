"""The checks of `make gpu-check` run without a GPU, too; test_colocated.py has the check of a whole job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import (
    broadcast,
    engine,
    experts,
    ipc,
    learner,
    offload,
    optimizer,
    output_layer,
    parallel,
    publish,
    state,
    step,
)
from benchmarks.gpu_check.report import Report, Row
from benchmarks.gpu_check.surroundings import Surroundings
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import Snapshot
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.config.schema import Weights
from miles_async.losses.logprobs import token_logprobs
from tests.stack.engine_stack import Stack
from tests.stack.learning import gradients_by_name, learning, without_compiler
from tests.stack.pretended_device import pretended_gpu
from tests.waiting import START_SECONDS

pytest_plugins = ["tests.stack.engine_fixtures"]

ROOT = Path(__file__).parents[2]
COMPARED_OF_EXPERTS = ("result", *(f"gradient of the {what}" for what in ("input", "router", "experts")))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As `learning`, for the learners of the checks."""
    torch.set_num_threads(1)
    with without_compiler():
        yield


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("check", tmp_path / "check.jsonl")


@pytest.fixture
def parts(tmp_path: Path) -> Callable[[], dict[str, str]]:
    """The result of each part that was reported; none has failed."""

    def read() -> dict[str, str]:
        found = [Row(**row) for row in rows(tmp_path)]
        assert [row for row in found if row.status == "fail"] == []
        return {row.part: row.status for row in found}

    return read


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "check.jsonl").read_text().splitlines())
    return [line["row"] for line in lines if "row" in line]


@pytest.fixture
def restored(serving: Stack, tmp_path: Path) -> Iterator[Stack]:
    """The engine, which has the weights of `serving.model` before and after the test."""
    tensors = serving.named_tensors()
    named = describe(tensors)
    source = WeightSource(named, tmp_path / "restored", Weights())
    source.connect([serving.engine], {})
    source.stage(1, tensors, [])
    assert source.send(1, serving.engine.name, "memory").error is None
    yield serving
    assert source.send(1, serving.engine.name, "memory").error is None
    source.close()


def test_an_engine_is_compared_with_transformers(
    restored: Stack, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    engine.compare(report, restored.engine, restored.model, "fp32")
    assert parts() == {"log-probabilities against transformers": "pass", "throughput": "pass"}


def test_a_learner_in_bfloat16_is_compared_with_float32(
    checkpoint: Path, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    learner.compare(report, checkpoint, lengths=(5, 17, 100))
    assert list(parts().values()) == ["pass"] * 4 + ["not possible here"]


@pytest.fixture
def surroundings(tmp_path: Path) -> Surroundings:
    return Surroundings(folder=tmp_path / "check", models=tmp_path / "models")


def test_chunks_of_logits_have_the_gradients_of_all_logits_at_once(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    output_layer.check(report, surroundings)
    found = parts()
    assert found["Liger's cross-entropy"] == found["Liger's scaled cross-entropy"] == "not possible here"
    assert {part for part, status in found.items() if status == "pass"} == {
        f"{variant}: {figure}"
        for variant in ("as in a learner", "four chunks", "plain logits")
        for figure in ("gradient of hidden states", "gradient of weights", "time")
    }


def test_a_wrong_gradient_of_the_output_layer_fails(
    surroundings: Surroundings, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(logits: torch.Tensor, targets: torch.Tensor, overwrite: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = token_logprobs(logits, targets, overwrite=overwrite)
        return logprobs / 2, entropy

    monkeypatch.setattr(output_layer, "token_logprobs", half)
    output_layer.check(report, surroundings)
    assert "fail" in {row["status"] for row in rows(tmp_path) if row["part"].startswith("four chunks")}


def test_steps_of_short_and_long_sequences_are_measured(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    step.check(report, surroundings)
    found = parts()
    assert found["learner, Transformer Engine"] == "not possible here"
    assert {part for part, status in found.items() if status == "pass"} == {
        f"{steps}: {figure}"
        for steps in ("short sequences", "long sequence", "long sequence, recomputed", "short sequences, experts")
        for figure in ("time", "speed", "kernels", "time in kernels")
    }


def test_two_deterministic_runs_are_equal(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    try:
        step.check_deterministic(report, surroundings)
    finally:
        torch.use_deterministic_algorithms(False)
    assert parts() == {"dense: two runs differ by": "pass", "experts: two runs differ by": "pass"}


def test_layouts_of_two_ranks_are_compared_with_one_rank(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "RANKS", 2)
    parallel.check(report, surroundings)
    found = parts()
    for name, layout in parallel.LAYOUTS.items():
        for precision in parallel.PRECISIONS:
            part = f"{name}, {precision}"
            if layout.ranks > 2:
                assert found[part] == "not possible here"
            else:
                compared = ("log-probabilities", "gradients", "state loaded", "step")
                assert {found[f"{part}: {what}"] for what in compared} == {"pass"}


def test_a_layout_that_learns_something_else_fails(
    surroundings: Surroundings, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "LAYOUTS", {"decayed": parallel.Layout(False, 1, {"weight_decay": 10.0})})
    monkeypatch.setattr(parallel, "PRECISIONS", ["fp32"])
    with parallel.Ranks(1) as ranks:
        parallel.compare(report, surroundings, ranks, experts=False)
    assert {row["part"] for row in rows(tmp_path) if row["status"] == "fail"} == {"decayed, fp32: step"}


def test_ranks_compute_further_tasks_after_one_of_them_failed(surroundings: Surroundings, tmp_path: Path) -> None:
    task = parallel.Task(parallel.Layout(False, 1, {}), "fp32", surroundings.checkpoint(parallel.DENSE), [])
    with parallel.Ranks(1) as ranks:
        with pytest.raises(RuntimeError, match=r"rank 0: .*nowhere"):
            ranks.compute(replace(task, checkpoint=tmp_path / "nowhere"))
        assert ranks.compute(task).stepped == []


def test_one_gpu_has_no_room_for_two_ranks(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "RANKS", 1)
    parallel.check(report, surroundings)
    assert parts() == {"dense": "not possible here", "experts": "not possible here"}


def test_experts_are_compared_with_float32(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    experts.check(report, surroundings)
    assert {part for part, status in parts().items() if status == "pass"} == {
        f"{variant}: {figure}"
        for variant in ("one by one", "one by one, recomputed")
        for figure in (*COMPARED_OF_EXPERTS, "time", "speed")
    }


def test_a_wrong_gradient_of_an_expert_fails(
    surroundings: Surroundings, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_one(learner: MegatronLearner) -> dict[str, torch.Tensor]:
        name = "model.layers.0.mlp.experts.3.up_proj.weight"
        found = gradients_by_name(learner)
        return found | {name: found[name] * (learner._model.config.params_dtype is torch.float32)}

    monkeypatch.setattr(experts, "gradients_by_name", without_one)
    experts.check(report, surroundings)
    failed = {row["part"] for row in rows(tmp_path) if row["status"] == "fail"}
    assert failed == {f"{variant}: gradient of the experts" for variant in ("one by one", "one by one, recomputed")}


def test_a_training_state_is_the_same_after_a_rollback_and_from_a_checkpoint(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    state.check(report, surroundings)
    found = parts()
    assert (
        found["rollback: log-probabilities changed by"] == found["checkpoint: log-probabilities changed by"] == "pass"
    )


def test_optimizers_are_compared_with_one_on_the_gpu(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "require_gpu", lambda what: None)
    with pretended_gpu():
        optimizer.check(report, surroundings)
    found = parts()
    assert found["moments in bf16"] == found["offloaded: step, memory"] == "not possible here"
    compared = [part for part, status in found.items() if "rollback" in part and status == "pass"]
    assert len(compared) == len(optimizer.VARIANTS) - 1


def test_an_optimizer_that_forgets_its_moments_fails(
    surroundings: Surroundings, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_moments(snapshot: Snapshot) -> None:
        restore(snapshot)
        for inner in snapshot._model.inner_optimizers:
            for one in inner.state.values():
                one["exp_avg"].zero_()

    restore = Snapshot.restore
    monkeypatch.setattr(Snapshot, "restore", without_moments)
    optimizer.check(report, surroundings)
    failed = [row["part"] for row in rows(tmp_path) if row["status"] == "fail"]
    assert failed == ["on the GPU: weights, after a rollback and a checkpoint"]


def test_another_process_gets_the_weights_of_this_one(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    ipc.check(report, surroundings)
    assert parts() == {"bare copy": "pass", "tensors": "pass", "buckets": "pass"}


def test_a_broadcast_to_an_engine_that_dies_or_takes_no_part_fails(
    surroundings: Surroundings, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    broadcast.check(report, surroundings)
    assert parts() == {
        "send beside a kernel": "not possible here",
        "an engine takes no part": "pass",
        "an engine dies": "pass",
    }


def test_each_transport_is_compared_with_a_bare_copy_and_sends_beside_steps(
    restored: Stack, tmp_path: Path, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    publish.compare(report, restored.engine, restored.checkpoint, tmp_path / "weights", "fp32")
    found = parts()
    assert len(found) == 9 * len(publish.TRANSPORTS)
    assert set(found.values()) == {"pass"}


def test_an_engine_that_was_resumed_has_its_weights_and_takes_new_ones(
    restored: Stack, tmp_path: Path, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    run = offload.settings("fp32")
    with learning(restored.checkpoint, run) as taught:
        offload.offload_learner(report, taught, run)
        offload.release_and_resume(report, restored.engine, held=0)
        offload.send_weights(report, restored.engine, taught, run, tmp_path / "weights")
    assert parts() == {
        "learner: memory freed": "not possible here",
        "learner: log-probabilities changed by": "pass",
        "engine: memory freed": "not possible here",
        "engine: log-probabilities changed by": "pass",
    } | {
        f"engine resumed, {transport}: {figure}": status
        for transport in ("disk", "p2p", "ipc")
        for figure, status in (
            ("memory freed", "not possible here"),
            ("send", "pass"),
            ("tokens recomputed by the learner", "pass"),
        )
    }


def test_the_script_runs_a_check_and_prints_its_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--only", "attention"]
    command += ["--folder", str(tmp_path / "logs"), "--limit", str(START_SECONDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packed, local layers, bf16: gradients" in done.stdout
    result = json.loads((tmp_path / "logs" / "result.json").read_text())["result"]
    assert result["versions"]["gpus"] == []
    assert {row["status"] for row in result["rows"]} == {"pass", "not possible here"}
