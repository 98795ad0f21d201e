"""Samples one turn at a time, for generate functions with tools and for agents.

Tokens are never converted to text and back, which could change them: a turn continues the token ids of the sample. The
output of a tool or a user (an observation) is appended as token ids that carry no loss, no version, and the default
entry of every other column.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from miles_async.adapters.sglang.generator import PromptTokenizer, SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.response import continued_text
from miles_async.columns.column import append_tokens
from miles_async.identity import IdentityMap
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.token_values import TokenValues
from miles_async.types import Group, Sample, SampleStatus


class TurnTokenizer(PromptTokenizer, Protocol):
    def encode_text(self, text: str, *, after: str = "") -> list[int]: ...

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        answer_next: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...

    def text_of(self, ids: list[int]) -> str: ...


@dataclass(slots=True, eq=False)
class _Trajectory:
    """What is known of a trajectory."""

    segments: list[Sample]
    """In the order in which their latest turns ended."""
    pin: PinnedVersion = field(default_factory=PinnedVersion)
    """The adapter of its requests, which all trajectories of a group share."""
    aborted: IdentityMap[Sample, None] = field(default_factory=IdentityMap)
    """The segments whose latest turn was aborted."""
    generating: bool = False
    """Whether it is inside `generating`."""
    stopped: bool = False
    """Whether the run has stopped it."""


class MultiTurnSampler:
    """Samples turns through `engine`, which bounds, counts and aborts the requests as it does for whole groups."""

    def __init__(self, engine: SGLangGenerator, tokenizer: TurnTokenizer) -> None:
        self.tokenizer = tokenizer
        self._engine = engine
        self._turns: IdentityMap[Sample, Group] = IdentityMap()
        """The turn of each sample that is being sampled, as a group of one."""
        self._trajectories: IdentityMap[Sample, _Trajectory] = IdentityMap()
        """Trajectories by each segment: those inside `generating`, and those with several segments."""

    async def sample(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
        """Continue `sample` by one turn and set its status; `max_new_tokens` bounds the whole response.

        COMPLETED: the model ended its turn or a stop string matched. TRUNCATED: the response has reached its maximum
        length. ABORTED: the pipeline has stopped the sample; the caller must return it unchanged. Raises the
        errors of `SGLangGenerator.generate`.
        """
        trajectory = self._trajectory(sample)
        trajectory.aborted.pop(sample, None)
        if trajectory.stopped:
            sample.status = SampleStatus.ABORTED
            return sample
        # A turn is generated as a separate group, so that it can be aborted alone.
        sample.status = SampleStatus.PENDING
        turn = self._turns[sample] = Group([sample], feed_index=str(sample.metadata.get("feed_index", "")))
        try:
            await self._engine.generate(turn, SamplingParams.of(sampling_params), trajectory.pin)
        finally:
            del self._turns[sample]
        # The sample may have been forgotten meanwhile.
        trajectory = self._trajectory(sample)
        if sample.status is SampleStatus.ABORTED:
            trajectory.aborted[sample] = None
        segments = trajectory.segments
        segments[:] = [*(segment for segment in segments if segment is not sample), sample]
        return sample

    @contextmanager
    def generating(self, samples: Iterable[Sample]) -> Iterator[None]:
        """Inside the block, `stop` stops these samples. Afterwards, the sampler knows nothing of their trajectories."""
        roots = list(samples)
        pin = PinnedVersion()
        self._trajectories.update((root, _Trajectory([root], pin, generating=True)) for root in roots)
        try:
            yield
        finally:
            for root in roots:
                self.forget(root)
                del self._trajectories[root]

    def _trajectory(self, sample: Sample) -> _Trajectory:
        return self._trajectories.get(sample) or _Trajectory([sample])

    def segments(self, sample: Sample) -> list[Sample]:
        """The segments of the sample's trajectory, in the order in which their last turns ended."""
        return self._trajectory(sample).segments

    def open_segment(self, sample: Sample) -> Sample:
        """Open another segment of the sample's trajectory, without tokens. It is aborted together with the sample."""
        segment = replace(sample, metadata=dict(sample.metadata), tokens=[])
        segment.reset()
        trajectory = self._trajectory(sample)
        trajectory.segments.append(segment)
        self._trajectories[sample] = self._trajectories[segment] = trajectory
        return segment

    def drop_segment(self, segment: Sample) -> None:
        """Remove a segment from its trajectory."""
        trajectory = self._trajectories.pop(segment)
        trajectory.aborted.pop(segment, None)
        trajectory.segments[:] = [other for other in trajectory.segments if other is not segment]

    def observe(self, sample: Sample, text: str, room: int | None = None) -> int:
        """Append an observation, at most `room` tokens of it; return the number of tokens that were cut off."""
        ids = self.tokenizer.encode_text(text, after=self.tokenizer.text_of(list(sample.tokens[-1:])))
        kept = ids if room is None else ids[: max(room, 0)]
        self.observe_ids(sample, kept)
        return len(ids) - len(kept)

    def observe_ids(self, sample: Sample, ids: Sequence[int]) -> None:
        """Append an observation that is given as token ids."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=self._engine.sampling.skip_special_tokens)
        sample.response = continued_text(sample, ids, decode)
        if sample.loss_mask is None:
            # A sample without a mask is trained on as a whole.
            sample.loss_mask = TokenValues.of(np.ones(sample.response_length, np.int8))
        append_tokens(sample, ids)

    def latest_text(self, sample: Sample) -> str:
        """Return the text that the model has sampled since the last observation, across aborts and continuations."""
        return self.tokenizer.decode(list(sample.tokens[len(sample.tokens) - sampled_at_end(sample) :]))

    async def stop(self, samples: Iterable[Sample], *, everything: bool) -> None:
        """Abort the current turns of those of the samples that are `generating`, and every further turn of theirs.

        `everything` means that these are all samples at the engines, so that one abort request per engine suffices.
        Raises EngineLostError if the turns do not end in time; no further turn begins in that case either.
        """
        roots = [sample for sample in samples if sample in self._trajectories]
        for root in roots:
            self._trajectories[root].stopped = True
        if everything:
            await self._engine.abort()
            return
        # A sample between two turns, such as one that waits for a tool, has nothing at the engines.
        stopped = [segment for root in roots for segment in self.segments(root)]
        turns = [turn for sample in stopped if (turn := self._turns.get(sample))]
        await asyncio.gather(*map(self._engine.abort, turns))

    def stopped(self, sample: Sample) -> bool:
        return self._trajectory(sample).stopped

    def aborted(self, sample: Sample) -> bool:
        """Whether the run stopped the sample, or its engine aborted the latest turn of one of its segments."""
        trajectory = self._trajectory(sample)
        return trajectory.stopped or bool(trajectory.aborted)

    def forget(self, sample: Sample) -> None:
        """Forget the further segments of the sample's trajectory, and how the latest turns ended; it stays stopped."""
        trajectory = self._trajectory(sample)
        for segment in trajectory.segments:
            self._trajectories.pop(segment, None)
        if trajectory.generating:
            self._trajectories[sample] = replace(trajectory, segments=[sample], aborted=IdentityMap())


def count_observations(sample: Sample) -> int:
    """Return the number of observations in a sample: turns that the model did not sample."""
    return sum(not turn.sampled for turn in sample.turns)


def is_special(tokenizer: TurnTokenizer, token: int) -> bool:
    """Whether decoding leaves out the text of a token."""
    return not tokenizer.decode([token]) and bool(tokenizer.text_of([token]))


def sampled_at_end(sample: Sample) -> int:
    """Return the number of tokens after the last observation."""
    turns = sample.turns
    return turns[-1].end - turns[-1].start if turns and turns[-1].sampled else 0
