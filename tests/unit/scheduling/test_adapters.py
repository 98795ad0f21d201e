"""Versions of an adapter: which one a request names, and which ones engines may drop."""

from __future__ import annotations

import pytest

from miles_async.scheduling.adapters import AdapterVersions, PinnedVersion


def versions(live: int, *, staleness: int = 2, moves_between_turns: bool = False) -> AdapterVersions:
    adapters = AdapterVersions(staleness, moves_between_turns=moves_between_turns)
    for version in range(live + 1):
        adapters.publish(version)
    return adapters


def test_the_first_request_of_a_group_names_the_newest_version_and_the_others_name_the_same() -> None:
    adapters, pin = versions(live=5), PinnedVersion()
    assert adapters.begin(pin) == 5
    adapters.publish(7)
    assert adapters.begin(pin) == 5
    assert adapters.begin(PinnedVersion()) == 7


def test_each_adapter_has_versions_of_its_own() -> None:
    adapters = AdapterVersions(0, ("math", "code"))
    adapters.publish(0, "math")
    adapters.publish(1, "code")
    assert adapters.begin(PinnedVersion(), "math") == 0
    adapters.publish(2, "code")
    assert adapters.idle("math"), "the versions of another adapter do not make one old"
    adapters.publish(3, "math")
    assert not adapters.idle("math")
    assert adapters.idle("code")
    assert not adapters.idle()
    assert adapters.begin(PinnedVersion(2), "math") == 3, "a version of another adapter is replaced"
    assert adapters.capacity == 2 * adapters.resident


def test_a_version_that_engines_do_not_keep_is_replaced_by_the_newest_one() -> None:
    adapters, pin = versions(live=8), PinnedVersion(5)
    assert adapters.begin(pin) == 8
    assert pin.version == 8


def test_a_version_of_another_run_is_replaced_by_the_newest_one() -> None:
    assert versions(live=3).begin(PinnedVersion(40)) == 3


def test_turns_may_move_to_the_newest_version() -> None:
    adapters, pin = versions(live=5, moves_between_turns=True), PinnedVersion()
    adapters.begin(pin)
    adapters.publish(6)
    assert adapters.begin(pin) == 6


def test_a_version_is_idle_when_its_last_request_has_ended() -> None:
    adapters = versions(live=5, staleness=0)
    first, second = adapters.begin(PinnedVersion()), adapters.begin(PinnedVersion())
    assert adapters.idle(), "requests may name the version"
    adapters.publish(6)
    adapters.end(first)
    assert not adapters.idle()
    adapters.end(second)
    assert adapters.idle()


def test_requests_are_counted_for_all_versions_that_requests_may_name() -> None:
    adapters = versions(live=4, staleness=1)
    adapters.begin(PinnedVersion(3))
    assert adapters.requests() == {3: 1, 4: 0}
    adapters.publish(5)
    adapters.publish(6)
    assert adapters.requests() == {3: 1, 5: 0, 6: 0}


@pytest.mark.parametrize("limit", range(6))
def test_an_engine_holds_two_versions_more_than_the_staleness_limit(limit: int) -> None:
    assert AdapterVersions(limit).resident == limit + 2
