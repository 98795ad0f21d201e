"""The over-sampling experiment of MiniMax Forge (arXiv 2605.26494, 6.2.4): 128 of 256 prompts are kept."""

from __future__ import annotations

import pytest

from miles_async.scheduling.bounds import window_size
from tests.sim.bias import experiment, kept_batch


def test_greedy_collection_drops_every_hard_prompt_and_the_window_keeps_them() -> None:
    greedy, windowed = kept_batch(1.0, seed=0), kept_batch(0.3, seed=0)
    assert window_size(0.3, 256) == int(0.3 * 256) == 76
    assert greedy.population == windowed.population == pytest.approx(0.44, abs=0.005)
    assert greedy.hard == 0.0
    assert windowed.hard == pytest.approx(0.41, abs=0.005)


def test_the_narrower_the_window_the_nearer_the_population_and_the_longer_the_wait() -> None:
    rows = experiment(seeds=50)
    assert [row.ratio for row in rows] == [1.0, 0.5, 0.3, 0.0]
    assert [row.hard for row in rows] == sorted(row.hard for row in rows)
    assert [row.fill for row in rows] == sorted(row.fill for row in rows)
    assert abs(rows[2].hard - rows[2].population) < 0.02
    assert abs(rows[3].hard - rows[3].population) < 0.02
