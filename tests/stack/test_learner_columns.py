"""A loss of a user reads a column of a plug-in on the real learner, alone and with tensor and context parallelism.

Run as a script this file is those ranks.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.system.network_ports import claim_port
from miles_async.batching.batch import rank_batches
from miles_async.columns.column import COLUMNS, NO_LIMITS
from miles_async.config.schema import TinyModel
from miles_async.sample_schema import check_sample
from miles_async.types import Group
from tests.configuration import run_config
from tests.plugin_packages import write_package
from tests.stack.forked_ranks import fork_ranks, run_ranks
from tests.stack.learning import gradients_of
from tests.stack.test_learner_parallel import most_apart
from tests.stack.test_loss_functions import FIXED, HERE, groups, learner_of, metrics_of

SOURCE = """
from miles_async.columns.column import Column


class Temperature(Column):
    "The temperature at which each token was sampled."

    default, lowest = 1.0, 0.0
"""
DEFAULT = 1.0
PARALLEL: dict[str, Any] = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
CASES = {
    "four ranks": (4, PARALLEL, "loss_by_temperature", True),
    "one rank": (1, {}, "loss_by_temperature", True),
    "default": (1, {}, "loss_by_temperature", False),
    "without the column": (1, {}, "loss_of_tokens", False),
}
"""Number of ranks, their layout, the loss function, and whether tokens have other temperatures than the default."""


def temperatures(index: int, length: int) -> list[float]:
    """A different temperature for each response token of a sample."""
    return [0.25 * (1 + (index + position) % 6) for position in range(length)]


def heated_groups(*, heated: bool) -> list[Group]:
    """Groups with temperatures, if they are `heated`. One sample has the default, and every third one no column."""
    batch = groups()
    for number, sample in enumerate(chain.from_iterable(batch)):
        if heated and number % 3:
            sample.columns["temperature"] = temperatures(number, sample.response_length)
        elif number == 0:
            sample.columns["temperature"] = [DEFAULT] * sample.response_length
    return batch


def trained_temperatures() -> list[float]:
    """The temperature of each trained token of the groups that are heated."""
    entries: list[float] = []
    for sample in chain.from_iterable(heated_groups(heated=True)):
        length = sample.response_length
        column, mask = sample.columns.get("temperature", [DEFAULT] * length), sample.loss_mask or [1] * length
        entries += [entry for entry, trained in zip(column, mask, strict=True) if trained]
    return entries


def learn(rank: int, root: Path, case: str, port: int) -> None:
    """Takes a step."""
    torch.set_num_threads(1)
    ranks, layout, function, heated = CASES[case]
    path = f"{HERE}.{function}"
    chosen = {"loss_type": "custom_loss", "custom_loss_function_path": path, "loss_aggregation": "token_mean"}
    run = run_config(actor_num_gpus_per_node=ranks, **FIXED | layout | chosen)
    learner, out = learner_of(root, run, rank, ranks, port), root / case
    batch = heated_groups(heated=heated)
    for sample in chain.from_iterable(batch):
        check_sample(sample, NO_LIMITS, None)
    [step] = rank_batches(batch, run, ranks)[rank]
    gradients = gradients_of(learner, step)
    metrics = dict(learner.train(0, [step]).metrics)
    learner.close()
    if rank == 0:
        out.mkdir()
        save_file(gradients, out / "gradients.safetensors")
        (out / "metrics.json").write_text(json.dumps(metrics))


def test_a_column_of_a_plugin_reaches_the_loss_on_every_rank(tmp_path: Path) -> None:
    create_tiny_model(TinyModel(num_layers=2, hidden_size=32, ffn_hidden_size=64), tmp_path / "model", seed=1)
    write_package(tmp_path, COLUMNS, "temperature", "of_users:Temperature", SOURCE, "users")
    with run_ranks("tests.stack.test_learner_columns", tmp_path):
        pass
    gradients = {case: tmp_path / case / "gradients.safetensors" for case in CASES}
    assert most_apart(gradients["four ranks"], gradients["one rank"]) < 1e-5
    assert most_apart(gradients["default"], gradients["without the column"]) == 0
    assert most_apart(gradients["one rank"], gradients["default"]) > 1e-3
    expected = fmean(trained_temperatures())
    for case in ("four ranks", "one rank"):
        assert metrics_of(tmp_path / case)["custom_temperature"] == pytest.approx(expected, rel=1e-6)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    # The package that the test has written is installed in the ranks alone.
    sys.path.insert(0, str(root / "site-packages-of-users"))
    claimed = {case: claim_port() for case in CASES}
    for case, port in claimed.items():
        fork_ranks(CASES[case][0], learn, root, case, port.number)
