"""Recording and replaying on the real stack: the second run asks no engine for the recorded steps."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from miles_async.adapters.storage.recording_store import RecordingStore
from miles_async.adapters.storage.rollout_file import load_groups
from miles_async.events import GroupGenerated, GroupMoved, GroupReplayed, StepEnded
from tests.stack.conftest import Played, Stack

ROLLOUTS, BATCH = 4, 8


def play(stack: Stack, entry: str, folder: Path, role: str, *flags: str, rollouts: int = ROLLOUTS) -> Played:
    skip = (f"skip.{role}.enable=True", f"skip.{role}.dump_dir={folder}", f"skip.{role}.steps=[0-]")
    sizes = ("--num-rollout", str(rollouts), "--rollout-batch-size", str(BATCH), "--over-sampling-batch-size", "null")
    return stack.play(entry, "--eval-size", "0", "--windowed-fifo-ratio", "null", *sizes, *flags, *skip)


def requests_so_far(stack: Stack) -> int:
    """Requests that the engines ever finished, by their own count."""
    total = 0
    for engine in stack.cluster.handles.engines:
        with urllib.request.urlopen(f"{engine.url}/metrics") as answer:
            counts = re.findall(r"^sglang:num_requests_total\{.*\} ([\d.e+]+)$", answer.read().decode(), re.MULTILINE)
        total += int(sum(float(count) for count in counts))
    return total


def recorded_tokens(folder: Path) -> list[list[int]]:
    [sizes] = folder.glob("*/GBS*")
    store = RecordingStore(sizes)
    records = [record for step in sorted(store.steps) for record in store.load(step).recording.groups]
    return [list(sample.tokens) for record in records for sample in record.samples]


def test_a_second_synchronous_run_sends_no_request_and_trains_on_equal_tokens(stack: Stack, tmp_path: Path) -> None:
    before = requests_so_far(stack)
    first = play(stack, "train.py", tmp_path, "rollout")
    between = requests_so_far(stack)
    tokens = recorded_tokens(tmp_path)
    second = play(stack, "train.py", tmp_path, "rollout")
    assert between - before == ROLLOUTS * BATCH * first.config.rollout.n_samples_per_prompt
    assert requests_so_far(stack) == between
    assert recorded_tokens(tmp_path) == tokens
    assert [event.tokens for event in second.of(StepEnded)] == [event.tokens for event in first.of(StepEnded)]
    assert [event.reward for event in second.of(StepEnded)] == [event.reward for event in first.of(StepEnded)]
    assert second.violations == []


def test_a_second_fully_asynchronous_run_sends_no_request_and_trains_on_equal_tokens(
    stack: Stack, tmp_path: Path
) -> None:
    """The second run is shorter, so that it needs only prompts that the first run finished.

    The first run trains 5 * 8 groups and a window of 8 lets at most 7 groups pass an unfinished one, so that its first
    33 prompts are finished. The second run trains 2 * 8 groups and has room for 2 * 8 more.
    """
    # Room for a batch in flight and one in the queue, and nothing that is thrown away for its age.
    room = ("--queue-capacity", str(2 * BATCH), "--max-weight-staleness", "null")
    first = play(stack, "train_async.py", tmp_path, "async_rollout", *room, rollouts=5)
    between = requests_so_far(stack)
    [folder] = tmp_path.glob("*/GBS1_*")
    recorded = {f"sample_0_{step}": tokens_of(RecordingStore(folder), step) for step in RecordingStore(folder).steps}
    # Groups that are still in flight at the end of the first run are aborted and not recorded.
    assert set(recorded) <= fed(first)
    assert len(recorded) >= 5 * BATCH, "a group was trained but not recorded"

    saved = ("--save-debug-rollout-data", str(tmp_path / "{rollout_id}.safetensors"))
    second = play(stack, "train_async.py", tmp_path, "async_rollout", *room, *saved, rollouts=2)
    assert fed(second) <= set(recorded)
    assert requests_so_far(stack) == between
    assert {event.sequence for event in second.of(GroupReplayed)} == {e.sequence for e in second.of(GroupGenerated)}
    trained = [group for n in range(2) for group in load_groups(tmp_path / f"{n}.safetensors")[1]]
    assert [[sample.tokens for sample in group] for group in trained] == [recorded[g.feed_index] for g in trained]
    assert len({group.feed_index for group in trained}) == 2 * BATCH
    assert second.violations == []


def fed(run: Played) -> set[str]:
    return {event.feed_index for event in run.of(GroupMoved) if event.before is None}


def tokens_of(store: RecordingStore, step: int) -> list[list[int]]:
    [record] = store.load(step).recording.groups
    return [list(sample.tokens) for sample in record.samples]
