"""Turns by weight: nobody starves, shares converge, and an adapter without work holds up nobody."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.scheduling.shares import Shares

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10.0), min_size=1)


@given(WEIGHTS)
def test_shares_converge_to_the_weights_if_all_have_work(weights: dict[str, float]) -> None:
    shares, turns = Shares(weights), Counter[str]()
    for _ in range(200):
        turns[shares.take(weights)] += 1
        for one in weights:
            for other in weights:
                ahead = turns[one] / weights[one] - turns[other] / weights[other]
                assert ahead <= 1 / weights[one] + 1 / weights[other] + 1e-6


@given(WEIGHTS, st.lists(st.sets(st.sampled_from("abcd"), min_size=1), max_size=100))
def test_turns_go_to_adapters_with_work_only(weights: dict[str, float], work: list[set[str]]) -> None:
    shares = Shares(weights)
    for candidates in work:
        if candidates & weights.keys():
            assert shares.take(candidates) in candidates


@given(WEIGHTS, st.lists(st.sets(st.sampled_from("abcd"), min_size=1), max_size=100))
def test_an_adapter_with_work_is_not_passed_over_more_often_than_its_weight_says(
    weights: dict[str, float], work: list[set[str]]
) -> None:
    for waiting in weights:
        shares, passed = Shares(weights), Counter[str]()
        for candidates in work:
            taken = shares.take({*candidates, waiting})
            passed = Counter() if taken == waiting else passed + Counter([taken])
            for other, turns in passed.items():
                assert turns <= 2 + weights[other] / weights[waiting] + 1e-6


def test_an_adapter_that_had_no_work_does_not_make_up_for_it() -> None:
    shares = Shares({"a": 1.0, "b": 1.0})
    for _ in range(100):
        shares.take(("a",))
    assert Counter(shares.take(("a", "b")) for _ in range(10)) == {"a": 5, "b": 5}


def test_turns_alternate_as_finely_as_the_weights_allow() -> None:
    shares = Shares({"a": 2.0, "b": 1.0})
    assert [shares.take(("a", "b")) for _ in range(6)] == ["a", "b", "a", "a", "b", "a"]


def test_somebody_must_have_work() -> None:
    with pytest.raises(ValueError, match="empty"):
        Shares({"a": 1.0}).take(())
