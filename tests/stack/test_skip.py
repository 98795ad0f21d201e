"""Recording and replaying on the real stack: the second run asks no engine for the recorded steps."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from miles_async.adapters.recordings.store import RecordingStore
from miles_async.observability.events import GroupGenerated, StepEnded
from tests.stack.conftest import Played, Stack

ROLLOUTS, BATCH = 4, 8
pytestmark = pytest.mark.stack


def play(stack: Stack, entry: str, folder: Path, role: str, *flags: str) -> Played:
    skip = (f"skip.{role}.enable=True", f"skip.{role}.dump_dir={folder}", f"skip.{role}.steps=[0-]")
    sizes = ("--num-rollout", str(ROLLOUTS), "--rollout-batch-size", str(BATCH), "--over-sampling-batch-size", "null")
    return stack.play(entry, "--eval-size", "0", "--windowed-fifo-ratio", "null", *sizes, *flags, *skip)


def requests_so_far(stack: Stack) -> int:
    """Requests that the engines ever finished, by their own count."""
    total = 0
    for engine in stack.cluster.surroundings.engines:
        with urllib.request.urlopen(f"{engine.url}/metrics") as answer:
            counts = re.findall(r"^sglang:num_requests_total\{.*\} ([\d.e+]+)$", answer.read().decode(), re.MULTILINE)
        total += int(sum(float(count) for count in counts))
    return total


def recorded_tokens(folder: Path) -> list[list[int]]:
    [sizes] = folder.glob("*/GBS*")
    store = RecordingStore(sizes)
    records = [record for step in sorted(store.steps) for record in store.load(step).recording.groups]
    return [sample.tokens for record in records for sample in record.samples]


def test_a_second_run_in_turns_sends_no_request_and_trains_on_equal_tokens(stack: Stack, tmp_path: Path) -> None:
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


def test_a_second_fully_asynchronous_run_generates_only_what_the_first_did_not_finish(
    stack: Stack, tmp_path: Path
) -> None:
    before = requests_so_far(stack)
    play(stack, "train_async.py", tmp_path, "async_rollout")
    between = requests_so_far(stack)
    [folder] = tmp_path.glob("*/GBS1_*")
    assert len(RecordingStore(folder).steps) >= ROLLOUTS * BATCH
    second = play(stack, "train_async.py", tmp_path, "async_rollout")
    assert requests_so_far(stack) - between < (between - before) / 2
    assert len(second.of(StepEnded)) == ROLLOUTS
    assert second.of(GroupGenerated)
