from __future__ import annotations

import pytest

from miles_async.errors import LedgerError
from miles_async.scheduling.admission import Admission, Blocked, Candidates
from miles_async.scheduling.bounds import StalenessGate
from miles_async.scheduling.ledger import GroupState, Ledger
from miles_async.scheduling.queue import GroupQueue
from miles_async.types import DropReason

WAY = (
    GroupState.IN_FLIGHT,
    GroupState.FINISHED,
    GroupState.QUEUED,
    GroupState.LEASED,
    GroupState.TRAINED,
    GroupState.PUBLISHED,
)


def walk(ledger: Ledger, until: GroupState) -> int:
    sequence = ledger.feed().sequence
    for state in WAY[: WAY.index(until) + 1]:
        ledger.advance(sequence, state)
    return sequence


def test_a_group_passes_all_states_and_leaves_the_ledger() -> None:
    ledger = Ledger()
    sequence = walk(ledger, GroupState.PUBLISHED)
    assert ledger.state(sequence) is None
    assert ledger.counts[GroupState.PUBLISHED] == 1
    ledger.check_conservation()


def test_sequence_numbers_are_never_reused() -> None:
    ledger = Ledger()
    first = ledger.feed().sequence
    ledger.drop(first, DropReason.FAILED)
    assert ledger.feed().sequence == first + 1


def test_a_group_cannot_skip_a_state() -> None:
    ledger = Ledger()
    sequence = ledger.feed().sequence
    with pytest.raises(LedgerError, match="cannot go from fed to queued"):
        ledger.advance(sequence, GroupState.QUEUED)


def test_a_trained_group_cannot_be_dropped() -> None:
    ledger = Ledger()
    sequence = walk(ledger, GroupState.TRAINED)
    with pytest.raises(LedgerError, match="is trained"):
        ledger.drop(sequence, DropReason.STALE)


def test_a_group_ends_once() -> None:
    ledger = Ledger()
    sequence = ledger.feed().sequence
    ledger.drop(sequence, DropReason.FILTERED)
    with pytest.raises(LedgerError, match="not live"):
        ledger.drop(sequence, DropReason.FILTERED)
    assert ledger.dropped[DropReason.FILTERED] == 1
    ledger.check_conservation()


def test_admission_names_the_limit_that_blocks_it() -> None:
    ledger = Ledger()
    assert Admission(max_in_flight=1, room=10, slots=10).blocked_by(ledger) is None
    walk(ledger, GroupState.IN_FLIGHT)
    assert Admission(max_in_flight=1, room=10, slots=10).blocked_by(ledger) is Blocked.IN_FLIGHT
    assert Admission(max_in_flight=2, room=10, slots=1).blocked_by(ledger) is Blocked.SLOTS
    assert Admission(max_in_flight=2, room=1, slots=None).blocked_by(ledger) is Blocked.ROOM


def test_a_group_counts_against_the_limits_from_the_moment_it_is_fed() -> None:
    ledger = Ledger()
    ledger.feed()
    assert Admission(max_in_flight=1, room=10, slots=10).blocked_by(ledger) is Blocked.IN_FLIGHT


def test_a_slot_is_held_until_the_weights_are_live() -> None:
    ledger = Ledger()
    admission = Admission(max_in_flight=5, room=5, slots=1)
    sequence = walk(ledger, GroupState.TRAINED)
    assert admission.blocked_by(ledger) is Blocked.SLOTS
    ledger.advance(sequence, GroupState.PUBLISHED)
    assert admission.blocked_by(ledger) is None


def test_groups_in_flight_count_against_the_queue_so_that_it_is_never_full() -> None:
    ledger = Ledger()
    for state in (GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED):
        walk(ledger, state)
    walk(ledger, GroupState.LEASED)
    assert Admission(max_in_flight=9, room=3, slots=None).blocked_by(ledger) is Blocked.ROOM
    assert Admission(max_in_flight=9, room=4, slots=None).blocked_by(ledger) is None


def test_the_queue_is_first_in_first_out_and_refuses_a_put_when_full() -> None:
    queue = GroupQueue[int](2)
    queue.put(1)
    queue.put(2)
    with pytest.raises(LedgerError, match="holds 2 groups"):
        queue.put(3)
    assert [queue.get(), queue.get()] == [1, 2]


def test_a_sweep_removes_groups_that_will_be_too_old_and_keeps_the_order() -> None:
    queue = GroupQueue[int](5)
    for group in range(5):
        queue.put(group)
    assert queue.sweep(lambda group: group % 2 == 0) == [0, 2, 4]
    assert [queue.get(), queue.get()] == [1, 3]


def test_the_staleness_gate_accepts_groups_up_to_the_limit() -> None:
    gate = StalenessGate(limit=2)
    assert not gate.too_old(2)
    assert gate.too_old(3)
    assert not StalenessGate(limit=None).too_old(99)


def test_a_new_round_begins_when_too_few_candidates_are_left() -> None:
    candidates = Candidates(wanted=2, per_round=3)
    insufficient = []
    for _ in range(5):
        insufficient.append(candidates.insufficient)
        candidates.drop()
    assert insufficient == [False, True, False, False, True]
