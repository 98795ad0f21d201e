"""Every command of a page that shows its output works, and prints that; see `tests/pages.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import WITHOUT_RUNS, execute_page
from tests.planned_models import checkpoint


@pytest.mark.parametrize("page", WITHOUT_RUNS)
def test_the_commands_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    shared, folder = tmp_path / "shared", tmp_path / "project"
    folder.mkdir()
    checkpoint("Qwen3-32B", shared)
    (shared / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    execute_page(page, folder, shared=shared)
