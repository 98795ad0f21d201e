"""The disk space that `--check-config` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.config.disk import disk_space
from miles_async.config.table import table
from tests.configuration import run_config
from tests.planned_models import checkpoint

LARGE = {
    "rollout_function_path": "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async",
    "rollout_batch_size": 64,
    "n_samples_per_prompt": 64,
    "rollout_max_response_len": 8192,
    "num_rollout": 10_000,
}
TOKENS = 64 * 8192


def test_the_store_holds_the_groups_that_can_wait_for_the_learner() -> None:
    few = disk_space(run_config(**LARGE, max_weight_staleness=1), "train_async.py")
    many = disk_space(run_config(**LARGE), "train_async.py")
    assert few.store == pytest.approx((128 + 64) * TOKENS * 9, rel=0.01)
    assert many.store == pytest.approx((1000 + 64) * TOKENS * 9, rel=0.01)
    assert few.written == many.written == pytest.approx(2 * 640_000 * TOKENS * 9, rel=0.01)


def test_the_store_of_a_synchronous_run_holds_two_batches_at_most() -> None:
    assert disk_space(run_config(**LARGE), "train.py").store == pytest.approx(2 * 64 * TOKENS * 9, rel=0.01)


def test_the_store_holds_the_groups_that_no_checkpoint_covers() -> None:
    settings = LARGE | {"max_weight_staleness": 1}
    rarely = disk_space(run_config(**settings, save="saved", save_interval=20), "train_async.py")
    never = disk_space(run_config(**settings), "train_async.py")
    assert rarely.store - never.store == pytest.approx(20 * 64 * TOKENS * 9, rel=0.01)


def test_the_store_of_a_short_run_is_no_larger_than_its_groups() -> None:
    assert disk_space(run_config(**LARGE | {"num_rollout": 1}), "train_async.py").store < 65 * TOKENS * 9


def test_the_event_log_of_a_long_run_has_its_maximum_size() -> None:
    long = run_config(num_rollout=10_000_000, event_log_max_bytes=2**30)
    assert disk_space(long, "train_async.py").events == 2**30


def test_the_table_names_the_space_of_checkpoints_only_if_there_are_some() -> None:
    def rows(**settings: object) -> list[str]:
        return [line.split()[0] for line in table(run_config(**settings), "train_async.py").splitlines()]

    assert "disk" in rows()
    assert "save" not in rows()
    assert rows(save="saved")[-2:] == ["disk", "save"]


@pytest.mark.parametrize(
    "name, parameters",
    [("Qwen3-0.6B", 596_049_920), ("Llama-3.1-8B", 8_030_261_248), ("DeepSeek-V3", 671_026_404_352)],
)
def test_a_checkpoint_has_each_parameter_of_the_model_once(name: str, parameters: int, tmp_path: Path) -> None:
    """Tied embeddings, latent attention and leading dense layers included."""
    space = disk_space(run_config(hf_checkpoint=checkpoint(name, tmp_path)), "train_async.py")
    assert space.checkpoint == 14 * parameters


def test_a_run_that_trains_adapters_stores_these_alone() -> None:
    several = {
        "adapters": {"one": {}, "two": {}},
        "datasets": {name: {"prompt_data": "a.jsonl", "adapter": name} for name in ("one", "two")},
    }
    settings = LARGE | {"max_weight_staleness": 1, "save": "saved"}
    whole, one, two = (
        disk_space(run_config(**settings | further), "train_async.py")
        for further in ({}, {"lora_rank": 4}, {"lora_rank": 4, **several})
    )
    assert whole.adapters == 0
    assert whole.checkpoint is not None
    assert one.checkpoint is not None
    assert one.checkpoint < whole.checkpoint / 2
    assert two.checkpoint == 2 * one.checkpoint
    assert one.adapters == 3 * 4 * one.checkpoint / 14, "three versions in 32 bits"
    assert two.adapters == 2 * one.adapters
    rows = table(run_config(**settings, lora_rank=4), "train_async.py").splitlines()
    assert any(row.startswith("disk") and ", adapters " in row for row in rows)
