from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_async.adapters.megatron.training.warm_start import warm_start
from miles_async.adapters.storage.warm_starts import Example, Problems, WarmStarted
from miles_async.config.schema import Model, RunConfig
from miles_async.errors import UserError
from tests.configuration import run_config

COPYING: Problems = [Example(f"{digit}{letter}=", str(digit)) for digit in range(10) for letter in "abcdefgh"]


def config(cache: Path, *, seed: int = 1, **warm: Any) -> RunConfig:
    settings = {"warm_start_max_steps": 300, "warm_start_accuracy": (0.5, 1.0), "warm_start_check_every": 10, **warm}
    return run_config(
        tiny_num_layers=1,
        tiny_hidden_size=64,
        tiny_ffn_hidden_size=128,
        cache_dir=str(cache),
        warm_start_lr=0.005,
        warm_start_batch_size=32,
        **settings,
        seed=seed,
    )


def started(settings: RunConfig, problems: Problems = COPYING) -> tuple[WarmStarted, list[float]]:
    looks: list[float] = []
    torch.set_num_threads(1)
    return warm_start(settings, problems, COPYING, lambda step, loss, accuracy: looks.append(accuracy)), looks


def test_a_warm_start_ends_when_the_accuracy_is_in_range_and_its_model_is_reused(tmp_path: Path) -> None:
    made, looks = started(config(tmp_path))
    assert made.accuracy is not None
    assert 0.5 <= made.accuracy <= 1.0
    assert made.accuracy == looks[-1]
    assert all(look < 0.5 for look in looks[:-1])
    assert made.steps == 10 * len(looks)
    AutoModelForCausalLM.from_pretrained(made.path)

    again, no_looks = started(config(tmp_path))
    assert (again.path, again.cached, again.accuracy) == (made.path, True, made.accuracy)
    assert no_looks == []


def test_a_run_takes_the_model_that_another_run_has_created_at_the_same_time(tmp_path: Path) -> None:
    other, _ = started(config(tmp_path / "other"))
    settings = config(tmp_path / "shared")
    there = tmp_path / "shared" / Path(other.path).name

    def other_run_ends(step: int, loss: float, accuracy: float) -> None:
        shutil.copytree(other.path, there, dirs_exist_ok=True)

    made = warm_start(settings, COPYING, COPYING, other_run_ends)
    assert (made.path, made.cached, made.accuracy) == (str(there), True, other.accuracy)


def test_a_warm_started_model_is_reused_only_for_the_same_settings(tmp_path: Path) -> None:
    few: dict[str, Any] = {"warm_start_accuracy": (0.0, 1.0)}
    one, _ = started(config(tmp_path / "a", **few))
    same, _ = started(config(tmp_path / "b", **few))
    assert (Path(one.path) / "model.safetensors").read_bytes() == (Path(same.path) / "model.safetensors").read_bytes()
    paths = [
        one.path,
        started(config(tmp_path / "a", seed=2, **few))[0].path,
        started(config(tmp_path / "a", **few), COPYING[1:])[0].path,
    ]
    assert len(set(paths)) == 3


def test_without_warm_start_steps_the_model_or_checkpoint_is_unchanged(tmp_path: Path) -> None:
    untaught, looks = started(config(tmp_path, warm_start_max_steps=0))
    assert (untaught.accuracy, untaught.steps, looks) == (None, 0, [])
    given = config(tmp_path, warm_start_max_steps=0).model_copy(update={"model": Model(hf_checkpoint=untaught.path)})
    assert started(given)[0].path == untaught.path


@pytest.mark.parametrize(
    "warm, complaint",
    [
        ({"warm_start_accuracy": (0.001, 0.002)}, "skipped the range.*lower warm_start_check_every"),
        ({"warm_start_max_steps": 10, "warm_start_accuracy": (0.99, 1.0)}, "stayed below.*raise warm_start_max_steps"),
    ],
)
def test_a_warm_start_that_misses_its_range_is_refused_with_the_setting_to_change(
    tmp_path: Path, warm: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        started(config(tmp_path, **warm))
    assert list(tmp_path.iterdir()) == []
