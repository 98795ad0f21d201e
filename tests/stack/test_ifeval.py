"""The instructions of IFEval have the verdicts of the benchmark's implementation, which `tests/oracles` recorded."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from miles_async.rewards.functions.ifeval import IfEval
from miles_async.rewards.instructions import follows
from miles_async.types import Sample
from tests.oracles.ifeval import DIFFERENT, VERDICTS, generated_inputs

RECORDED: dict[str, Any] = json.loads(VERDICTS.read_text(encoding="utf-8"))


def test_every_verdict_equals_that_of_the_benchmark() -> None:
    verdicts = [(follows(text, name, given), right) for name, given, text, right in RECORDED["generated"]]
    assert len(verdicts) == 750
    assert [case for case, (ours, right) in zip(RECORDED["generated"], verdicts, strict=True) if ours != right] == []


def test_all_25_instructions_are_compared_with_both_verdicts() -> None:
    verdicts = {(name, right) for name, _, _, right in RECORDED["generated"]}
    assert len(verdicts) == 2 * 25


def test_the_recorded_inputs_are_those_that_would_be_recorded_again() -> None:
    recorded = [tuple(case[:3]) for case in RECORDED["generated"]]
    assert list(generated_inputs(sorted({name for name, _, _ in recorded}))) == recorded
    assert [case[:4] for case in RECORDED["different"]] == [list(case) for case in DIFFERENT]


@pytest.mark.parametrize("reason, name, arguments, text, recorded", RECORDED["different"])
def test_each_listed_difference_still_differs(
    reason: str, name: str, arguments: dict[str, Any], text: str, recorded: bool
) -> None:
    assert follows(text, name, arguments) != recorded, reason


def test_a_response_has_the_full_reward_exactly_if_it_counts_at_the_prompt_level() -> None:
    """The prompt level of the benchmark asks for all instructions of a prompt."""
    for (name, given, text, first), (other, more, _, _) in pairwise(RECORDED["generated"]):
        metadata = {"instruction_id_list": [name, other], "kwargs": [given, more]}
        together = first and follows(text, other, more)
        assert (IfEval().score(None, Sample(response=text, metadata=metadata)) == 1.0) == together
