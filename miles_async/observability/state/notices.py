"""The newest problems of a run, as sentences for the page."""

from __future__ import annotations

from collections import deque

from miles_async.events import CollapseRiskChanged, Event, EventsMissing, Stalled, WarningRaised, WriteFailed

MAX_NOTICES = 8


class Notices:
    """Pass every event to `observe`; `newest` holds time and text of the last problems, oldest first."""

    def __init__(self) -> None:
        self.newest: deque[tuple[float, str]] = deque(maxlen=MAX_NOTICES)

    def observe(self, event: Event) -> None:
        match event:
            case WarningRaised():
                text = event.text
            case CollapseRiskChanged():
                sign = "the policy may collapse soon" if event.high else "the signs of a collapse are gone"
                text = f"after rollout {event.rollout}, {sign}: {event.why}"
            case WriteFailed():
                text = f"writing version {event.version} to {event.engine} failed ({event.error}): {event.then}"
            case Stalled():
                text = f"no progress for {event.seconds:.0f} s"
            case EventsMissing():
                text = "events are missing from here on: parts of the event log were deleted (--event-log-max-bytes)"
            case _:
                return
        self.newest.append((event.time, text))
