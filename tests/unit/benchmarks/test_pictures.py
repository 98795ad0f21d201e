"""The picture of a terminal shows what stays on its screen."""

from __future__ import annotations

from benchmarks.pictures import shown


def test_a_line_that_is_written_again_shows_its_last_text() -> None:
    assert shown("10% |#   |\r20% |##  |\r\ndone\r\n") == "20% |##  |\ndone\n"


def test_a_line_that_was_cleared_leaves_the_text_that_replaced_it() -> None:
    assert shown("waiting for Ray\r               \rRay   ready\n") == "Ray   ready\n"
    assert shown("50% |##  |\r          \r\nbatch\n") == "\nbatch\n"


def test_movements_of_the_cursor_are_left_out_and_colors_stay() -> None:
    assert shown("\x1b[A\x1b[31mred\x1b[0m\x1b[K") == "\x1b[31mred\x1b[0m"
