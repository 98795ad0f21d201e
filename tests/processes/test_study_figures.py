"""The plots of the study of staleness are drawn from stored runs."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.study.figures import draw
from benchmarks.study.page import by_name
from benchmarks.study.runs import Cell
from tests.unit.benchmarks.test_study import outcome


def test_the_study_draws_curves_limits_and_signals(tmp_path: Path) -> None:
    cells = [Cell(schedule, "default", seed) for schedule in ("in turns", "limit 2", "limit 8") for seed in (1, 2)]
    draw(by_name((cell, outcome(cell, 0.8 + cell.seed / 100)) for cell in cells), tmp_path)
    drawn = {path.stem: ElementTree.parse(path).getroot().tag for path in tmp_path.iterdir()}
    assert drawn.keys() == {"staleness-curves", "staleness-limits", "staleness-signals"}
    assert set(drawn.values()) == {"{http://www.w3.org/2000/svg}svg"}
