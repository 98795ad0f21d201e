"""Generates groups of samples through the router's `/generate`.

A group is one request: SGLang takes a list of prompts and answers for each sample. Compared to one request per sample,
that gives a third more throughput on short answers for a quarter of the client's CPU time, and the group stays on the
engine that has its prompt cached. Every sample still has its own tokens, versions and finish reason.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from miles_async.adapters.sglang.client import Decode, JsonClient, NoAnswerError, UnavailableError
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.permits import Permits
from miles_async.adapters.sglang.plugin import EACH_SAMPLE, PACKED
from miles_async.adapters.sglang.response import extend
from miles_async.columns.tokens import too_long
from miles_async.errors import EngineLostError, PromptTooLongError, RouterLostError, TrajectoryError
from miles_async.events import RequestEnded
from miles_async.identity import IdentityMap
from miles_async.parsing import parse
from miles_async.sample_schema import ScoredAnswer, decode_answers
from miles_async.scheduling.adapters import AdapterVersions, PinnedVersion, name_of
from miles_async.token_values import TokenValues, array_of
from miles_async.types import Group, Prompt, Sample, SampleStatus

REQUEST_TOKENS = 1 << 17
"""Most tokens that one request may generate, unless it is for a single sample. An answer has 40 bytes per token, which
the event loop decodes without a break."""
ABORT_TIMEOUT_SECONDS = 30.0
ABORT_REPEAT_SECONDS = 0.02
"""Pause before an abort is repeated for the first time. It doubles with each repetition."""
MAX_ABORT_REPEAT_SECONDS = 1.0
EVALUATION_PRIORITY = -100
"""Training requests have priority 0. SGLang lets a request preempt another one only if their priorities differ by more
than 10."""


class PromptTokenizer(Protocol):
    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled and converted to text. `temperature=0` is greedy.

    The defaults of `no_stop_trim` and `spaces_between_special_tokens` are the values that slime sends.
    """

    max_new_tokens: int
    """Maximum length of the response, including tokens that the sample already has."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    """Leave special tokens out of the text; the tokens themselves are kept."""
    no_stop_trim: bool = True
    """Keep the stop string that ended a response in the text, as the tokens have it."""
    spaces_between_special_tokens: bool = False
    other: Mapping[str, Any] = field(default_factory=dict)
    """Other sampling parameters of SGLang, such as `regex` or `min_p`; passed on unchanged."""

    @staticmethod
    def of(body: Mapping[str, Any]) -> SamplingParams:
        """Convert from SGLang's dictionary, which generate functions use."""
        values, stop = dict(body), body.get("stop") or ()
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop_token_ids"] = tuple(body.get("stop_token_ids") or ())
        named = {entry.name for entry in fields(SamplingParams)} - {"other"}
        known = {name: values.pop(name) for name in named & values.keys()}
        return SamplingParams(**known, other=values)

    def body(self, budget: int) -> dict[str, Any]:
        """Convert to SGLang's dictionary, for at most `budget` more tokens."""
        named = {name: value for name, value in vars(self).items() if name != "other"}
        stops = {"stop": list(self.stop) or None, "stop_token_ids": list(self.stop_token_ids) or None}
        return {**named, **stops, "max_new_tokens": budget, **self.other}


def sampling_seed(seed: int | None, index: int | None) -> dict[str, int]:
    """The sampling parameter for the sample with this index, for engines that sample with a seed per request.

    `seed` is the seed of the run; None for other engines. SGLang gives all requests without this parameter the same
    seed, so all samples of a prompt would be equal. The result is empty without a `seed` or an `index`.
    """
    return {} if seed is None or index is None else {"sampling_seed": seed + index}


class TokenLimits(NamedTuple):
    """The limits of a data set; None for those of the run."""

    prompt: int | None
    response: int | None


_LIMITS_OF_RUN = TokenLimits(None, None)


@dataclass(slots=True)
class _GenerateCall:
    """A call of `generate` that has not returned yet."""

    sequence: int | None
    """Sequence number of the group."""
    adapter: str
    """The adapter that its requests name; empty unless the run trains several."""
    pin: PinnedVersion
    """The version of the adapter."""
    request_ids: list[str] = field(default_factory=list)
    """The ids of the requests that were sent to the engines, each with the end that stands for all of its samples
    (`plugin.abort_samples`)."""
    aborted: bool = False


