"""The age of weight versions after the learner was restored from checkpoints."""

from __future__ import annotations

import pytest

from miles_async.scheduling.lineage import Lineage


def test_without_a_rollback_the_age_is_the_difference() -> None:
    assert (Lineage().age(3, 5), Lineage().age(5, 5)) == (2, 0)


def test_versions_between_the_checkpoint_and_the_restored_weights_are_no_ancestors() -> None:
    lineage = Lineage()
    lineage.roll_back(kept=2, restored=6, updates=0)
    assert [version for version in range(9) if lineage.includes(version)] == [0, 1, 2, 6, 7, 8]


def test_the_restored_weights_are_as_old_as_those_of_the_checkpoint() -> None:
    lineage = Lineage([(2, 6, 0)])
    assert [lineage.age(version, 7) for version in (1, 2, 6, 7)] == [2, 1, 1, 0]


def test_updates_after_the_version_of_the_checkpoint_count() -> None:
    assert Lineage([(2, 6, 1)]).age(2, 6) == 1


def test_rolled_back_versions_count_all_versions_since() -> None:
    assert Lineage([(2, 6, 0)]).age(4, 7) == 3


def test_a_second_rollback_keeps_the_first_one_or_undoes_it() -> None:
    kept, undone = Lineage([(2, 6, 0)]), Lineage([(2, 6, 0)])
    kept.roll_back(7, 10, 0)
    undone.roll_back(1, 10, 0)
    assert [version for version in range(12) if kept.includes(version)] == [0, 1, 2, 6, 7, 10, 11]
    assert kept.age(1, 11) == 3, "1, 2 = 6, 7 = 10, 11"
    assert [version for version in range(12) if undone.includes(version)] == [0, 1, 10, 11]
    assert undone.age(0, 11) == 2, "0, 1 = 10, 11"


def test_tokens_from_the_future_are_an_error() -> None:
    with pytest.raises(ValueError, match="version 4 before"):
        Lineage().age(4, 3)
