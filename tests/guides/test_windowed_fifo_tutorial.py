"""The tutorial on windowed-FIFO rollouts for slime, in its order: the bias, the recipe and the tuning table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import notes
from miles_async.config.load import load_config
from miles_async.rollout.windowed_fifo_rollout import WindowedFIFOCollector
from miles_async.scheduling.bounds import Bounds, Schedule, window_size
from tests.configuration import run_config

RECIPE: dict[str, Any] = {
    "colocate": True,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "rollout_num_gpus_per_engine": 1,
    "num_rollout": 15,
    "rollout_batch_size": 16,
    "over_sampling_batch_size": 32,
    "windowed_fifo_ratio": 0.3,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 8192,
    "rollout_temperature": 1.0,
    "global_batch_size": 32,
    "lr": 1e-6,
    "advantage_estimator": "grpo",
    "use_kl_loss": False,
    "kl_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 9216,
    "save_interval": 10,
    "apply_chat_template_kwargs": {"enable_thinking": True},
}
"""The settings of the recipe. `tests/unit/compat/tutorial/test_recipe.py` runs the tutorial's Python code."""


# --- See the bias ---------------------------------------------------------------------------------------------------


SNIPPET = """
import numpy as np

from miles_async.rollout.windowed_fifo_rollout import WindowedFIFOCollector

N, target = 256, 128

def kept_batch(window_size):
    rng = np.random.default_rng(0)
    # Half easy, half hard prompts; latency rises with difficulty.
    d = np.where(rng.random(N) < 0.5, rng.beta(2, 5, N), rng.beta(5, 2, N))
    finish_order = np.argsort(d + 0.03 * rng.normal(0, 1, N))

    collector = WindowedFIFOCollector(total=N, window_size=window_size)
    kept = []
    for pos in finish_order:  # groups finish fastest-first
        collector.mark_completed(int(pos), int(pos))
        for g in collector.drain():
            if len(kept) < target:
                kept.append(g)
        if len(kept) >= target:
            break
    hard_frac = (d[np.array(kept)] > 0.6).mean()
    return hard_frac, (d > 0.6).mean()

fffo_hard, pop_hard = kept_batch(window_size=N)  # ratio = 1.0
win_hard, _ = kept_batch(window_size=int(0.3 * N))  # ratio = 0.3

print(f"population hard-prompt fraction: {pop_hard:.0%}")
print(f"  greedy FFFO (ratio=1.0): {fffo_hard:.0%}  <- hard prompts dropped")
print(f"  windowed    (ratio=0.3): {win_hard:.0%}  <- matches population")
"""
"""The tutorial's program. Only the package in its import differs."""


def test_the_program_of_the_tutorial_prints_its_three_lines(tmp_path: Path) -> None:
    """Greedy collection drops the hard prompts; the window keeps about their share of the population."""
    program = tmp_path / "bias.py"
    program.write_text(SNIPPET)
    printed = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        "population hard-prompt fraction: 44%",
        "  greedy FFFO (ratio=1.0): 0%  <- hard prompts dropped",
        "  windowed    (ratio=0.3): 41%  <- matches population",
    ]


# --- Turn it on in training -----------------------------------------------------------------------------------------


def test_the_settings_of_the_recipe_are_accepted_and_the_ratio_selects_the_rollout_function(tmp_path: Path) -> None:
    run = run_config(**RECIPE)
    assert run.rollout.rollout_function_path == "miles_async.rollout.windowed_fifo_rollout.generate_rollout"
    (tmp_path / "config.json").write_text("{}")
    config = Path(__file__).parents[2] / "configs" / "tutorial-windowed-fifo.yaml"
    flags = ["--config", str(config), "--hf-checkpoint", str(tmp_path), "--sglang-mem-fraction-static", "0.75"]
    loaded = load_config([*flags, "--prompt-data", __file__], entry="train_async.py")
    assert loaded.rollout.windowed_fifo_ratio == 0.3
    assert loaded.engine.sglang_server_args == {"mem_fraction_static": 0.75}


def test_the_ratio_has_no_effect_without_over_sampling_and_a_note_says_so() -> None:
    (note,) = notes(run_config(windowed_fifo_ratio=0.3), "train_async.py")
    assert note.startswith("windowed_fifo_ratio has no effect: all generated groups are trained in one batch")
    assert notes(run_config(**RECIPE, save="checkpoints"), "train_async.py") == []


# --- Tuning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio, window", [(0.0, 1), (0.3, 9), (0.5, 16), (1.0, 32)])
def test_the_window_is_the_ratio_of_the_generation_batch_and_at_least_one(ratio: float, window: int) -> None:
    assert window_size(ratio, 32) == window
    bounds = Bounds.derive(
        rollout_batch_size=16,
        over_sampling_batch_size=32,
        windowed_fifo_ratio=ratio,
        max_weight_staleness=None,
        update_weights_interval=1,
        queue_capacity=1000,
        schedule=Schedule.ONE_STEP_OFF,
    )
    assert bounds.window == window


def test_strict_fifo_waits_for_a_slow_head_and_greedy_does_not() -> None:
    strict, greedy = WindowedFIFOCollector[str](4, window_size(0.0, 4)), WindowedFIFOCollector[str](4, 4)
    for collector in (strict, greedy):
        collector.mark_completed(1, "fast")
    assert (list(strict.drain()), list(greedy.drain())) == ([], ["fast"])
