"""Groups of samples through the router's `/generate`.

A group travels as one request (SGLang takes a list of prompts and answers per sample): against one request per sample
that is a third more throughput on short answers and a quarter of the client's CPU, and the group stays on one engine,
beside its cached prompt. Every sample still has its own tokens, versions and finish reason.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.permits import Permits
from miles_async.adapters.sglang.response import extend
from miles_async.errors import EngineLostError, PromptTooLongError, TrajectoryError
from miles_async.events import RequestEnded
from miles_async.types import Group, Sample, SampleStatus

ABORT_PATIENCE_SECONDS = 30.0
EVALUATION_PRIORITY = -100
"""Training has 0. Further below it than SGLang's threshold of 10, beyond which a running request may be put back."""
_NAMED = ("max_new_tokens", "temperature", "top_p", "top_k", "skip_special_tokens")


class PromptTokenizer(Protocol):
    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy."""

    max_new_tokens: int
    """Response tokens at most, those of earlier parts included."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    """Leave special tokens out of the text; the tokens themselves are kept."""
    other: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else SGLang takes, such as `regex` or `min_p`, as it is."""

    @staticmethod
    def of(body: Mapping[str, Any]) -> SamplingParams:
        """From SGLang's own dictionary, as generate functions hold it."""
        values = dict(body)
        stop = values.pop("stop", None) or ()
        ids = tuple(values.pop("stop_token_ids", None) or ())
        known = {name: values.pop(name) for name in _NAMED if name in body}
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return SamplingParams(**known, stop=stops, stop_token_ids=ids, other=values)

    def body(self, budget: int) -> dict[str, Any]:
        """As SGLang wants it, for `budget` more tokens."""
        return {
            "max_new_tokens": budget,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "skip_special_tokens": self.skip_special_tokens,
            **self.other,
        }


@dataclass(slots=True)
class _UnderWay:
    """One call of `generate`."""

    sequence: int | None
    """The group's."""
    requests: list[str] = field(default_factory=list)
    """Ids of its samples at the engines."""
    aborted: bool = False


