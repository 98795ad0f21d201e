"""A run that goes on under one parallel layout after the other learns what a run on one rank learns, PPO's critic too.

Run as a script this file is the two learner ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port, free_port
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig, TinyModel
from tests.configuration import run_config
from tests.stack.forked_ranks import fork_ranks, run_ranks
from tests.stack.learning import save_state, uneven_groups, weights_of

STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor parallel": (2, {"tensor_model_parallel_size": 2}),
    "distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
    "data parallel": (2, {}),
    "context parallel": (2, {"context_parallel_size": 2, "use_distributed_optimizer": True}),
    "virtual pipeline": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "one rank again": (1, {}),
}
"""Ranks and layout, in the order in which they are gone through: a rollout under each."""
OF_CRITIC = ("value_loss", "return_mean", "explained_variance", "critic_grad_norm", "value_mean")


def config(layout: dict[str, Any]) -> RunConfig:
    return run_config(
        lr=0.0001, max_tokens_per_gpu=40, **layout, advantage_estimator="ppo", normalize_advantages=True, lambd=0.9
    )


def train(learner: MegatronLearner, settings: RunConfig, rollout: int, rank: int, ranks: int, out: Path) -> None:
    """Trains one rollout and writes the results to a file."""
    report = learner.train(rollout, rank_batches(uneven_groups(rollout), settings, ranks)[rank])
    assert report.finite
    weights = weights_of(learner)
    if rank == 0:
        out.mkdir()
        save_file(weights, out / "weights.safetensors")
        (out / "metrics.json").write_text(json.dumps(dict(report.metrics)))


def stage(root: Path, number: int, rank: int, port: int) -> None:
    """Go on from where the stage before ended."""
    name, (ranks, layout) = list(STAGES.items())[number]
    settings = config(layout)
    learner = MegatronLearner(settings, str(root / "model"), rank, ranks, "127.0.0.1", port)
    if number:
        learner.load_state(str(root / f"state-{number - 1}"))
    train(learner, settings, number, rank, ranks, root / name)
    save_state(learner, root / f"state-{number}")
    learner.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per stage, and one per stage of a run that never left its rank."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("reshard")
    create_tiny_model(TinyModel(num_layers=4, hidden_size=64, ffn_hidden_size=128), root / "model", seed=1)
    stage(root, 0, 0, free_port())
    with run_ranks("tests.stack.test_learner_reshard", root):
        learner = MegatronLearner(config({}), str(root / "model"), 0, 1, "127.0.0.1", free_port())
        for rollout, name in enumerate(STAGES):
            train(learner, config({}), rollout, 0, 1, root / f"unmoved, {name}")
        learner.close()
    stage(root, len(STAGES) - 1, 0, free_port())
    return root


@pytest.mark.parametrize("name", STAGES)
def test_a_run_resumes_under_another_layout(runs: Path, name: str) -> None:
    found, expected = (load_file(runs / folder / "weights.safetensors") for folder in (name, f"unmoved, {name}"))
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-5
    metrics, wanted = (
        json.loads((runs / folder / "metrics.json").read_text()) for folder in (name, f"unmoved, {name}")
    )
    assert [metrics[name] for name in OF_CRITIC] == pytest.approx([wanted[name] for name in OF_CRITIC], rel=1e-3)


def stages_of_two_ranks(rank: int, root: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for number, (ranks, _) in enumerate(STAGES.values()):
        if ranks > 1:
            stage(root, number, rank, ports[number])


if __name__ == "__main__":
    claimed = [claim_port() for _ in STAGES]
    fork_ranks(2, stages_of_two_ranks, Path(sys.argv[1]), [port.number for port in claimed])
