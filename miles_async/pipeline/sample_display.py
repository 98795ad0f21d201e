"""Selects one sample every few seconds for people to read, shortened and safe to print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from miles_async.events import EventSink, SampleDisplayed, Segment
from miles_async.ports import Clock
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from miles_async.visible_text import visible_text

CHARACTERS_SHOWN = 2000
"""Most characters of a text that are shown, half of them from its beginning and half from its end."""
TOKENS_SHOWN = 600
"""Most tokens of a response that are shown, half of them from its beginning and half from its end. The limit bounds the
time that the event loop of the rollout worker spends on decoding."""


def readable(text: str) -> str:
    """Return `text` as visible text, without its middle part if it is long."""
    if (more := len(text) - CHARACTERS_SHOWN) > 0:
        half = CHARACTERS_SHOWN // 2
        text = f"{text[:half]}\n[… {more} characters …]\n{text[-half:]}"
    return visible_text(text)


@dataclass(eq=False, repr=False)
class SampleDisplay:
    """Emits a `SampleDisplayed` event for one of the groups offered to it, at most once per interval."""

    clock: Clock
    events: EventSink
    interval_seconds: float | None
    """The shortest time between two samples; None disables the display."""
    text_of: Callable[[list[int]], str]
    """Returns the text of tokens."""

    def __post_init__(self) -> None:
        self._next = self.clock.monotonic()

    def offer(self, group: Group) -> None:
        """Offer a group that has its rewards."""
        if self.interval_seconds is None or (now := self.clock.monotonic()) < self._next:
            return
        if not all(map(isfinite, group.rewards)):
            return  # JSON, the format of stored events, cannot represent these rewards
        self._next = now + self.interval_seconds
        sample = group[0]
        versions = [span.version for span in sample.spans]
        parts = list(self._parts(sample))
        self.events.emit(
            SampleDisplayed(
                time=self.clock.time(),
                sequence=group.sequence or 0,
                feed_index=group.feed_index,
                prompt=readable(_prompt(sample)),
                response="".join(text for _, text in parts),
                segments=[segment for segment, _ in parts],
                label=readable(str(sample.label)) if sample.label is not None else "",
                reward=sample.scalar_reward,
                rewards=group.rewards,
                tokens=sample.response_length,
                versions=(min(versions), max(versions)),
                truncated=sample.status is SampleStatus.TRUNCATED,
            )
        )

    def _parts(self, sample: Sample) -> Iterator[tuple[Segment, str]]:
        """Yield the segments of the response with their texts.

        Each segment is decoded alone, so a character whose bytes two weight versions sampled is shown as two
        replacement characters.
        """
        ids = list(sample.tokens[len(sample.tokens) - sample.response_length :])
        omitted = range(TOKENS_SHOWN // 2, len(ids) - TOKENS_SHOWN // 2)
        for version, start, end in _by_version(sample.spans, len(ids), omitted):
            shown = start not in omitted
            text = readable(self.text_of(ids[start:end])) if shown else f"\n[… {end - start} tokens …]\n"
            yield Segment(version, end - start if shown else 0, len(text)), text


def _by_version(spans: Sequence[VersionSpan], length: int, omitted: range) -> Iterator[tuple[int | None, int, int]]:
    """Yield (version, start, end) of consecutive tokens of one version. The `omitted` tokens are one part.

    The version of tokens without a span, and of the omitted tokens, is None.
    """
    spanned: list[tuple[int | None, int, int]] = []
    position = 0
    for span in spans:
        spanned += [(None, position, span.start), (span.version, span.start, span.end)]
        position = span.end
    spanned.append((None, position, length))
    if omitted:
        before = [(version, start, min(end, omitted.start)) for version, start, end in spanned]
        after = [(version, max(start, omitted.stop), end) for version, start, end in spanned]
        spanned = [*before, (None, omitted.start, omitted.stop), *after]
    yield from (part for part in spanned if part[1] < part[2])


def _prompt(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in sample.prompt)
