"""An objective, a correction and an advantage estimator from a package of one file train the real learner.

Run as a script this file is the process in which the package is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.batching.batch import rank_batches
from miles_async.config.checks import problems
from miles_async.config.cli import help_text
from miles_async.config.schema import TinyModel
from miles_async.losses.advantages.estimator import ADVANTAGES
from miles_async.losses.corrections.correction import CORRECTIONS
from miles_async.losses.objectives.objective import OBJECTIVES
from tests.configuration import run_config
from tests.plugin_packages import write_plugins
from tests.stack.job import ROOT
from tests.stack.learning import learning, uneven_groups, weights_of

SOURCE = """
from miles_async.losses.advantages.estimator import AdvantageEstimator
from miles_async.losses.corrections.correction import Correction
from miles_async.losses.objectives.objective import Objective
from miles_async.section import Section


class Corridor(Objective):
    "Clips the ratio of each token at half of corridor_width."

    class Settings(Section):
        corridor_width: float = 0.2
        "Width of the corridor."

    def compute(self, tokens, settings):
        half = settings.corridor_width / 2
        free = tokens.ratio * tokens.advantages
        bounded = tokens.ratio.clamp(1 - half, 1 + half) * tokens.advantages
        return free.minimum(bounded), (bounded < free).float()


class Bounded(Correction):
    "The ratio of each token, at most largest_weight."

    class Settings(Section):
        largest_weight: float = 1.0

    def weights(self, log_ratio, sequences, settings):
        ratio = log_ratio.exp()
        return ratio.clamp(max=settings.largest_weight), (ratio > settings.largest_weight).float()


class Centred(AdvantageEstimator):
    "Subtracts the mean of the group."

    def advantages(self, rewards, weights, settings):
        mean = sum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]
"""
PLUGINS = (
    (OBJECTIVES, "corridor", "of_users:Corridor"),
    (CORRECTIONS, "bounded", "of_users:Bounded"),
    (ADVANTAGES, "centred", "of_users:Centred"),
)
LIKE_THEM: dict[str, Any] = {
    "eps_clip": 0.01,
    "off_policy_correction": "tis",
    "tis_clip": 1.5,
    "grpo_std_normalization": False,
}
MINE: dict[str, Any] = {
    "policy_objective": "corridor",
    "corridor_width": 0.02,
    "off_policy_correction": "bounded",
    "largest_weight": 1.5,
    "advantage_estimator": "centred",
}


def train(root: Path, name: str, **settings: Any) -> None:
    """Two optimizer steps on the same samples, so that the second has ratios to clip."""
    config = run_config(n_samples_per_prompt=4, lr=1e-3, num_steps_per_rollout=2, **settings)
    assert problems(config, "train.py") == problems(run_config(n_samples_per_prompt=4), "train.py")
    with learning(root / "tiny", config) as learner:
        [steps] = rank_batches(uneven_groups(0) * 2, config, 1)
        metrics = dict(learner.train(0, steps).metrics)
        save_file(weights_of(learner), root / f"{name}.safetensors")
    (root / f"{name}.json").write_text(json.dumps(metrics))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plugins")
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1}
    create_tiny_model(TinyModel(**sizes), root / "tiny", seed=1)
    site = write_plugins(root, "of_users", SOURCE, "users", *PLUGINS)
    path = os.pathsep.join([str(ROOT), str(site)])
    subprocess.run(
        [sys.executable, "-m", "tests.stack.test_loss_plugins", str(root)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    return root


def test_a_package_of_one_file_trains_what_the_same_formulas_in_this_project_train(runs: Path) -> None:
    mine, ours = load_file(runs / "mine.safetensors"), load_file(runs / "ours.safetensors")
    assert max((tensor - ours[name]).abs().max().item() for name, tensor in mine.items()) < 1e-6
    start = load_file(runs / "tiny/model.safetensors")
    assert max((tensor - start[name]).abs().max().item() for name, tensor in mine.items()) > 1e-4


def test_the_plugins_report_what_their_bounds_changed(runs: Path) -> None:
    mine, ours = (json.loads((runs / f"{name}.json").read_text()) for name in ("mine", "ours"))
    for name in ("loss", "clip_fraction", "bounded_fraction"):
        assert mine[name] == pytest.approx(ours[name], abs=1e-6)
    assert 0 < mine["clip_fraction"] < 1
    assert 0 < mine["bounded_fraction"] < 1


def test_the_help_has_the_names_and_the_settings_of_the_package(runs: Path) -> None:
    text = " ".join((runs / "help.txt").read_text().split())
    assert "corridor: Clips the ratio of each token at half of corridor_width." in text
    assert "--corridor-width FLOAT Width of the corridor. (default 0.2)" in text
    assert "bounded: The ratio of each token, at most largest_weight." in text
    assert "centred: Subtracts the mean of the group." in text


if __name__ == "__main__":
    here = Path(sys.argv[1])
    (here / "help.txt").write_text(help_text("miles-async train"))
    train(here, "ours", **LIKE_THEM)
    train(here, "mine", **MINE)
