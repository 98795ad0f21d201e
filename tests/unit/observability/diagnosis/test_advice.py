"""The order of what a verdict advises."""

from __future__ import annotations

import random

from miles_async.observability.diagnosis.throughput import Model
from miles_async.observability.diagnosis.verdict import KNOBS, Bottleneck, advice
from miles_async.observability.state.groups import Seconds

DRAW = random.Random(6)
MODEL = Model(
    in_flight=10,
    window=1,
    slots=16,
    room=16,
    batch=8,
    groups=[Seconds(DRAW.uniform(2.0, 20.0), 0.0) for _ in range(16)],
    kept=1.0,
    step=6.0,
    stage=0.2,
    write=0.7,
    save=0.0,
    evaluate=0.0,
    batch_seconds=10.0,
)


def test_the_change_that_would_bring_most_comes_first() -> None:
    listed = advice(Bottleneck.IN_FLIGHT, KNOBS[Bottleneck.IN_FLIGHT], MODEL)
    rates = [each.estimate.groups_per_second for each in listed if each.estimate is not None]
    assert len(rates) == 2
    assert [each.knob for each in listed] == [KNOBS[Bottleneck.STALENESS], KNOBS[Bottleneck.IN_FLIGHT]]
    assert rates == sorted(rates, reverse=True)
