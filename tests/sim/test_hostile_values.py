"""Whatever users, clients and data hand in, a run reaches its end, loses nothing and can be read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from miles_async.scheduling.bounds import Schedule
from miles_async.types import Sample, SampleStatus, Verdict
from tests.sim.hostile import ENTRANCES, FIELDS, Attack, Made, play


class Awkward:
    """Every method that a check could call raises."""

    def _raise(self, *arguments: Any) -> Any:
        raise RuntimeError("no")

    __str__ = __repr__ = __bool__ = __len__ = __iter__ = __float__ = __index__ = __eq__ = __hash__ = tolist = _raise


class AwkwardText(str):
    """A text that pretends to be another value."""

    def __str__(self) -> Any:
        return 3


class AwkwardDictionary(dict[Any, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def own_member() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["itself"] = value
    return value


MADE: list[Callable[[], Any]] = [
    Awkward,
    own_member,
    lambda: 10**5000,
    lambda: nested(70),
    lambda: nested(300),
    lambda: nested(900),
    lambda: AwkwardText("text"),
    lambda: AwkwardDictionary(a=1),
    lambda: np.float32(0.5),
    lambda: np.float64(np.nan),
    lambda: np.int64(3),
    lambda: np.bool_(True),
    lambda: np.array([1.5, 2.5]),
    lambda: np.array(1.0),
    lambda: np.array([object(), None], dtype=object),
    lambda: Verdict(False, 0.25),  # type: ignore[arg-type]
    lambda: Sample(index=1),
    lambda: [Sample(index=1)],
    lambda: SampleStatus.FAILED,
    lambda: SampleStatus.ABORTED,
    lambda: {1, 2},
    lambda: {(1, 2): 3, None: 4},
    lambda: datetime(2026, 1, 2, tzinfo=UTC),
    lambda: date(2026, 1, 2),
    lambda: KeyError("\ud83d"),
    object,
]
SINGLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**63, 2**64, -(2**63) - 1, 2**31, -1]),
    st.floats(),
    st.sampled_from([1e308, -1e308, 1e16]),
    st.text(st.characters(), max_size=20),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3),
    st.sampled_from(["1/2", "completed", "sample_0_1", "\0", "[" * 100_000, '{"a":' * 5_000, "\ud83d", "caf\udce9"]),
    st.binary(max_size=20),
    st.sampled_from([Decimal("1.5"), Fraction(1, 2), complex(1)]),
    st.sampled_from([Made(f"MADE[{number}]", make) for number, make in enumerate(MADE)]),
)
VALUES = st.recursive(
    SINGLE,
    lambda entries: st.one_of(
        st.lists(entries, max_size=4),
        st.dictionaries(st.one_of(st.text(st.characters(), max_size=5), st.integers()), entries, max_size=4),
    ),
    max_leaves=6,
)
ATTACKS = st.builds(
    Attack,
    entrance=st.sampled_from(ENTRANCES),
    action=st.sampled_from(["return", "set", "set", "set", "raise", "cancel"]),
    value=VALUES,
    field=st.sampled_from(FIELDS),
    period=st.integers(2, 5),
)
RUNS: dict[str, Any] = {
    "attacks": st.lists(ATTACKS, min_size=1, max_size=4),
    "seed": st.integers(0, 99),
    "schedule": st.sampled_from(Schedule),
}
"""The arguments of `check_run`."""


def check_run(attacks: list[Attack], seed: int, schedule: Schedule) -> int:
    """Play a run and judge it. Returns the number of values that were handed in."""
    # Checkpoints are flushed, which takes no time in memory.
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.exists() else None) as folder:
        return play(attacks, Path(folder), seed, schedule).struck


@pytest.mark.parametrize("entrance", ["generate", "reward", "filter"])
def test_a_function_that_raises_cancelled_error_fails_only_its_groups(entrance: str, tmp_path: Path) -> None:
    assert play([Attack(entrance, "cancel", None)], tmp_path, 1, Schedule.FULLY_ASYNC).struck


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(**RUNS)
def test_no_value_of_users_clients_or_data_ends_a_run(attacks: list[Attack], seed: int, schedule: Schedule) -> None:
    check_run(attacks, seed, schedule)
