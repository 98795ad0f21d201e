"""Two ranks of the real Megatron learner, each a process, must learn what one rank learns.

Run as a script this file is one of those ranks.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_async.adapters.megatron.batch import policy_steps
from miles_async.adapters.megatron.learner import MegatronLearner
from miles_async.adapters.megatron.parallel import free_port
from miles_async.adapters.megatron.tiny_model import create_tiny_model
from miles_async.config.schema import Algorithm, Learner, RunConfig, TinyModel
from miles_async.types import Group, Sample
from tests.stack.saving import save_state

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "data parallel": {},
}
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]


def config(layout: dict[str, Any]) -> RunConfig:
    # Adam's first step divides each gradient by its own size, rounding errors included: where a gradient is almost
    # nothing the ranks may differ by a share of the learning rate.
    return RunConfig(
        learner=Learner(lr=1e-4, max_tokens_per_gpu=40, **layout),
        algorithm=Algorithm(entropy_coef=0.01, grpo_std_normalization=False),
    )


def batch() -> list[Group]:
    """Samples of uneven lengths, so that ranks carry unequal shares."""
    draw = random.Random(0)
    return [
        Group(
            Sample(
                index=4 * g + i,
                tokens=[draw.randrange(256) for _ in range(5 + 3 * i + g)],
                response_length=3 + i,
                rollout_log_probs=[-5.5 - draw.random() for _ in range(3 + i)],
                reward=draw.random(),
            )
            for i in range(4)
        )
        for g in range(3)
    ]


def learn(settings: RunConfig, model: str, out: Path, rank: int, world_size: int, port: int) -> None:
    """One step and what can be seen of it; rank 0 writes it down."""
    torch.set_num_threads(1)
    learner = MegatronLearner(settings, model, rank, world_size, "127.0.0.1", port)
    tensor_parallel = settings.learner.tensor_model_parallel_size
    shares = policy_steps(batch(), settings, ranks=world_size // tensor_parallel)
    before = learner.logprobs([sample.tokens for group in batch() for sample in group])
    report = learner.train(0, shares[rank // tensor_parallel])
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    greedy = learner.greedy(PROMPTS, 4, eos=256)
    learner.save_hf(str(out / "saved"))
    save_state(learner, out / "state")
    learner.close()
    if rank == 0:
        save_file(weights, out / "weights.safetensors")
        facts = {"metrics": dict(report.metrics), "logprobs": before, "greedy": greedy}
        (out / "facts.json").write_text(json.dumps(facts))


def results(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(out / "weights.safetensors"), json.loads((out / "facts.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per layout, and `one rank`; all layouts are run by the same two processes, one after the other."""
    root = tmp_path_factory.mktemp("parallel")
    create_tiny_model(TinyModel(num_layers=2, hidden_size=64, ffn_hidden_size=128), root / "model", seed=1)
    for name in (*LAYOUTS, "one rank"):
        (root / name).mkdir()
    ports = [str(free_port()) for _ in LAYOUTS]
    ranks = [subprocess.Popen([sys.executable, __file__, str(root), str(rank), *ports]) for rank in range(2)]
    try:
        learn(config({}), str(root / "model"), root / "one rank", 0, 1, free_port())
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_same_step_as_one(runs: Path, layout: str) -> None:
    expected, _ = results(runs / "one rank")
    weights, _ = results(runs / layout)
    assert weights.keys() == expected.keys()
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_see_the_same_probabilities_metrics_and_answers_as_one(runs: Path, layout: str) -> None:
    _, expected = results(runs / "one rank")
    _, facts = results(runs / layout)
    of_the_layout = {"micro_batches", "micro_batches_lower_bound", "flop_imbalance", "memory_gib"}
    found, wanted = (
        {name: value for name, value in metrics["metrics"].items() if name not in of_the_layout}
        for metrics in (facts, expected)
    )
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for logprobs, reference in zip(facts["logprobs"], expected["logprobs"], strict=True):
        assert logprobs == pytest.approx(reference, abs=1e-5)
    assert facts["greedy"] == expected["greedy"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_save_one_whole_checkpoint(runs: Path, layout: str) -> None:
    weights, _ = results(runs / layout)
    saved = load_file(runs / layout / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())


def test_a_checkpoint_of_two_data_parallel_ranks_goes_on_as_one_rank(runs: Path) -> None:
    expected, _ = results(runs / "data parallel")
    learner = MegatronLearner(config({}), str(runs / "model"), 0, 1, "127.0.0.1", free_port())
    try:
        learner.load_state(str(runs / "data parallel" / "state"))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in learner.weights())
        [steps] = policy_steps(batch(), config({}), ranks=1)
        assert learner.train(1, steps).finite
    finally:
        learner.close()


if __name__ == "__main__":
    root, own_rank, *meeting_ports = sys.argv[1:]
    for (layout_name, learner_settings), meeting_port in zip(LAYOUTS.items(), meeting_ports, strict=True):
        out_folder = Path(root) / layout_name
        learn(config(learner_settings), f"{root}/model", out_folder, int(own_rank), 2, int(meeting_port))
