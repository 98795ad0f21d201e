"""The audit of a run whose engines go on with keys and values of older versions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from miles_async.events import Event, GroupGenerated
from miles_async.observability.diagnosis.audit import Audit
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
