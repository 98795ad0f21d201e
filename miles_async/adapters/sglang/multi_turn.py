"""One turn of one sample: what generate functions and agents draw with.

Tokens are never made into text and back: a turn is sampled behind the ids that the sample holds, and what a tool or a
user says is appended as ids that carry no loss, no log-probability (0.0) and no version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from miles_async.adapters.sglang.generator import PromptTokenizer, SamplingParams, SGLangGenerator
from miles_async.types import Group, Sample, SampleStatus


class TurnTokenizer(PromptTokenizer, Protocol):
    def encode_text(self, text: str) -> list[int]: ...

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str: ...

    def text_of(self, ids: list[int]) -> str: ...


class MultiTurnSampler:
    """`engine` bounds the requests in flight, counts them and aborts them, as for whole groups."""

    def __init__(self, engine: SGLangGenerator, tokenizer: TurnTokenizer) -> None:
        self.tokenizer = tokenizer
        self._engine = engine
        self._under_way: dict[int, Group] = {}
        """The turn being sampled, by identity of its sample."""
        self._stopped: set[int] = set()

    async def sample(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
        """Continue `sample` by one turn and set its status; `max_new_tokens` bounds its whole response.

        COMPLETED: the model ended its turn or met a stop string. TRUNCATED: no room is left. ABORTED: the pipeline
        wants the sample back as it is; return it. Raises TrajectoryError and EngineLostError as
        `SGLangGenerator.generate`.
        """
        if id(sample) in self._stopped:
            sample.status = SampleStatus.ABORTED
            return sample
        sample.status = SampleStatus.PENDING
        turn = self._under_way[id(sample)] = Group([sample], feed_index=str(sample.metadata.get("feed_index", "")))
        try:
            await self._engine.generate(turn, SamplingParams.of(sampling_params))
        finally:
            del self._under_way[id(sample)]
        return sample

    def observe(self, sample: Sample, text: str, room: int | None = None) -> int:
        """Append text that the model did not sample, at most `room` tokens of it; returns how many were left out."""
        ids = self.tokenizer.encode_text(text)
        kept = ids if room is None else ids[: max(room, 0)]
        self.observe_ids(sample, kept)
        return len(ids) - len(kept)

    def observe_ids(self, sample: Sample, ids: Sequence[int]) -> None:
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        sample.loss_mask = mask + [0] * len(ids)
        sample.tokens += ids
        sample.response_length += len(ids)
        sample.rollout_log_probs += [0.0] * len(ids)
        sample.response = self.tokenizer.decode(sample.tokens[sample.prompt_length :])

    def said(self, sample: Sample) -> str:
        """What the model said since the last observation: the turn that a call may end, with parts sampled earlier."""
        return self.tokenizer.decode(sample.tokens[len(sample.tokens) - _since_observed(sample) :])

    async def stop(self, samples: Iterable[Sample], *, everything: bool) -> None:
        """End the turns under way, and answer every further one of these samples with ABORTED until `release`.

        `everything` says that these are all samples of the engine's, so that one order per engine suffices.
        """
        stopped = list(samples)
        self._stopped.update(map(id, stopped))
        if everything:
            await self._engine.abort()
            return
        turns = [turn for sample in stopped if (turn := self._under_way.get(id(sample)))]
        await asyncio.gather(*map(self._engine.abort, turns))

    def stopped(self, sample: Sample) -> bool:
        return id(sample) in self._stopped

    def release(self, samples: Iterable[Sample]) -> None:
        self._stopped.difference_update(map(id, samples))


def observations(sample: Sample) -> int:
    """How often something was observed: turns that the model did not sample."""
    return sum(not turn.sampled for turn in sample.turns)


def _since_observed(sample: Sample) -> int:
    turns = sample.turns
    return turns[-1].end - turns[-1].start if turns and turns[-1].sampled else 0
