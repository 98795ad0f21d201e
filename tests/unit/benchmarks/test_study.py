"""The study of staleness: its statistics, its page, and that an interrupted study continues."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study import page, runs
from benchmarks.study.runs import Cell, Outcome
from miles_async.config.cli import parse_or_exit


def outcome(cell: Cell, after: float, seconds: float = 100.0, commit: str = "abc") -> Outcome:
    return Outcome(
        key=cell.key(),
        before=0.5,
        after=after,
        curve=[(0, 0.0, 0.5), (64, seconds / 2, 0.6), (128, seconds, after)],
        seconds=seconds,
        load=1.0,
        staleness=0.0 if cell.schedule == "in turns" else 1.5,
        points=[{"reward": 0.4, "staleness": 1.5, "ess": 0.9, "grad_norm": 0.5}],
        by_age={1: {"ess": 0.99, "logprob_gap_mean": 0.02, "token_share": 1.0}},
        stamp={"commit": commit},
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "STORE", tmp_path / "study")
    return tmp_path


def test_the_interval_is_that_of_students_t() -> None:
    # Mean 0.02, standard deviation 0.02, t(0.975, 3 degrees of freedom) = 3.182: 3.182 · 0.02 / 2.
    interval = page.Interval.of([0.0, 0.02, 0.02, 0.04 + 0.0])
    assert interval.mean == pytest.approx(0.02)
    assert interval.half == pytest.approx(3.1824 * 0.016330 / 2, rel=1e-3)
    assert interval.holds_zero


def test_fewer_than_three_seeds_have_no_interval() -> None:
    assert str(page.Interval.of([0.01])) == "+0.010 (one seed)"
    assert str(page.Interval.of([0.01, 0.01])) == "+0.010 (two seeds)"
    assert page.Interval.of([0.5]).holds_zero


def test_differences_pair_runs_of_the_same_seed(store: Path) -> None:
    turns = {seed: outcome(Cell("in turns", "default", seed), 0.8 + seed / 100) for seed in (1, 2, 3)}
    limit = {seed: outcome(Cell("limit 2", "default", seed), 0.79 + seed / 100) for seed in (2, 3, 1)}
    found = page.difference({page.IN_TURNS: turns, page.SHIPPED: limit}, page.SHIPPED)
    assert found.mean == pytest.approx(-0.01)
    assert found.half == pytest.approx(0.0, abs=1e-9)


def test_the_time_to_an_accuracy_is_interpolated_on_the_mean_curve(store: Path) -> None:
    found = [outcome(Cell("limit 2", "default", seed), 0.8) for seed in (1, 2)]
    assert page.seconds_to(0.7, found) == pytest.approx(75.0)
    assert page.seconds_to(0.9, found) is None


def test_a_stored_run_is_not_repeated_unless_its_settings_changed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("limit 2", "default", 1)
    assert runs.stored(cell) is None
    monkeypatch.setattr(runs, "run", lambda cell: outcome(cell, 0.8))
    assert runs.stored_or_run(cell) == runs.stored(cell) == outcome(cell, 0.8)
    monkeypatch.setitem(runs.EVAL_INTERVALS, runs.MAIN, 7)
    assert runs.stored(cell) is None


def test_an_interrupted_study_has_all_schedules_of_the_first_seeds() -> None:
    first = list(runs.cells(["seeds"], 3))[:4]
    assert [(cell.schedule, cell.seed) for cell in first] == [
        ("in turns", 42),
        ("limit 2", 42),
        ("in turns", 1),
        ("limit 2", 1),
    ]


def test_every_run_of_the_study_is_started_by_a_valid_command(store: Path) -> None:
    for cell in runs.cells(["seeds", "control", "limits", "losses", "stale", "waits", "keys"], 1):
        _, entry, *flags = cell.command(store)
        config = parse_or_exit(flags, entry=entry)
        assert config.data.rollout_seed == config.learner.seed == cell.seed


def test_the_page_compares_runs_with_older_keys_with_runs_without(store: Path) -> None:
    stored = []
    for seed in (1, 2):
        base = Cell("limit 8", "K = 0", seed, (), runs.SLOW_TOOLS)
        stored.append((base, outcome(base, 0.8)))
        stored.append((older := Cell("limit 8", "K = 2", seed, (), runs.SLOW_TOOLS), outcome(older, 0.7, seconds=50)))
    turns = Cell("in turns", "default", runs.SEEDS[0])
    text = page.page(page.by_name([(turns, outcome(turns, 0.8))]), page.by_name(stored), {})
    assert "| 2 | 2 | 0.700 (SD 0.000) | -0.100 (two seeds) | 2.00 (two seeds) | 1.50 |" in text


def test_the_page_states_spread_difference_and_time(store: Path) -> None:
    stored = []
    for seed, accuracy in ((1, 0.80), (2, 0.84)):
        stored.append((cell := Cell("in turns", "default", seed), outcome(cell, accuracy, seconds=150)))
        stored.append((cell := Cell("limit 2", "default", seed), outcome(cell, accuracy + 0.01)))
        stored.append((cell := Cell("limit 8", "none", seed), outcome(cell, accuracy - 0.2)))
    text = page.page(page.by_name(stored), {}, {})
    assert "| in turns, default | 2 | 0.820 (SD 0.028) | 0.300 to 0.340 |" in text
    assert "| limit 8, none | 2 | 0.620 (SD 0.028) | 0.100 to 0.140 | -0.200 (two seeds) |" in text
    assert "(0.820) after" in text


def test_times_are_compared_only_within_one_commit(store: Path) -> None:
    stored = []
    for seed, commit, seconds in ((1, "older", 400), (2, "newer", 150), (3, "newer", 150)):
        stored.append((cell := Cell("in turns", "default", seed), outcome(cell, 0.8, seconds=seconds, commit=commit)))
        stored.append((cell := Cell("limit 2", "default", seed), outcome(cell, 0.82, commit=commit)))
    text = page.page(page.by_name(stored), {}, {})
    assert "Times are of the 2 pairs at commit newer, which started at a mean load of 1.0" in text
    assert "`train.py` needs 150 s" in text


def test_the_advice_separates_limits_that_cost_accuracy_from_those_that_do_not(store: Path) -> None:
    stored = []
    for seed, accuracy in ((1, 0.80), (2, 0.84), (3, 0.82)):
        stored.append((cell := Cell("in turns", "default", seed), outcome(cell, accuracy)))
        stored.append(
            (cell := Cell("limit 2", "default", seed), outcome(cell, accuracy + (0.01 if seed == 1 else -0.01)))
        )
        stored.append((cell := Cell("limit 8", "default", seed), outcome(cell, accuracy - 0.2)))
    # A single seed has no interval.
    stored.append((cell := Cell("limit 4", "default", 1), outcome(cell, 0.7)))
    text = page.page(page.by_name(stored), {}, {})
    assert "With the default correction, no difference to training in turns was found at limit 2." in text
    assert "With the default correction, accuracy differs from training in turns by -0.200 ± 0.000 at limit 8." in text


def test_runs_that_are_too_fresh_are_told_from_those_that_are_really_stale() -> None:
    in_turns, cell, *_ = runs.cells(["stale"], 1)
    assert not in_turns.is_too_fresh(outcome(in_turns, 0.8))
    assert cell.schedule == "limit 4"
    assert cell.is_too_fresh(replace(outcome(cell, 0.8), staleness=2.39))
    assert not cell.is_too_fresh(replace(outcome(cell, 0.8), staleness=2.41))


def test_the_page_counts_the_cells_that_were_not_run(store: Path) -> None:
    cells = [Cell("in turns", "default", runs.SEEDS[0]), *itertools.islice(runs.cells(["stale"], 1), 2)]
    text = page.page(page.by_name((cell, outcome(cell, 0.8)) for cell in cells), {}, {})
    assert "| limit 4, default | 1 | 0.800 | +0.000 (one seed) | 1.50 | 0 | 100 |" in text
    planned = len({(cell.schedule, cell.variant) for cell in runs.cells(["stale"], 1)})
    assert f"runs {planned} such cells. Cells that have not been run yet: {planned - 2}." in text


def test_a_run_is_compared_with_the_run_in_turns_that_has_the_same_warm_start(store: Path) -> None:
    cells = {(cell.schedule, cell.variant): cell for cell in runs.cells(["stale"], 1)}
    fresh, again = (cells["in turns", variant] for variant in runs.FRESH)
    old, new, other = (cells[f"limit {limit}", runs.STALE + "default"] for limit in (4, 2, 1))
    stored = page.by_name(
        (cell, replace(outcome(cell, after), before=before))
        for cell, before, after in (
            (fresh, 0.4, 0.8),
            (again, 0.5, 0.9),
            (old, 0.4, 0.7),
            (new, 0.5, 0.7),
            (other, 0.3, 0.7),
        )
    )
    found = [str(page.difference(stored, (cell.schedule, cell.variant))) for cell in (old, new, other)]
    assert found == ["-0.100 (one seed)", "-0.200 (one seed)", "no pair"]


def test_a_run_with_another_learning_rate_is_compared_with_the_run_in_turns_at_that_rate(store: Path) -> None:
    cells = [cell for cell in runs.cells(["stale"], 1) if cell.variant.endswith("three times the rate")]
    stored = page.by_name((cell, outcome(cell, 0.9 if cell.schedule == "in turns" else 0.4)) for cell in cells)
    assert [cell.schedule for cell in cells] == ["limit 4", "in turns"]
    assert str(page.difference(stored, ("limit 4", cells[0].variant))) == "-0.500 (one seed)"


def test_runs_whose_tools_wait_are_compared_with_the_run_in_turns_on_the_same_machine(store: Path) -> None:
    first, again = (Cell("in turns", variant, 1, (), runs.SLOW_TOOLS) for variant in runs.AGAIN)
    limits = [Cell(f"limit {limit}", "default", 1, (), runs.SLOW_TOOLS) for limit in (2, 4)]
    stored = [
        (cell, replace(outcome(cell, 0.9, seconds), evaluation_seconds=[0.0] * 3, stamp={"machine": machine}))
        for cell, seconds, machine in (
            (first, 200, "slow"),
            (again, 100, "fast"),
            (limits[0], 50, "slow"),
            (limits[1], 50, "fast"),
        )
    ]
    turns = Cell("in turns", "default", 1)
    text = page.page(page.by_name([(turns, outcome(turns, 0.8))]), page.by_name(stored), {})
    assert "with a limit of 2 (4.00 (one seed) times as fast)" in text
    assert "with a limit of 4 (2.00 (one seed) times as fast)" in text


def test_the_page_compares_the_decoupled_objective_with_the_naive_one(store: Path) -> None:
    turns = Cell("in turns", runs.FRESH[0], 1)
    stored = [(turns, outcome(turns, 0.9))]
    for limit, gains in ((16, (0.1, 0.11, 0.12)), (4, (-0.1, 0.0, 0.1))):
        for seed, gain in enumerate(gains):
            for name, after in (("naive", 0.7), ("decoupled", 0.7 + gain)):
                cell = Cell(f"limit {limit}", runs.STALE + name, seed)
                stored.append((cell, outcome(cell, after)))
    text = page.page(page.by_name([(Cell("in turns", "default", 1), outcome(turns, 0.9)), *stored]), {}, {})
    assert "was +0.110 ± 0.025 with samples that were 1.5 versions old on average, and +0.000 ± 0.248 with" in text


def test_the_page_counts_collapses_and_the_warnings_that_foresaw_them(store: Path) -> None:
    stale = list(itertools.islice(runs.cells(["stale"], 1), 4))
    learns, falls = ([{"reward": reward} for reward in rewards] for rewards in ((0.3, 0.6, 0.7), (0.3, 0.6, 0.2)))
    outcomes = [(learns, []), (falls, [12]), (falls, [31]), (learns, [8])]
    stored = [
        (cell, replace(outcome(cell, 0.8), points=points, announced=announced))
        for cell, (points, announced) in zip(stale, outcomes, strict=True)
    ]
    turns = Cell("in turns", "default", runs.SEEDS[0])
    text = " ".join(page.page(page.by_name([(turns, outcome(turns, 0.8)), *stored]), {}, {}).split())
    assert "The reward collapsed in 2 of these 4 runs:" in text
    assert "announced 1 of these collapses before they had happened, and it appeared in 1 of the other 2 runs." in text


def test_a_run_in_turns_is_compared_without_the_time_of_its_evaluations(store: Path) -> None:
    turns, limit = (Cell(schedule, "default", 1, (), runs.SLOW_TOOLS) for schedule in ("in turns", "limit 2"))
    stored = [
        (turns, replace(outcome(turns, 0.9, seconds=110), evaluation_seconds=[7.0, 10.0, 20.0])),
        (limit, replace(outcome(limit, 0.9, seconds=50), evaluation_seconds=[7.0, 10.0, 20.0])),
    ]
    runs_in_turns = page.by_name([(cell := Cell("in turns", "default", 1), outcome(cell, 0.8))])
    text = page.page(runs_in_turns, page.by_name(stored), {"limit 2": 2.5})
    # 100 s of training in turns. The target of 0.88 lies 14/15 of the way between the evaluations that ended after 45
    # and 80 s of training, and after 25 and 50 s.
    assert f"| 2.00 (one seed) | 2.50 | {(45 + 35 * 14 / 15) / (25 + 25 * 14 / 15):.2f} (one seed) |" in text