class SGLangGenerator:
    """Implements `ports.Generator`. Create it inside the running event loop."""

    def __init__(
        self,
        router_url: str,
        tokenizer: PromptTokenizer,
        sampling: SamplingParams,
        *,
        limit: Callable[[], int],
        engines: Callable[[], Sequence[EngineInfo]],
        router_key: str = "",
        request_timeout: float = 600.0,
        max_prompt_tokens: int | None = None,
        longest_sample: int | None = None,
        dataset_limits: Mapping[str, TokenLimits] | None = None,
        priority: int = 0,
        seed: int | None = None,
        sampling_masks: bool = False,
        adapters: AdapterVersions | None = None,
        on_request: Callable[[RequestEnded], None] | None = None,
    ) -> None:
        """`limit` returns how many samples may be at the engines at once: it changes with the number of engines.

        `engines` returns the addresses of the routed engines, which receive aborts directly. `router_key` is the API
        key of the router. `request_timeout` is in seconds. A prompt of more than `max_prompt_tokens` tokens is refused,
        and one that leaves no room for a response in the `longest_sample` tokens that the learner can train. Samples of
        some data sets have other limits, `dataset_limits` by name, which are lower. Requests of a lower `priority` are
        served only while no request of a higher one waits. `seed` is as in `sampling_seed`. With `sampling_masks`
        samples get the sampling mask that the engines return (`plugin.py`) and the log-probabilities over the kept
        tokens. `adapters` are the versions that requests name, if the run trains an adapter. `on_request` is called
        after each answered request.
        """
        self._url = f"{router_url}/generate"
        self._tokenizer = tokenizer
        self.sampling = sampling
        self._limit = limit
        self._engines = engines
        self._router_key = router_key
        self._timeout = request_timeout
        self._max_prompt_tokens = max_prompt_tokens
        self._longest_sample = longest_sample
        self._dataset_limits = dataset_limits or {}
        # Engines of a run without evaluations do not schedule by priority, so the default priority is not sent.
        self._priority = {"priority": priority} if priority else {}
        self._seed = seed
        self._sampling_masks = sampling_masks
        self._adapters = adapters
        self._on_request = on_request
        self._client = JsonClient()
        self.requests = Permits(limit)
        # Request ids have to be unique among all clients of the engines.
        self._id_prefix = PACKED + uuid.uuid4().hex
        self._request_numbers = itertools.count()
        self._calls: IdentityMap[Group, _GenerateCall] = IdentityMap()
        """By the group itself: the names of a group are not unique, because a recycled group keeps some of them."""
        self._abandoned: set[asyncio.Task[None]] = set()
        """Aborts of requests whose caller was cancelled."""

    def with_sampling(self, sampling: SamplingParams) -> SGLangGenerator:
        """This generator with other sampling parameters. Both share their connections, permits and calls."""
        other = copy(self)
        other.sampling = sampling
        return other

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        """Finish every unfinished sample of the group, in place; `sampling` overrides the default parameters.

        All requests name the adapter that `pin` holds, or else the one that sampled the group's tokens, or else the
        newest one. A sample that already has response tokens is continued.

        Raises TrajectoryError if a prompt is empty or too long, an engine refuses the request or exceeds the time
        limit, or an answer cannot be trained on; EngineLostError if the engine was lost; and RouterLostError if the
        request reached no engine.
        """
        chosen = sampling or self.sampling
        self.tokenize(group)
        unfinished = [s for s in group if s.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        for sample in unfinished:
            if not sample.tokens:
                # SGLang's scheduler would crash, and all other requests of the engine would be lost.
                raise TrajectoryError(f"sample {sample.index} of group {group.feed_index}: its prompt has no tokens")
        pin = PinnedVersion() if pin is None else pin
        if pin.version is None:
            pin.version = max((span.version for sample in group for span in sample.spans), default=None)
        call = self._calls[group] = _GenerateCall(group.sequence, group.adapter, pin)
        posts = [
            self._post(call, samples, chosen.body(budget)) for budget, samples in self._requests(unfinished, chosen)
        ]
        try:
            # Wait for all requests before raising, so that no answer is written into the group afterwards.
            outcomes = await asyncio.gather(*posts, return_exceptions=True)
        except asyncio.CancelledError:
            # SGLang notices only after seconds that nobody waits for the answer.
            for rid in call.request_ids:
                abort = asyncio.create_task(self._abort_at_engines({"rid": rid}))
                self._abandoned.add(abort)
                abort.add_done_callback(self._abandoned.discard)
            raise
        finally:
            del self._calls[group]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def abort(self, group: Group | None = None) -> None:
        """Abort one group, or all groups, including those that wait for permits; return when they have ended.

        Raises EngineLostError if that takes longer than 30 s.
        """
        if group is None:
            self.requests.close()
            try:
                await self._abort_until(lambda: not self.requests.in_flight, [{"abort_all": True}])
            finally:
                self.requests.open()
        elif call := self._calls.get(group):
            call.aborted = True
            requests: list[dict[str, Any]] = [{"rid": request_id} for request_id in call.request_ids]
            await self._abort_until(lambda: self._calls.get(group) is not call, requests)

    async def _abort_until(self, stopped: Callable[[], bool], requests: Sequence[dict[str, Any]]) -> None:
        """Send abort requests to all engines until `stopped` holds.

        An abort that overtakes its request has no effect, so aborts are repeated.
        """
        pause = ABORT_REPEAT_SECONDS
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_SECONDS):
                while not stopped():
                    # An engine that hangs does not delay the end of a request at another one.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(MAX_ABORT_REPEAT_SECONDS):
                            await asyncio.gather(*map(self._abort_at_engines, requests))
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_ABORT_REPEAT_SECONDS)
        except TimeoutError as late:
            raise EngineLostError(
                f"{self.requests.in_flight} requests did not end within {ABORT_TIMEOUT_SECONDS:.0f} s of an abort"
            ) from late

    async def _abort_at_engines(self, body: dict[str, Any]) -> None:
        async def abort(engine: EngineInfo) -> None:
            # The requests of a lost engine end with the engine.
            with suppress(EngineLostError):
                await self._client.post(
                    f"{engine.url}/abort_request", body, key=engine.key, within=ABORT_TIMEOUT_SECONDS
                )

        await asyncio.gather(*map(abort, self._engines()))

    async def score_logprobs(self, sample: Sample) -> None:
        """Set the log-probabilities of a response that was sampled elsewhere, under the engines' current weights.

        Raises what `generate` raises, and TrajectoryError if the sample has no prompt.
        """
        if not sample.prompt_length:
            raise TrajectoryError(
                f"sample {sample.index}: its tokens contain no prompt; put the prompt first, or set rollout_log_probs"
            )
        body = {
            "input_ids": np.asarray(sample.tokens),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": sample.prompt_length - 1,
            **self._priority,
        }
        async with self.requests.take(1) as granted:
            if not granted:
                sample.status = SampleStatus.ABORTED
                return
            with self._naming(PinnedVersion(), sample.adapter) as adapter:
                answer = await self._ask(body | adapter)
        scored = parse(answer, ScoredAnswer, f"sample {sample.index}: the engine's answer").meta_info
        log_probs = [log_prob for log_prob, _, _ in scored.input_token_logprobs[-sample.response_length :]]
        known = [log_prob for log_prob in log_probs if log_prob is not None]
        if len(known) != sample.response_length:
            raise TrajectoryError(
                f"sample {sample.index}: the engine scored {len(known)} of {sample.response_length} response tokens"
            )
        sample.rollout_log_probs = TokenValues(known, np.float32)

    async def close(self) -> None:
        for abort in self._abandoned:
            abort.cancel()
        await self._client.close()

    def tokenize(self, group: Group) -> None:
        """Set the prompt tokens of every sample without tokens.

        Raises TrajectoryError if a prompt is too long, and as `CheckpointTokenizer.render` if it is a list of messages.
        """
        # The samples of a group usually share one prompt: encode it once. They share the array, which is read-only.
        encoded: dict[str, NDArray[np.int32]] = {}
        for sample in group:
            if not sample.tokens:
                tools = sample.metadata.get("tools")
                key = f"{sample.prompt}{tools}"
                if key not in encoded:
                    encoded[key] = array_of(self._tokenizer.encode(sample.prompt, tools), np.dtype(np.int32))
                sample.tokens = TokenValues.of(encoded[key])
            own = self._limits_of(sample).prompt
            limit = self._max_prompt_tokens if own is None else own
            if limit is not None and sample.prompt_length > limit:
                setting = "rollout_max_prompt_len" if own is None else f"datasets.{sample.dataset}.max_prompt_len"
                raise PromptTooLongError(
                    f"sample {sample.index} of group {group.feed_index}: its prompt has {sample.prompt_length} tokens, "
                    f"more than {setting} {limit}"
                )
            if self._longest_sample is not None and sample.prompt_length >= self._longest_sample:
                raise PromptTooLongError(
                    f"sample {sample.index} of group {group.feed_index}: its prompt alone has "
                    f"{too_long(sample.prompt_length, self._longest_sample)}"
                )

    def _limits_of(self, sample: Sample) -> TokenLimits:
        return self._dataset_limits.get(sample.dataset, _LIMITS_OF_RUN)

    def _requests(self, samples: Sequence[Sample], sampling: SamplingParams) -> Iterator[tuple[int, list[Sample]]]:
        """Split samples into requests: those with the same number of tokens left, at most `limit` per request, and no
        more than may get `REQUEST_TOKENS` tokens together.

        SGLang takes one `max_new_tokens` per request. Samples without tokens left become TRUNCATED.
        """
        by_budget: defaultdict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            own = self._limits_of(sample).response
            longest = sampling.max_new_tokens if own is None else min(own, sampling.max_new_tokens)
            by_budget[longest - sample.response_length].append(sample)
        for budget, alike in by_budget.items():
            if budget <= 0:
                for sample in alike:
                    sample.status = SampleStatus.TRUNCATED
                continue
            # A request has one seed.
            limit = 1 if self._seed is not None else min(self._limit(), max(1, REQUEST_TOKENS // budget))
            for start in range(0, len(alike), limit):
                yield budget, alike[start : start + limit]

    async def _post(self, call: _GenerateCall, samples: list[Sample], sampling_params: dict[str, Any]) -> None:
        """Send one request and read the answers into the samples. Samples of an aborted call become ABORTED."""
        async with self.requests.take(len(samples)) as granted:
            if not granted or call.aborted:
                for sample in samples:
                    sample.status = SampleStatus.ABORTED
                return
            number, index = next(self._request_numbers), samples[0].index
            request = f"{self._id_prefix}-{number}"
            call.request_ids.append(request + EACH_SAMPLE)
            body = {
                "rid": request,
                "input_ids": [np.asarray(sample.tokens) for sample in samples],
                "sampling_params": sampling_seed(self._seed, number if index is None else index) | sampling_params,
                "return_logprob": True,
                **self._priority,
            }
            started = time.monotonic()
            with self._naming(call.pin, call.adapter) as adapter:
                answers = await self._ask(body | adapter, decode_answers)
            ended, seconds = time.time(), time.monotonic() - started
        if not isinstance(answers, list) or len(answers) != len(samples):
            raise TrajectoryError(f"an engine did not answer with a list of {len(samples)} samples")
        before = sum(sample.response_length for sample in samples)
        decode = partial(self._tokenizer.decode, skip_special_tokens=sampling_params["skip_special_tokens"])
        for sample, answer in zip(samples, answers, strict=True):
            extend(sample, answer, decode, sampling_mask=self._sampling_masks)
        if self._on_request is not None:
            self._on_request(
                RequestEnded(
                    time=ended,
                    seconds=seconds,
                    sequence=call.sequence,
                    samples=len(samples),
                    response_tokens=sum(sample.response_length for sample in samples) - before,
                )
            )

    @contextmanager
    def _naming(self, pin: PinnedVersion, adapter: str) -> Iterator[dict[str, str]]:
        """Yield the name of a version of an adapter for a request. The version is in use inside the block."""
        if self._adapters is None:
            yield {}
            return
        try:
            version = self._adapters.begin(pin, adapter)
        except KeyError:
            raise TrajectoryError(
                "a sample has lost the metadata that names its adapter: let the generate function keep the metadata of "
                "the sample that it was given"
            ) from None
        try:
            yield {"lora_path": name_of(version)}
        finally:
            self._adapters.end(version, adapter)

    async def _ask(self, body: dict[str, Any], decode: Decode | None = None) -> Any:
        """Send one request to the router and return its answer."""
        try:
            return await self._client.post(self._url, body, key=self._router_key, within=self._timeout, decode=decode)
        except UnavailableError as error:
            raise RouterLostError(str(error)) from error
        except NoAnswerError as error:
            # Health checks find engines and routers that hang, so this answer is only slow.
            raise TrajectoryError(
                f"an engine has not answered within {self._timeout:g} s: raise sglang_router_request_timeout_secs, or "
                "lower rollout_max_response_len"
            ) from error
