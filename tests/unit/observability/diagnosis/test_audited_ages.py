"""The audit's ages: of keys and values, and of versions that no publish reached."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from miles_async.events import Event, GroupGenerated, LearnerRestored, PublishStarted, StepStarted
from tests.audit import Audit
from tests.unit.example_events import PUBLISHED, RUN, moved

GENERATED = GroupGenerated(
    time=110.0,
    sequence=0,
    generation_seconds=2.0,
    reward_seconds=0.0,
    versions=(3, 5),
    response_tokens=10,
    reward=1.0,
    truncated=0,
)


@pytest.mark.parametrize("limit, violations", [(0, 1), (1, 1), (2, 0), (-1, 0)])
def test_keys_may_be_older_than_the_admission_of_their_group_up_to_the_limit(limit: int, violations: int) -> None:
    audit = Audit(None)
    events: list[Event] = [replace(RUN, max_kv_staleness=limit), PUBLISHED, moved(0, None, "fed"), GENERATED]
    for event in events:
        audit.observe(event)
    said = [sentence for sentence in audit.violations if "tokens of version 3, but was admitted at 5" in sentence]
    assert len(said) == violations


def test_a_version_counts_although_the_learner_was_lost_before_its_publish() -> None:
    """The checkpoint has version 4 of the adapter, which no event of a publish names."""
    restored = LearnerRestored(time=120.0, rollout=1, kept_version=4, version=7, updates=0, groups=0, adapter="chat")
    events: list[Event] = [
        RUN,
        PublishStarted(time=100.0, version=2, queue=0, adapter="chat"),
        replace(PUBLISHED, version=2, adapter="chat"),
        replace(moved(0, None, "fed"), adapter="chat"),
        replace(GENERATED, versions=(2, 2)),
        restored,
        StepStarted(time=121.0, rollout=2, version=7, staleness=[1], groups=[0], adapter="chat"),
    ]
    audit = Audit(1)
    for event in events:
        audit.observe(event)
    assert [sentence for sentence in audit.violations if "versions old" in sentence] == []
    assert audit.greatest_age == 1
