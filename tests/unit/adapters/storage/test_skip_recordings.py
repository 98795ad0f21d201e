"""Recordings on disk are loaded whole, or refused with a reason."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from miles_async.adapters.storage.recording_store import (
    BATCH,
    META,
    RecordingDamagedError,
    RecordingStore,
    StoreFullError,
)
from miles_async.adapters.storage.recordings_command import main
from miles_async.recording import GroupRecord, Recording
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.disks import files_at_most

IDENTITY = {"model": "m", "rollout_temperature": 0.7}


def sample(index: int, mask: list[int] | None = None) -> Sample:
    return Sample(
        index=index,
        prompt="2+2=",
        label="4",
        metadata={"feed_index": "sample_0_3", "nested": {"a": [1.5]}},
        tokens=[5, 6, 7 + index],
        response="四\ufffd",
        response_length=2,
        loss_mask=mask,
        rollout_log_probs=[-0.1, -1.2345678901234567],
        spans=[VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)],
        status=SampleStatus.TRUNCATED,
    )


def recording(*samples: Sample) -> Recording:
    members = list(samples) or [sample(0), sample(1, [1, 0])]
    group = GroupRecord(feed_index="sample_0_3", prompt="hash", version=4, seconds=1.25, samples=members)
    return Recording(groups=[group], seconds=1.25)


def test_a_saved_recording_is_loaded_unchanged(tmp_path: Path) -> None:
    RecordingStore(tmp_path).save(3, recording(), IDENTITY)
    loaded = RecordingStore(tmp_path).load(3)
    assert loaded.recording.groups == recording().groups
    assert (loaded.recording.seconds, loaded.recording.replayed_from) == (1.25, 3)
    assert loaded.identity == IDENTITY


def test_a_prompt_of_chat_messages_is_loaded_unchanged(tmp_path: Path) -> None:
    chat = replace(sample(0), prompt=[{"role": "user", "content": "2+2="}])
    RecordingStore(tmp_path).save(3, recording(chat), IDENTITY)
    assert RecordingStore(tmp_path).load(3).recording.groups == recording(chat).groups


def test_a_sample_without_a_response_is_loaded(tmp_path: Path) -> None:
    empty = Sample(index=0, prompt="x", tokens=[1], status=SampleStatus.COMPLETED)
    RecordingStore(tmp_path).save(0, recording(empty, empty), IDENTITY)
    assert RecordingStore(tmp_path).load(0).recording.groups[0].samples == [empty, empty]


@pytest.mark.parametrize("name", [BATCH, META])
def test_an_entry_truncated_at_any_byte_is_set_aside(tmp_path: Path, name: str) -> None:
    RecordingStore(tmp_path).save(3, recording(), IDENTITY)
    entry = tmp_path / "3"
    for length in reversed(range((entry / name).stat().st_size)):
        os.truncate(entry / name, length)
        store = RecordingStore(tmp_path)
        with pytest.raises(RecordingDamagedError, match=r"3 is damaged \(.*\) and was set aside as 3\.damaged-"):
            store.load(3)
        assert store.steps == RecordingStore(tmp_path).steps == frozenset()
        [damaged] = tmp_path.iterdir()
        damaged.rename(entry)


@pytest.mark.parametrize("name", [BATCH, META])
def test_an_entry_without_one_of_its_files_is_set_aside_and_can_be_recorded_again(tmp_path: Path, name: str) -> None:
    store = RecordingStore(tmp_path)
    store.save(3, recording(), IDENTITY)
    (tmp_path / "3" / name).unlink()
    with pytest.raises(RecordingDamagedError):
        store.load(3)
    store.save(3, recording(), IDENTITY)
    assert store.load(3).recording.groups == recording().groups


def test_a_batch_file_of_another_entry_is_detected(tmp_path: Path) -> None:
    """The same sizes, another content: the meta of one run beside the tokens of another."""
    store = RecordingStore(tmp_path)
    store.save(3, recording(sample(0)), IDENTITY)
    store.save(4, recording(sample(9)), IDENTITY)
    (tmp_path / "3" / BATCH).write_bytes((tmp_path / "4" / BATCH).read_bytes())
    with pytest.raises(RecordingDamagedError, match=r"the checksum of gen_batch\.safetensors does not match"):
        store.load(3)


def test_edited_metadata_is_detected(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path)
    store.save(3, recording(), IDENTITY)
    meta = orjson.loads((tmp_path / "3" / META).read_bytes())
    meta["identity"]["model"] = "another"
    (tmp_path / "3" / META).write_bytes(orjson.dumps(meta))
    with pytest.raises(RecordingDamagedError, match=r"the checksum of meta\.json does not match"):
        store.load(3)


def test_a_step_appears_atomically_after_all_its_files_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strokes: list[str] = []
    synced, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        strokes.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        synced(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        assert RecordingStore(tmp_path).steps == frozenset(), "nothing is to be seen before"
        strokes.append(f"rename to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    RecordingStore(tmp_path).save(3, recording(), IDENTITY)
    batch, meta, draft, *rest = strokes
    assert (batch, meta, draft[:3]) == (BATCH, META, ".3.")
    assert rest == ["rename to 3", tmp_path.name]


def test_one_complete_entry_remains_after_several_writers(tmp_path: Path) -> None:
    entries = [recording(sample(index)) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda entry: RecordingStore(tmp_path).save(3, entry, IDENTITY), entries))
    assert RecordingStore(tmp_path).load(3).recording.groups in [entry.groups for entry in entries]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_full_store_refuses_an_entry_and_leaves_no_file(tmp_path: Path) -> None:
    RecordingStore(tmp_path).save(0, recording(), IDENTITY)
    store = RecordingStore(tmp_path, max_bytes=500)
    with pytest.raises(StoreFullError, match="of at most 500"):
        store.save(1, recording(), IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_the_limit_counts_prompts_and_metadata_too(tmp_path: Path) -> None:
    long = sample(0)
    long.metadata = {"documents": "x" * 5_000}
    store = RecordingStore(tmp_path, max_bytes=5_000)
    with pytest.raises(StoreFullError, match="of at most 5000"):
        store.save(0, recording(long), IDENTITY)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with files_at_most(100), pytest.raises(OSError, match="File too large"):
        RecordingStore(tmp_path).save(3, recording(), IDENTITY)
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_json_cannot_express_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    odd = sample(0)
    odd.metadata = {"object": object()}
    with pytest.raises(TypeError):
        RecordingStore(tmp_path).save(3, recording(odd), IDENTITY)
    assert list(tmp_path.iterdir()) == []


def replayed(live_version: int) -> Group:
    group = Group([Sample(index=8), Sample(index=9)], feed_index="sample_0_3")
    recording().groups[0].replay_into(group, live_version)
    return group


@pytest.mark.parametrize("live_version, expected", [(4, [(3, 4)]), (10, [(9, 10)]), (1, [(0, 1)])])
def test_a_replayed_group_has_the_age_of_the_recorded_one(live_version: int, expected: list[tuple[int, int]]) -> None:
    assert {tuple(span.version for span in member.spans) for member in replayed(live_version)} == set(expected)


def test_no_replayed_token_is_older_than_the_first_version() -> None:
    assert replayed(0)[0].spans == [VersionSpan(0, 0, 2)]


def test_a_replayed_sample_has_the_recorded_metadata_and_the_current_metadata_of_the_data() -> None:
    """A reward may count tool calls, and it uses the current label if the label was corrected."""
    generated = Sample(index=8, metadata={"feed_index": "sample_0_3", "answer": "5", "tool_calls": 2})
    group = Group([Sample(index=8, metadata={"feed_index": "sample_0_3", "answer": "4"})], feed_index="sample_0_3")
    GroupRecord.of(Group([generated], feed_index="sample_0_3"), prompt="p", live_version=4, seconds=1).replay_into(
        group, 4
    )
    assert group[0].metadata == {"feed_index": "sample_0_3", "answer": "4", "tool_calls": 2}


def test_changes_of_later_stages_do_not_reach_the_record() -> None:
    group = Group([sample(0)], feed_index="sample_0_3")
    record = GroupRecord.of(group, prompt="p", live_version=4, seconds=1.0)
    group[0].reward = 1.0
    group[0].metadata["error"] = "late"
    group.reset()
    assert record.samples == [sample(0)]


def test_a_recording_of_another_prompt_replaces_prompt_and_label_but_not_the_feed_index() -> None:
    group = Group([Sample(index=8, prompt="1+1=", label="2", metadata={"feed_index": "sample_0_9"})])
    group.feed_index = "sample_0_9"
    GroupRecord.of(Group([sample(0)], feed_index="sample_0_3"), prompt="p", live_version=4, seconds=1).replay_into(
        group, 4
    )
    assert (group[0].prompt, group[0].label, group[0].index) == ("2+2=", "4", 8)
    assert group[0].metadata == {"feed_index": "sample_0_9", "nested": {"a": [1.5]}}


def test_a_sample_that_the_generate_function_removed_is_removed_in_the_replay_too() -> None:
    removed = replace(sample(0), remove_sample=True)
    group = Group([Sample(index=8), Sample(index=9)], feed_index="sample_0_3")
    recording(removed, sample(1)).groups[0].replay_into(group, 4)
    assert [member.remove_sample for member in group] == [True, False]


def test_recordings_are_listed_and_removed_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RecordingStore(tmp_path / "e_p" / "GBS1_N2_in8_out8")
    for step in (1, 2, 3, 7):
        store.save(step, recording(), IDENTITY)
    main(["ls", "--dir", str(tmp_path)])
    assert "e_p/GBS1_N2_in8_out8: 4 steps (1-3 7)" in capsys.readouterr().out
    main(["rm", "--dir", str(tmp_path), "--steps", "2-5"])
    assert "removed 2 steps" in capsys.readouterr().out
    assert RecordingStore(store.folder).steps == {1, 7}
    with pytest.raises(SystemExit):
        main(["rm", "--dir", str(tmp_path), "--steps", "all"])
    assert RecordingStore(store.folder).steps == {1, 7}