class SGLangGenerator:
    """Implements `ports.Generator`. Create it inside the running loop.

    `limit` tells how many samples may be at the engines at once (`sglang_server_concurrency` times engines, which come
    and go), `engine_urls` the routed engines' own addresses, where aborts go; a prompt of more than `longest_prompt`
    tokens is refused; `on_request` is told of every request that was answered. Engines that schedule by `priority`
    serve those of a lower one where they keep nobody of a higher one waiting.
    """

    def __init__(
        self,
        router_url: str,
        tokenizer: PromptTokenizer,
        sampling: SamplingParams,
        *,
        limit: Callable[[], int],
        engine_urls: Callable[[], Sequence[str]],
        request_timeout: float = 600.0,
        longest_prompt: int | None = None,
        priority: int = 0,
        on_request: Callable[[RequestEnded], None] | None = None,
    ) -> None:
        self._url = f"{router_url}/generate"
        self._tokenizer = tokenizer
        self.sampling = sampling
        self._limit = limit
        self._engine_urls = engine_urls
        self._timeout = request_timeout
        self._longest_prompt = longest_prompt
        # Engines without evaluations know no priorities, and need not be told the usual one.
        self._priority = {"priority": priority} if priority else {}
        self._on_request = on_request
        self._client = JsonClient()
        self._permits = Permits(limit)
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._under_way: dict[int, _UnderWay] = {}
        """By identity of the group: one that is sent back and admitted again may carry the same names."""

    @property
    def in_flight(self) -> int:
        """Samples at the engines now."""
        return self._permits.taken

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one sample was at the engines."""
        return self._permits.busy_seconds

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None:
        """Finish every unfinished sample of the group, in place; `sampling` replaces the run's own (evaluation).

        Samples that hold response tokens already are continued behind them. Raises TrajectoryError for an answer that
        cannot be trained on, a prompt that is too long or a request the engine refuses; EngineLostError when another
        attempt may succeed.
        """
        chosen = sampling or self.sampling
        self.tokenize(group)
        unfinished = [s for s in group if s.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        for sample in unfinished:
            if not sample.tokens:
                # One such request ends SGLang's scheduler, and with it whatever else the engine holds.
                raise TrajectoryError(f"sample {sample.index} of group {group.feed_index}: its prompt has no tokens")
        under_way = self._under_way[id(group)] = _UnderWay(group.sequence)
        posts = [
            self._post(under_way, samples, chosen.body(budget))
            for budget, samples in self._requests(unfinished, chosen)
        ]
        try:
            # All are awaited before one failure is told, so that nothing writes into the group afterwards.
            outcomes = await asyncio.gather(*posts, return_exceptions=True)
        finally:
            del self._under_way[id(group)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def abort(self, group: Group | None = None) -> None:
        """Stop one group, or all that is in flight or waits for a place; returns when it is stopped.

        Raises EngineLostError when it takes longer than 30 s.
        """
        if group is None:
            self._permits.close()
            try:
                await self._abort_until(lambda: not self._permits.taken, [{"abort_all": True}])
            finally:
                self._permits.open()
        elif under_way := self._under_way.get(id(group)):
            under_way.aborted = True
            stops: list[dict[str, Any]] = [{"rid": rid} for rid in under_way.requests]
            await self._abort_until(lambda: self._under_way.get(id(group)) is not under_way, stops)

    async def _abort_until(self, stopped: Callable[[], bool], orders: Sequence[dict[str, Any]]) -> None:
        """Repeated, because a request on its way to an engine is not stopped by an abort that arrives before it."""

        async def order(url: str, body: dict[str, Any]) -> None:
            # What a lost engine held ends with it.
            with suppress(EngineLostError):
                await self._client.post(f"{url}/abort_request", body, within=ABORT_PATIENCE_SECONDS)

        try:
            async with asyncio.timeout(ABORT_PATIENCE_SECONDS):
                while not stopped():
                    await asyncio.gather(*[order(url, body) for url in self._engine_urls() for body in orders])
                    await asyncio.sleep(0.02)
        except TimeoutError as late:
            raise EngineLostError(
                f"{self._permits.taken} requests did not end within {ABORT_PATIENCE_SECONDS:.0f} s of an abort"
            ) from late

    async def rate(self, sample: Sample) -> None:
        """Set the log-probabilities of a response that somebody else sampled, as the engines' present weights see it.

        Raises as `generate` does, and TrajectoryError where no prompt stands before it.
        """
        if not sample.prompt_length:
            raise TrajectoryError(
                f"sample {sample.index}: its tokens hold no prompt; put it first, or rollout_log_probs"
            )
        body = {
            "input_ids": sample.tokens,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": sample.prompt_length - 1,
            **self._priority,
        }
        async with self._permits.take(1) as admitted:
            if not admitted:
                sample.status = SampleStatus.ABORTED
                return
            answer = await self._client.post(self._url, body, within=self._timeout)
        rated = answer["meta_info"]["input_token_logprobs"][-sample.response_length :]
        sample.rollout_log_probs = [entry[0] for entry in rated]

    async def close(self) -> None:
        await self._client.close()

    def tokenize(self, group: Group) -> None:
        """Give every sample without tokens those of its prompt.

        Raises TrajectoryError for a prompt that is too long.
        """
        known: dict[str, list[int]] = {}
        for sample in group:
            if not sample.tokens:
                key = str(sample.prompt)
                if key not in known:
                    known[key] = self._tokenizer.encode(sample.prompt)
                sample.tokens = list(known[key])
            if self._longest_prompt is not None and sample.prompt_length > self._longest_prompt:
                raise PromptTooLongError(
                    f"sample {sample.index} of group {group.feed_index}: its prompt has {sample.prompt_length} tokens, "
                    f"more than rollout_max_prompt_len {self._longest_prompt}"
                )

    def _requests(self, samples: Sequence[Sample], sampling: SamplingParams) -> Iterator[tuple[int, list[Sample]]]:
        """Samples that may still draw the same number of tokens, at most `limit` together."""
        by_budget: defaultdict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            by_budget[sampling.max_new_tokens - sample.response_length].append(sample)
        for budget, alike in by_budget.items():
            if budget <= 0:
                for sample in alike:
                    sample.status = SampleStatus.TRUNCATED
                continue
            at_once = self._limit()
            for start in range(0, len(alike), at_once):
                yield budget, alike[start : start + at_once]

    async def _post(self, under_way: _UnderWay, samples: list[Sample], sampling_params: dict[str, Any]) -> None:
        async with self._permits.take(len(samples)) as admitted:
            if not admitted or under_way.aborted:
                for sample in samples:
                    sample.status = SampleStatus.ABORTED
                return
            request = f"{self._name}-{next(self._numbers)}"
            # SGLang numbers the samples of one request so.
            under_way.requests += [f"{request}_{place}" for place in range(len(samples))]
            body = {
                "rid": request,
                "input_ids": [sample.tokens for sample in samples],
                "sampling_params": sampling_params,
                "return_logprob": True,
                **self._priority,
            }
            started = time.time()
            answers = await self._client.post(self._url, body, within=self._timeout)
            ended = time.time()
        if self._on_request is not None:
            drawn = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
            self._on_request(
                RequestEnded(
                    time=ended,
                    started=started,
                    sequence=under_way.sequence,
                    samples=len(samples),
                    response_tokens=drawn,
                )
            )
        decode = partial(self._tokenizer.decode, skip_special_tokens=sampling_params["skip_special_tokens"])
        for sample, answer in zip(samples, answers, strict=True):
            extend(sample, answer, decode)


@dataclass(frozen=True, slots=True)
class SampledAs:
    """Implements `ports.Generator`: `engine` with sampling settings of its own, so that several share its places."""

    engine: SGLangGenerator
    sampling: SamplingParams

    async def generate(self, group: Group) -> None:
        await self.engine.generate(group, self.sampling)

    async def abort(self, group: Group | None = None) -> None:
        await self.engine.abort(group)

    @property
    def in_flight(self) -> int:
        return self.engine.in_flight

    @property
    def busy_seconds(self) -> float:
        return self.engine.busy_seconds
