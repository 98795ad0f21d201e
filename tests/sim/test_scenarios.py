"""Every scenario of `make sim` at a size that takes seconds; its claims must hold at this size too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.scenario import SCENARIOS, Scenario, broken, play


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_claims_of_a_scenario_hold(path: Path) -> None:
    scenario = Scenario.load(path, quick=True)
    rows = {name: play(settings, seed=0) for name, settings in scenario.variants.items()}
    assert scenario.claims
    assert broken(scenario.claims, rows) == []
    assert {name: row.violations for name, row in rows.items() if row.violations} == {}
    assert {name: row.lost for name, row in rows.items() if row.lost} == {}


def test_a_claim_that_does_not_hold_is_reported_in_a_sentence() -> None:
    scenario = Scenario.load(SCENARIOS / "ladder.yaml", quick=True)
    row = play(scenario.variants["synchronous"], seed=0)
    claims = [{"row": "synchronous", "column": "age", "at_least": 1}]
    (sentence,) = broken(claims, {"synchronous": row})
    assert sentence.startswith("synchronous: age is 0")
