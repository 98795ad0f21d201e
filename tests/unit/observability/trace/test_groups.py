"""`make groups` shows where the groups of a run are, and the life of one group."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from miles_async.errors import UserError
from miles_async.events import Event, GroupGenerated, GroupMoved, StepStarted, encode
from miles_async.observability.trace.groups import by_state, life, main


def moved(time: float, sequence: int, *states: str, prompt: str = "", reason: str | None = None) -> list[Event]:
    """The transitions of a group through `states`; the first is None for a group that is fed."""
    return [
        GroupMoved(
            time=time,
            sequence=sequence,
            feed_index=prompt or f"sample_0_{sequence}",
            attempt=0,
            before=before or None,
            after=after,
            reason=reason if after == "dropped" else None,
            counts={},
        )
        for before, after in pairwise(states)
    ]


LOG: list[Event] = [
    *moved(10.0, 0, "", "fed", "in_flight", "dropped", prompt="sample_0_7", reason="worker_lost"),
    *moved(11.0, 1, "", "fed", "in_flight", prompt="sample_0_7"),
    GroupGenerated(
        time=12.5,
        sequence=1,
        generation_seconds=1.5,
        reward_seconds=0.0,
        versions=(3, 4),
        response_tokens=20,
        reward=0.5,
        truncated=0,
    ),
    *moved(12.5, 1, "in_flight", "finished", "queued", "leased", "queued", prompt="sample_0_7"),
    StepStarted(time=13.0, rollout=2, version=4, staleness=[1], groups=[1]),
    *moved(12.0, 2, "", "fed", "in_flight"),
]


def test_the_groups_of_each_state_are_counted_and_named() -> None:
    assert list(by_state(LOG)) == [
        "fed              0",
        "in_flight        1  sample_0_2",
        "finished         0",
        "queued           1  sample_0_7",
        "leased           0",
        "trained          0",
        "dropped: worker_lost  1",
    ]


def test_long_lists_of_groups_are_cut() -> None:
    [line] = [line for line in by_state([move for n in range(12) for move in moved(0, n, "", "fed")]) if "fed" in line]
    assert line.endswith("sample_0_6 sample_0_7 and 4 more")


@pytest.mark.parametrize("name", ["sample_0_7", "0", "1"])
def test_the_life_of_a_group_has_all_attempts_at_its_prompt(name: str) -> None:
    assert list(life(lambda: LOG, name)) == [
        "     0.00 s  attempt 0 fed as group 0",
        "     0.00 s  in_flight",
        "     0.00 s  dropped: worker_lost",
        "     1.00 s  attempt 0 fed as group 1",
        "     1.00 s  in_flight",
        "     2.50 s  generated in 1.50 s: 20 response tokens of versions 3 to 4, mean reward 0.50",
        "     2.50 s  finished",
        "     2.50 s  queued",
        "     2.50 s  leased",
        "     2.50 s  queued again, because its batch was not trained",
        "     3.00 s  step of rollout 2 on version 4",
    ]


def test_an_unknown_group_is_refused_with_an_example() -> None:
    with pytest.raises(UserError, match=r"no group sample_1_7: name a feed index \(sample_0_17\)"):
        list(life(lambda: LOG, "sample_1_7"))


def test_the_command_reads_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in LOG))
    assert main([str(tmp_path), "--group", "2"]) == 0
    assert "attempt 0 fed as group 2" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 2
    assert "none/events.jsonl" in capsys.readouterr().err
