"""`make groups`: where the groups of a run are, or the life of one group, from the event log.

    python -m miles_async.observability.trace.groups runs/latest                        the groups in each state
    python -m miles_async.observability.trace.groups runs/latest --group sample_0_17    all attempts at one prompt

The run may be live, ended or killed.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from miles_async.errors import UserError
from miles_async.events import Event, EventsMissing, GroupGenerated, GroupMoved, StepStarted
from miles_async.observability.output import protect_output
from miles_async.observability.trace.event_log import read_events
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import LIVE, GroupState

SHOWN = 8
"""Groups that are named per state, oldest first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="make groups RUN=", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--group", help="feed index (sample_0_17) or sequence number (42) of a group")
    protect_output()
    options = parser.parse_args(argv)
    try:
        log = partial(read_events, options.run / "events.jsonl")
        lines = by_state(log()) if options.group is None else life(log, options.group)
        # A reader such as `head` closes the pipe early.
        print("\n".join(lines), flush=True)
    except (UserError, OSError) as error:
        print(f"groups: {error}", file=sys.stderr)
        return 2
    return 0


def by_state(events: Iterable[Event]) -> Iterator[str]:
    """One line per state with the number of groups in it, the first of them, and how the other groups ended."""
    view = RunView(recent=False)
    for event in events:
        view.apply(event)
    if view.last(EventsMissing) is not None:
        yield "Parts of the event log were deleted, so ended groups are not all counted."
    prompts: defaultdict[str, list[str]] = defaultdict(list)
    for group in view.groups.live.values():
        prompts[group.state].append(group.feed_index)
    for state in LIVE:
        names = prompts[state]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"{state:<11}{len(names):>7}  {' '.join(names[:SHOWN])}{more}".rstrip()
    ended = {f"dropped: {reason}": count for reason, count in view.groups.dropped.items()}
    if published := view.groups.outcomes[GroupState.PUBLISHED]:
        ended[GroupState.PUBLISHED] = published
    for outcome, count in sorted(ended.items()):
        yield f"{outcome}  {count}"


def life(read: Callable[[], Iterable[Event]], group: str) -> Iterator[str]:
    """All attempts at one prompt, one line per event. `group` is a feed index or a sequence number.

    `read` starts to read the event log, which is read twice instead of being held in memory. Raises UserError if the
    log has no such group.
    """
    moves = (event for event in read() if isinstance(event, GroupMoved))
    name = next((move.feed_index for move in moves if group in (move.feed_index, str(move.sequence))), None)
    if name is None:
        raise UserError(
            f"the event log has no group {group}: name a feed index (sample_0_17) or a sequence number (42)"
        )
    began: float | None = None
    attempts: set[int] = set()
    for event in read():
        match event:
            case GroupMoved(feed_index=prompt, sequence=sequence) if prompt == name:
                attempts.add(sequence)
            case GroupGenerated(sequence=sequence) if sequence in attempts:
                pass
            case StepStarted(groups=groups) if not attempts.isdisjoint(groups):
                pass
            case _:
                continue
        began = event.time if began is None else began
        yield f"{event.time - began:>9.2f} s  {_sentence(event)}"


def _sentence(event: Event) -> str:
    match event:
        case GroupMoved(before=None):
            return f"attempt {event.attempt} fed as group {event.sequence}"
        case GroupMoved(reason=str(reason)):
            return f"dropped: {reason}"
        case GroupMoved(before="leased", after="queued"):
            return "queued again, because its batch was not trained"
        case GroupMoved():
            return event.after
        case GroupGenerated():
            oldest, newest = event.versions
            tokens = f"{event.response_tokens} response tokens of versions {oldest} to {newest}"
            return f"generated in {event.generation_seconds:.2f} s: {tokens}, mean reward {event.reward:.2f}"
        case StepStarted():
            return f"step of rollout {event.rollout} on version {event.version}"
        case _:
            raise AssertionError("no other event belongs to a group")


if __name__ == "__main__":
    sys.exit(main())
