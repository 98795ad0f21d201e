"""Every wrong input of the table ends with exit code 2 and one sentence per problem, which says what to do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.compat.slime_names import forget
from tests.wrong_inputs.table import Ended, Row, check, complaints, rows, run

FOUND_AT_THE_START = (
    "a template for texts in the warm start of messages",
    "an answer for the warm start without its key",
    "an unknown task",
    "saved batches that are text",
    "saved batches that do not exist",
    "unknown settings of a task",
)
"""Names of rows that need more than the first rows of a file, or a library that takes seconds to import."""


@pytest.fixture(scope="module", autouse=True)
def _no_names_of_slime_are_left() -> Iterator[None]:
    before = set(sys.modules)
    yield
    forget(before)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_a_wrong_input_is_refused_with_a_sentence_per_problem(tmp_path: Path, row: Row) -> None:
    assert complaints(row, run(row, tmp_path)) == []


@pytest.mark.parametrize("row", [*rows("data"), *rows("templates")], ids=lambda row: row.id)
def test_check_config_finds_what_is_wrong_with_data_and_templates(tmp_path: Path, row: Row) -> None:
    found = complaints(row, check(row, tmp_path))
    if row.name in FOUND_AT_THE_START:
        assert "the exit code is 0" in found
    else:
        assert found == []


def test_the_base_settings_of_the_table_are_accepted(tmp_path: Path) -> None:
    accepted = run(Row(kind="", name="", says=[]), tmp_path)
    assert accepted.code == 0
    assert [line for line in accepted.lines if "note: " not in line] == []


def test_rows_have_different_names() -> None:
    assert [name for name, count in Counter(row.id for row in rows()).items() if count > 1] == []


@pytest.mark.parametrize(
    "ended, complaint",
    [
        (Ended(0, ["train_async.py: set lr"]), "the exit code is 0"),
        (Ended(2, ["Traceback (most recent call last): set lr"]), "not a sentence of the program"),
        (Ended(2, ["train_async.py: lr is wrong"]), "no advice"),
        (Ended(2, ["train_async.py: set it to 1"]), "names neither a setting nor a file"),
        (Ended(2, ["train_async.py: set lr", "train_async.py: set seed"]), "2 sentences instead of 1"),
        (Ended(2, ["train_async.py: set seed"]), "'set lr' is not in 'train_async.py: set seed'"),
    ],
)
def test_a_bad_refusal_is_noticed(ended: Ended, complaint: str) -> None:
    (found,) = complaints(Row(kind="", name="", says=[["set lr"]]), ended)[:1]
    assert found.startswith(complaint)
