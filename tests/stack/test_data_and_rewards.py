"""A user's file, reward and filters on the real stack: broken rows are named and counted, and the run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.errors import FatalError, UserError
from miles_async.events import (
    DataSkipped,
    Event,
    GroupFiltered,
    GroupMoved,
    PublishEnded,
    SamplesRemoved,
    StepEnded,
    WarningRaised,
    decode,
    encode,
)
from tests.stack.conftest import Played, Stack

ROLLOUTS, BATCH, OFFERED = 4, 4, 6


@pytest.fixture(scope="module")
def played(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A thousand good rows first, so that the others are met during the run."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    good = [json.dumps({"q": f"{row} + 1 =", "a": row + 1}) for row in range(1000)]
    broken = ['{"q": "no answer"}', '{"q": "cut off', json.dumps({"q": "long " * 30, "a": 1})] * 150
    path.write_text("\n".join([*good, *broken]))
    flags = {
        "prompt-data": str(path),
        "reasoning-gym-task": "null",
        "input-key": "q",
        "label-key": "a",
        "eval-size": 0,
        "num-rollout": ROLLOUTS,
        "rollout-batch-size": BATCH,
        "over-sampling-batch-size": OFFERED,
        "rollout-max-prompt-len": 64,
        "rollout-function-path": "miles_async.rollout.sglang_rollout.generate_rollout",
        "windowed-fifo-ratio": "null",
        "over-sampling-filter-path": "miles_async.filters.sort_by_reward_std",
        "rollout-sample-filter-path": "miles_async.filters.mask_truncated",
        "custom-rm-path": "tests.stack.user_functions.shares_of_even_bytes",
        "reward-key": "even",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return stack.play("train.py", *words, "--group-rm", "--custom-rm-isolated")


def test_every_batch_trains(played: Played) -> None:
    assert [event.finite for event in played.of(StepEnded)] == [True] * ROLLOUTS
    assert played.violations == []


def test_broken_rows_are_reported_with_file_line_and_key(played: Played) -> None:
    sentences = [event.sentence for event in played.of(DataSkipped)]
    assert sentences
    assert all("rows.jsonl, line 1" in sentence for sentence in sentences)
    assert any("no key 'a' (label_key)" in sentence or "not valid JSON" in sentence for sentence in sentences)


def test_prompts_that_are_too_long_go_to_the_dead_letters_at_once(played: Played) -> None:
    dropped = [event for event in played.of(GroupMoved) if event.reason == "prompt_too_long"]
    dead_lettered = [json.loads(line) for line in (played.folder.path / "dead_letters.jsonl").read_text().splitlines()]
    assert dropped
    assert [letter["feed_index"] for letter in dead_lettered] == [event.feed_index for event in dropped]
    assert all("more than rollout_max_prompt_len 64" in letter["error"] for letter in dead_lettered)


def test_the_over_sampling_filter_drops_the_other_groups(played: Played) -> None:
    reasons = [event.reason for event in played.of(GroupFiltered)]
    assert reasons == ["over_sampling"] * (ROLLOUTS * (OFFERED - BATCH))


def test_the_number_of_samples_that_a_filter_masked_is_reported(played: Played) -> None:
    masked = [event.samples for event in played.of(SamplesRemoved)]
    assert len(masked) == ROLLOUTS
    assert sum(masked) > 0


def test_batches_with_a_reward_that_is_not_finite_are_skipped_until_there_are_too_many(
    stack: Stack, tmp_path: Path
) -> None:
    events: list[Event] = []
    with pytest.raises(
        FatalError, match="not finite in 2 batches in a row, up to rollout 1; their groups are in the dead"
    ):
        stack.play(
            "train.py",
            *("--num-rollout", "5", "--rollout-batch-size", "4", "--max-nonfinite-batches", "2"),
            *("--rollout-sample-filter-path", "tests.stack.user_functions.lose_a_reward", "--eval-size", "0"),
            *("--rollout-function-path", "miles_async.rollout.sglang_rollout.generate_rollout"),
            *("--windowed-fifo-ratio", "null", "--run-dir", str(tmp_path)),
            watch=events.append,
        )
    # What was seen of them can be read again, though JSON knows no NaN.
    steps = [event for event in (decode(encode(event)) for event in events) if isinstance(event, StepEnded)]
    assert [step.finite for step in steps] == [False, False]
    assert {event.version for event in events if isinstance(event, PublishEnded)} == {0}
    dead_lettered = [json.loads(line) for line in (tmp_path / "latest" / "dead_letters.jsonl").read_text().splitlines()]
    assert [letter["reason"] for letter in dead_lettered] == ["nonfinite"] * 8


def test_a_reward_that_fails_for_every_sample_is_announced_and_ends_the_run_with_its_exception(stack: Stack) -> None:
    events: list[Event] = []
    said = "reward tests.stack.user_functions.reward_of_another_schema raised KeyError: 'score'"
    with pytest.raises(UserError, match="attempts to generate a group failed; correct the function or the") as ended:
        stack.play("train_async.py", "--eval-size", "0", "--custom-rm-path", said.split()[1], watch=events.append)
    assert said in str(ended.value)
    assert any(said in event.text for event in events if isinstance(event, WarningRaised))
