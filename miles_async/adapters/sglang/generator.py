"""Groups of samples through the router's `/generate`.

A group travels as one request (SGLang takes a list of prompts and answers per sample): against one request per sample
that is a third more throughput on short answers and a quarter of the client's CPU, and the group stays on one engine,
beside its cached prompt. Every sample still has its own tokens, versions and finish reason.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.places import Places
from miles_async.adapters.sglang.response import extend
from miles_async.errors import EngineLost
from miles_async.types import Group, Sample, SampleStatus

ABORT_PATIENCE_SECONDS = 30.0


class PromptTokenizer(Protocol):
    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy."""

    max_new_tokens: int
    """Response tokens at most, those of earlier parts included."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()

    def body(self, budget: int) -> dict[str, Any]:
        """As SGLang wants it, for `budget` more tokens."""
        return {
            "max_new_tokens": budget,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": list(self.stop) or None,
        }


class SGLangGenerator:
    """Implements `ports.Generator`. Create it inside the running loop.

    `limit` bounds the samples at the engines at once (`sglang_server_concurrency` times engines); `engine_urls` tells
    the routed engines' own addresses, where aborts go.
    """

    def __init__(
        self,
        router_url: str,
        tokenizer: PromptTokenizer,
        sampling: SamplingParams,
        *,
        limit: int,
        engine_urls: Callable[[], Sequence[str]],
        request_timeout: float = 600.0,
    ) -> None:
        self._url = f"{router_url}/generate"
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limit = limit
        self._engine_urls = engine_urls
        self._timeout = request_timeout
        self._client = JsonClient()
        self._places = Places(limit)

    @property
    def in_flight(self) -> int:
        """Samples at the engines now."""
        return self._places.taken

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one sample was at the engines."""
        return self._places.busy_seconds

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None:
        """Finish every unfinished sample of the group, in place; `sampling` replaces the run's own (evaluation).

        Samples that hold response tokens already are continued behind them. Raises BadTrajectory for an answer that
        cannot be trained on or a request the engine refuses, EngineLost when another attempt may succeed.
        """
        chosen = sampling or self._sampling
        self._tokenize(group)
        unfinished = [s for s in group if s.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        posts = [self._post(samples, chosen.body(budget)) for budget, samples in self._requests(unfinished, chosen)]
        # All are awaited before one failure is told, so that nothing writes into the group afterwards.
        outcomes = await asyncio.gather(*posts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def abort(self) -> None:
        """Stop what is in flight and what waits for a place; returns when nothing is at the engines any more.

        Repeated until then, because a request that is on its way to an engine is not stopped by an abort that arrives
        before it. Raises EngineLost when it takes longer than 30 s.
        """
        self._places.close()
        try:
            async with asyncio.timeout(ABORT_PATIENCE_SECONDS):
                while self._places.taken:
                    await asyncio.gather(*[self._abort_all(url) for url in self._engine_urls()])
                    await asyncio.sleep(0.02)
        except TimeoutError as late:
            raise EngineLost(
                f"{self._places.taken} requests did not end within {ABORT_PATIENCE_SECONDS:.0f} s of an abort"
            ) from late
        finally:
            self._places.open()

    async def _abort_all(self, url: str) -> None:
        await self._client.post(f"{url}/abort_request", {"abort_all": True}, within=ABORT_PATIENCE_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    def _tokenize(self, group: Group) -> None:
        known: dict[str, list[int]] = {}
        for sample in group:
            if not sample.tokens:
                key = str(sample.prompt)
                if key not in known:
                    known[key] = self._tokenizer.encode(sample.prompt)
                sample.tokens = list(known[key])

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
            for start in range(0, len(alike), self._limit):
                yield budget, alike[start : start + self._limit]

    async def _post(self, samples: list[Sample], sampling_params: dict[str, Any]) -> None:
        async with self._places.take(len(samples)) as admitted:
            if not admitted:
                for sample in samples:
                    sample.status = SampleStatus.ABORTED
                return
            body = {
                "input_ids": [sample.tokens for sample in samples],
                "sampling_params": sampling_params,
                "return_logprob": True,
            }
            answers = await self._client.post(self._url, body, within=self._timeout)
        for sample, answer in zip(samples, answers, strict=True):
            extend(sample, answer, self._tokenizer.decode)
