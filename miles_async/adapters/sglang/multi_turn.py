"""Samples one turn at a time, for generate functions with tools and for agents.

Tokens are never converted to text and back, which could change them: a turn continues the token ids of the sample. The
output of a tool or a user (an observation) is appended as token ids that carry no loss, no version, no
sampling mask and the log-probability 0.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from miles_async.adapters.sglang.generator import PromptTokenizer, SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.response import continued_text
from miles_async.sampling_mask import SamplingMask
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


class MultiTurnSampler:
    """Samples turns through `engine`, which bounds, counts and aborts the requests as it does for whole groups."""

    def __init__(self, engine: SGLangGenerator, tokenizer: TurnTokenizer) -> None:
        self.tokenizer = tokenizer
        self._engine = engine
        self._turns: dict[int, Group] = {}
        """The turn that is being sampled, as a group of one, by `id` of its sample."""
        self._segments: dict[int, list[Sample]] = {}
        """The segments of a trajectory, by `id` of each of them; only of trajectories with several segments."""
        self._stopped: set[int] = set()
        """`id`s of the samples that are to end."""
        self._aborted: set[int] = set()
        """`id`s of the samples whose latest turn was aborted, until `forget`."""

    async def sample(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
        """Continue `sample` by one turn and set its status; `max_new_tokens` bounds the whole response.

        COMPLETED: the model ended its turn or a stop string matched. TRUNCATED: the response has reached its maximum
        length. ABORTED: the pipeline has stopped the sample; the caller must return it unchanged. Raises as
        `SGLangGenerator.generate`.
        """
        self._aborted.discard(id(sample))
        if any(map(self.stopped, self.segments(sample))):
            sample.status = SampleStatus.ABORTED
            return sample
        # A turn is generated as a separate group, so that it can be aborted alone.
        sample.status = SampleStatus.PENDING
        turn = self._turns[id(sample)] = Group([sample], feed_index=str(sample.metadata.get("feed_index", "")))
        try:
            await self._engine.generate(turn, SamplingParams.of(sampling_params))
        finally:
            del self._turns[id(sample)]
        if sample.status is SampleStatus.ABORTED:
            self._aborted.add(id(sample))
        segments = self.segments(sample)
        segments[:] = [*(segment for segment in segments if segment is not sample), sample]
        return sample

    def segments(self, sample: Sample) -> list[Sample]:
        """The segments of the sample's trajectory, in the order in which their last turns ended."""
        return self._segments.get(id(sample), [sample])

    def open_segment(self, sample: Sample) -> Sample:
        """Open another segment of the sample's trajectory, without tokens. It is aborted together with the sample."""
        segment = replace(sample, metadata=dict(sample.metadata), tokens=[])
        segment.reset()
        segments = self.segments(sample)
        segments.append(segment)
        self._segments |= {id(sample): segments, id(segment): segments}
        return segment

    def drop_segment(self, segment: Sample) -> None:
        """Remove a segment from its trajectory."""
        segments = self._segments.pop(id(segment))
        segments[:] = [other for other in segments if other is not segment]

    def observe(self, sample: Sample, text: str, room: int | None = None) -> int:
        """Append an observation, at most `room` tokens of it; return the number of tokens that were cut off."""
        ids = self.tokenizer.encode_text(text, after=self.tokenizer.text_of(sample.tokens[-1:]))
        kept = ids if room is None else ids[: max(room, 0)]
        self.observe_ids(sample, kept)
        return len(ids) - len(kept)

    def observe_ids(self, sample: Sample, ids: Sequence[int]) -> None:
        """Append an observation that is given as token ids."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=self._engine.sampling.skip_special_tokens)
        sample.response = continued_text(sample, ids, decode)
        # A sample without a mask is trained on as a whole.
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        sample.loss_mask = mask + [0] * len(ids)
        sample.tokens += ids
        sample.response_length += len(ids)
        sample.rollout_log_probs += [0.0] * len(ids)
        if sample.sampling_mask is not None:
            sample.sampling_mask = SamplingMask.concatenate([sample.sampling_mask, SamplingMask.empty(len(ids))])

    def latest_text(self, sample: Sample) -> str:
        """Return the text that the model has sampled since the last observation, across aborts and continuations."""
        return self.tokenizer.decode(sample.tokens[len(sample.tokens) - _sampled_at_end(sample) :])

    async def stop(self, samples: Iterable[Sample], *, everything: bool) -> None:
        """Abort the current turns of these samples, and every further turn of theirs until `release`.

        `everything` means that these are all samples at the engines, so that one abort request per engine suffices.
        """
        roots = list(samples)
        self._stopped.update(map(id, roots))
        if everything:
            await self._engine.abort()
            return
        # A sample between two turns, such as one that waits for a tool, has nothing at the engines.
        stopped = [segment for root in roots for segment in self.segments(root)]
        turns = [turn for sample in stopped if (turn := self._turns.get(id(sample)))]
        await asyncio.gather(*map(self._engine.abort, turns))

    def stopped(self, sample: Sample) -> bool:
        return id(sample) in self._stopped

    def aborted(self, sample: Sample) -> bool:
        """Whether the run stopped the sample, or its engine aborted the latest turn of one of its segments."""
        return id(sample) in self._stopped or any(id(segment) in self._aborted for segment in self.segments(sample))

    def forget(self, sample: Sample) -> None:
        """Forget the segments of the sample's trajectory, and how their latest turns ended."""
        for segment in self.segments(sample):
            self._aborted.discard(id(segment))
            self._segments.pop(id(segment), None)

    def release(self, samples: Iterable[Sample]) -> None:
        self._stopped.difference_update(map(id, samples))


def count_observations(sample: Sample) -> int:
    """Return the number of observations in a sample: turns that the model did not sample."""
    return sum(not turn.sampled for turn in sample.turns)


def _sampled_at_end(sample: Sample) -> int:
    """Return the number of tokens after the last observation."""
    turns = sample.turns
    return turns[-1].end - turns[-1].start if turns and turns[-1].sampled else 0
