"""The checks of `make gpu-check` run without a GPU, too; test_colocated.py has the check of a whole job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import broadcast, engine, ipc, learner, offload, optimizer, output_layer, publish, state, step
from benchmarks.gpu_check.report import Report, Row
from benchmarks.gpu_check.surroundings import Surroundings
from miles_async.adapters.megatron.training.optimizer import Snapshot
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.config.schema import Weights
from miles_async.losses.logprobs import token_logprobs
from tests.stack.engine_stack import Stack
from tests.stack.learning import learning
from tests.stack.pretended_device import pretended_gpu
from tests.waiting import START_SECONDS

pytest_plugins = ["tests.stack.engine_fixtures"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
    assert {part for part, status in parts().items() if status == "pass"} == {
        f"{steps}: {figure}"
        for steps in ("short sequences", "long sequence", "long sequence, recomputed")
        for figure in ("time", "speed", "kernels", "time in kernels")
    }


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


def test_each_transport_is_compared_with_a_bare_copy(
    restored: Stack, tmp_path: Path, report: Report, parts: Callable[[], dict[str, str]]
) -> None:
    publish.compare(report, restored.engine, restored.checkpoint, tmp_path / "weights", "fp32")
    found = parts()
    assert len(found) == 3 * len(publish.TRANSPORTS)
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
        "engine resumed, disk: tokens recomputed by the learner": "pass",
        "engine resumed, p2p: tokens recomputed by the learner": "pass",
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
