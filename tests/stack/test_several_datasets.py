"""A run that trains on several data sets on the real stack, each with its own reward, limits and evaluation."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest

from miles_async.events import Evaluated, GroupGenerated, GroupMoved, StepEnded, WarningRaised
from miles_async.observability.page.status import status
from miles_async.observability.view import RunView
from tests.configuration import KEY_FLAGS
from tests.stack.conftest import Played, Stack

ROLLOUTS, BATCH = 4, 4
SHORT = 1
"""Longest response of the data set `code`, in tokens."""


@pytest.fixture(scope="module")
def played(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """`long` has a reward that grows with the length, `code` one that evaluates each response in a confined process.

    Nothing here depends on the model, which other tests have trained.
    """
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("long", 1000), ("code", 3)):
        lines = (json.dumps({"prompt": f"{row} + 1 =", "label": str(row + 1)}) + "\n" for row in range(rows))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    settings = {
        "long": {
            "prompt_data": str(folder / "long.jsonl"),
            "weight": 3,
            "eval_size": 4,
            "custom_rm_path": "tests.stack.isolated_rewards.length",
        },
        "code": {
            "prompt_data": str(folder / "code.jsonl"),
            "max_response_len": SHORT,
            "rm_type": "tests.stack.isolated_rewards.Runs",
        },
    }
    # Each batch waits for all of its groups, so that none is trained without the slower reward.
    return stack.play(
        "train.py",
        *("--rollout-function-path", "miles_async.rollout.sglang_rollout.generate_rollout"),
        *("--windowed-fifo-ratio", "null"),
        *("--datasets", json.dumps(settings), *KEY_FLAGS, "--reasoning-gym-task", "null", "--eval-size", "0"),
        *("--num-rollout", str(ROLLOUTS), "--rollout-batch-size", str(BATCH)),
    )


def test_every_batch_trains(played: Played) -> None:
    assert [event.finite for event in played.of(StepEnded)] == [True] * ROLLOUTS
    assert played.violations == []


def test_the_data_sets_take_turns_in_proportion_to_their_weights(played: Played) -> None:
    fed = Counter(event.dataset for event in played.of(GroupMoved) if event.before is None and not event.attempt)
    assert fed["long"] == pytest.approx(3 * fed["code"], abs=3)


def test_each_data_set_has_its_own_reward(played: Played) -> None:
    rewards = defaultdict(set)
    for event in played.of(GroupGenerated):
        rewards[event.dataset].add(event.reward)
    # The length is added to the number of samples in a group, and an expression earns 1 if it can be evaluated.
    assert min(rewards["long"]) >= played.config.rollout.n_samples_per_prompt
    assert max(rewards["code"]) <= 1


def test_each_data_set_has_its_own_limit(played: Played) -> None:
    samples = played.config.rollout.n_samples_per_prompt
    tokens = defaultdict(set)
    for event in played.of(GroupGenerated):
        tokens[event.dataset].add(event.response_tokens)
    assert tokens["code"] == {SHORT * samples}
    assert max(tokens["long"]) > SHORT * samples


def test_held_out_problems_are_evaluated_under_the_name_of_their_data_set(played: Played) -> None:
    assert {(event.name, event.problems) for event in played.of(Evaluated)} == {("long", 4)}


def test_an_exhausted_data_set_is_said_once(played: Played) -> None:
    said = [event.text for event in played.of(WarningRaised) if "exhausted" in event.text]
    assert said == ["data set code is exhausted: its 3 rows were used once, and are used again"]


def test_the_page_shows_what_each_data_set_has_contributed(played: Played) -> None:
    view = RunView()
    for event in played.events:
        view.apply(event)
    shown = status(view, view.time)["datasets"]
    assert sum(of["trained"] for of in shown.values()) == ROLLOUTS * BATCH
    assert sum(of["share"] for of in shown.values()) == pytest.approx(1)
    assert shown["code"]["epochs"] >= 1 > shown["long"]["epochs"] > 0
