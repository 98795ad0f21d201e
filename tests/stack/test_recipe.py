"""A recipe in Python trains with the real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async import SlimeRecipe, TrainConfig


def test_a_recipe_trains_the_tiny_model_and_returns_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = TrainConfig(
        recipe=SlimeRecipe(
            reasoning_gym_task="chain_sum",
            reasoning_gym_settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            prompt_template="{expression}",
            rm_type="reasoning_gym",
            async_mode=True,
            rollout_function_path="fully_async_rollout.generate_rollout_fully_async",
            num_rollout=2,
            rollout_batch_size=4,
            n_samples_per_prompt=4,
            global_batch_size=8,
            rollout_max_response_len=4,
            run_dir=str(tmp_path / "runs"),
            save=str(tmp_path / "checkpoints"),
            save_interval=1,
        )
    ).train()
    assert (result.summary["reason"], result.summary["rollouts"]) == ("done", 2)
    assert result.summary["run"] == result.training_run_id == result.run_folder.name
    assert result.checkpoint_dir is not None
    assert (result.checkpoint_dir / "latest").exists()
    assert "Staleness stats" in capsys.readouterr().out
