"""Saved batches are loaded unchanged and can be inspected; a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.adapters.storage.rollout_file import load_groups, rollout_path, save_groups
from miles_async.errors import TrajectoryError, UserError
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.slime_samples import slime_sample
from workers.inspect_rollout import main


def batch() -> list[Group]:
    plain = Sample(
        index=0,
        prompt="1 + 1 = é",
        label="2",
        tokens=[5, 6, 7, 8],
        response="2!",
        response_length=2,
        rollout_log_probs=[-0.1, -1e-30],
        spans=[VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)],
        reward=0.1,
        status=SampleStatus.TRUNCATED,
    )
    chat = Sample(
        index=1,
        prompt=[{"role": "user", "content": "hi"}],
        metadata={"feed_index": "sample_0_0", "tools": [{"name": "t"}]},
        tokens=[5, 6, 9],
        response_length=1,
        loss_mask=[0],
        rollout_log_probs=[0.0],
        reward={"acc": 1.0},
        reward_key="acc",
        remove_sample=True,
    )
    empty = [Sample(index=2, loss_mask=[]), Sample(index=3)]
    return [Group([plain, chat], feed_index="sample_0_0", attempt=1), Group(empty, feed_index="sample_0_1")]


def test_saved_groups_are_loaded_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "7.safetensors"
    save_groups(path, 7, batch())
    rollout_id, groups = load_groups(path)
    assert (rollout_id, groups) == (7, batch())
    assert [(group.feed_index, group.attempt) for group in groups] == [("sample_0_0", 1), ("sample_0_1", 0)]
    assert [sample.loss_mask for group in groups for sample in group] == [None, [0], [], None]
    assert list(path.parent.iterdir()) == [path]


def test_a_batch_without_samples_can_be_saved(tmp_path: Path) -> None:
    save_groups(tmp_path / "0", 0, [])
    assert load_groups(tmp_path / "0") == (0, [])


def test_a_truncated_changed_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.safetensors"
    save_groups(path, 0, batch())
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(UserError, match=r"rollout data .*0\.safetensors cannot be read"):
        load_groups(path)
    path.write_bytes(whole[:-3] + b"xyz")
    with pytest.raises(UserError, match="is damaged: the checksum does not match"):
        load_groups(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_groups(tmp_path / "nowhere")


def test_a_sample_of_slime_gets_the_oldest_of_its_versions_and_keeps_added_attributes_as_metadata() -> None:
    sample = Sample.from_dict(slime_sample(0))
    assert sample == Sample(
        index=0,
        prompt="1 + 1 =",
        label="2",
        metadata={"level": 3, "round_number": 7},
        tokens=[5, 6, 7, 8],
        response="2!",
        response_length=2,
        loss_mask=[1, 1],
        rollout_log_probs=[-0.1, -0.2],
        spans=[VersionSpan(3, 0, 2)],
        reward=1.0,
        status=SampleStatus.COMPLETED,
    )


def test_a_pending_sample_of_an_early_slime_has_neither_versions_nor_log_probabilities() -> None:
    early = {"index": 1, "prompt": "p", "tokens": [], "response_length": 0, "status": "pending", "metadata": {}}
    assert Sample.from_dict(early) == Sample(index=1, prompt="p")


def test_a_sample_of_slime_with_images_is_refused() -> None:
    with pytest.raises(TrajectoryError, match="sample 4 has multimodal_inputs: only text can be trained"):
        Sample.from_dict(slime_sample(4, multimodal_inputs={"images": ["a"]}))


def test_the_rollout_number_is_the_only_placeholder_of_a_file_name() -> None:
    assert rollout_path("d/{rollout_id}.st", 3) == Path("d/3.st")
    with pytest.raises(UserError, match=r"has a placeholder other than \{rollout_id\}"):
        rollout_path("d/{step}.st", 3)


def test_a_saved_batch_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "7.safetensors"
    save_groups(path, 7, batch())
    assert main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "rollout 7: 2 groups" in shown
    assert "sample_0_0" in shown
    assert "0.1 1" in shown
    assert "3-4" in shown
    assert "1 truncated, 1 pending, 1 removed from the loss" in shown
    assert main([str(path), "--sample", "0"]) == 0
    shown = capsys.readouterr().out
    assert "3 for [0, 1), 4 for [1, 2)" in shown
    assert "--- response\n2!" in shown
    assert main([str(path), "--sample", "9"]) == 2
    assert "no sample 9: choose one from 0 to 3" in capsys.readouterr().err
