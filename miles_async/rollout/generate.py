"""Generates each sample through a user's function (`--custom-generate-function-path`), as in slime.

    async def generate(args, sample, sampling_params) -> Sample | list[Sample]

A list holds the segments of one trajectory, in the order in which they ended.
`sampling_params` is SGLang's dictionary. `args` has every setting, the router's address, and two helpers that record
tokens, log-probabilities and weight versions: `args.turns` (`adapters/sglang/multi_turn.py`) samples one chat turn, and
`args.agents` (`adapters/agents/endpoint.py`) provides an OpenAI-compatible address for an agent. A function that sends
requests to the router itself must fill the sample itself. Without spans, its samples get the weight version that was
live when their generation began; missing log-probabilities are computed by the engines afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.config.user_functions import load_function
from miles_async.errors import MilesError, TrajectoryError, UserError
from miles_async.rollout.contract import Arguments, complete
from miles_async.sample_schema import NO_LIMITS, SampleLimits, check_sample
from miles_async.types import Group, Sample, SampleStatus

GenerateFunction = Callable[[Any, Sample, dict[str, Any]], Coroutine[Any, Any, Sample | list[Sample]]]
_UNFINISHED = (SampleStatus.PENDING, SampleStatus.ABORTED)
ABORT_GRACE_SECONDS = 5.0
"""Time that a function has to return after an abort (a tool may be running) before it is cancelled."""


def load_generate_function(path: str) -> GenerateFunction:
    """Import a generate function. Raises UserError if that fails or if the function is not async."""
    function = load_function(path, setting="custom_generate_function_path")
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"custom_generate_function_path {path!r} is not an async function: define it with async def")
    return function


class FunctionGenerator:
    """Implements `ports.Generator` with a user's generate function; `turns` samples from `engine`."""

    def __init__(
        self,
        function: GenerateFunction,
        args: Arguments,
        sampling: SamplingParams,
        engine: SGLangGenerator,
        turns: MultiTurnSampler,
        *,
        live_version: Callable[[], int],
        timeout_seconds: float,
        engines_abort: bool = False,
        limits: SampleLimits = NO_LIMITS,
    ) -> None:
        """`engines_abort` means that engines abort all requests when weights are published.

        A function that sends its own requests may then return ABORTED because of an engine.
        """
        self._function = function
        self._args = args
        self._sampling = sampling
        self._engine = engine
        self._turns = turns
        self._live_version = live_version
        self._timeout_seconds = timeout_seconds
        self._engines_abort = engines_abort
        self._limits = limits
        self._running: dict[int, tuple[Group, list[asyncio.Task[list[Sample]]]]] = {}
        """Groups that are being generated and the tasks of their samples, by identity of the group."""

    @property
    def in_flight(self) -> int:
        """Number of requests at the engines now."""
        return self._engine.in_flight

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start in which the engines had at least one request."""
        return self._engine.busy_seconds

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None:
        """Generate the unfinished samples of a group, concurrently; `sampling` overrides the default parameters.

        Raises TrajectoryError if the function raises, exceeds `generate_timeout_seconds` or returns an invalid sample,
        and UserError if it returns no sample. The samples that were generated are then kept.
        """
        self._engine.tokenize(group)
        trajectories = group.trajectories
        unfinished = [i for i, [first, *_] in enumerate(trajectories) if first.status in _UNFINISHED]
        chosen = sampling or self._sampling
        tasks = [asyncio.create_task(self._generate_sample(trajectories[i][0], i, chosen)) for i in unfinished]
        self._running[id(group)] = group, tasks
        try:
            # Every task is awaited before a failure is raised, so that none changes the group afterwards.
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            del self._running[id(group)]
        for i, outcome in zip(unfinished, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                trajectories[i] = outcome
        group[:] = chain.from_iterable(trajectories)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def abort(self, group: Group | None = None) -> None:
        """Abort requests at once. A function that does not return in time is cancelled, and its sample is reset."""
        if group is None:
            stopped = list(self._running.values())
        else:
            stopped = [running] if (running := self._running.get(id(group))) else []
        tasks = [task for _, tasks in stopped for task in tasks]
        samples = [sample for members, _ in stopped for sample in members]
        # Requests end first: most functions return as soon as their request does.
        await self._turns.stop(samples, everything=group is None)
        try:
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=ABORT_GRACE_SECONDS)
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late)
        finally:
            # The samples may be sampled again once their functions have ended.
            self._turns.release(samples)

    async def _generate_sample(self, sample: Sample, number: int, sampling: SamplingParams) -> list[Sample]:
        """Generate the trajectory with this number in its group, and return its segments."""
        version, prompt = self._live_version(), sample.tokens[: sample.prompt_length]
        try:
            result = await self._call(sample, sampling)
        except (asyncio.CancelledError, MilesError):
            # The function left the sample in an unknown state, so `response_length` may not match the tokens, and
            # nothing of the response can be continued.
            stopped, status = self._turns.stopped(sample), sample.status
            sample.tokens, sample.response_length = prompt, 0
            sample.reset()
            sample.status = SampleStatus.ABORTED if stopped else status
            if not stopped:
                raise
            return [sample]
        finally:
            aborted, recorded = self._engines_abort or self._turns.aborted(sample), self._turns.segments(sample)
            self._turns.forget(sample)
        if result is sample and len(recorded) > 1:
            # The function may have set these fields on the sample that it was given.
            for segment in recorded:
                segment.metadata, segment.remove_sample = dict(sample.metadata), sample.remove_sample
            result = recorded
        segments = self._segments(result, sample, number)
        if any(segment.status is SampleStatus.PENDING for segment in segments):
            raise TrajectoryError(f"sample {sample.index}: the generate function left it unfinished; set its status")
        if any(segment.status is SampleStatus.ABORTED for segment in segments):
            if not aborted:
                # Without an error the prompt would be fed again for ever, because an abort by the run costs no attempt.
                raise TrajectoryError(
                    f"sample {sample.index}: the generate function returned status ABORTED, but the run did not abort "
                    "it; set status FAILED or raise an error"
                )
            if len(segments) > 1:
                # A function is called with one sample, so it cannot continue several segments.
                del segments[1:]
                segments[0].reset()
                segments[0].status = SampleStatus.ABORTED
            return segments
        for segment in segments:
            check_sample(segment, self._limits, None)
            await complete(segment, version, self._engine.score_logprobs)
        return segments

    def _segments(self, result: Any, sample: Sample, number: int) -> list[Sample]:
        """The samples that a function returned for `sample`, without segments in which nothing was sampled."""
        if isinstance(result, Sample):
            result.trajectory = None
            return [result]
        if not isinstance(result, list) or not result or not all(isinstance(one, Sample) for one in result):
            raise UserError(
                f"the generate function returned a {type(result).__name__}: return the sample, or the list of the "
                "samples that are the segments of its trajectory"
            )
        segments = [one for one in result if one.has_trained_tokens or one.status in _UNFINISHED] or result[-1:]
        for segment in segments:
            segment.index, segment.trajectory = sample.index, number
        return segments

    async def _call(self, sample: Sample, sampling: SamplingParams) -> Any:
        params = sampling.body(sampling.max_new_tokens)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._function(self._args, sample, params)
        except TimeoutError:
            raise TrajectoryError(
                f"sample {sample.index}: the generate function took longer than {self._timeout_seconds:g} s "
                "(generate_timeout_seconds)"
            ) from None
        except MilesError:
            raise
        except (Exception, SystemExit) as error:
            # A user's code may raise anything; only this sample failed.
            raise TrajectoryError(f"sample {sample.index}: the generate function raised {error!r}") from error
