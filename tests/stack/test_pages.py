"""Every command of the pages with runs works, and prints what the page shows, apart from numbers (`tests/pages.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import WITH_RUNS, execute_page


@pytest.mark.parametrize("page", WITH_RUNS)
def test_the_commands_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    execute_page(page, tmp_path, numbers_vary=True)
