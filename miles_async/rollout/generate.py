"""Generates each sample through a user's function (`--custom-generate-function-path`), as in slime.

    async def generate(args, sample, sampling_params) -> Sample | list[Sample]

A list holds the segments of one trajectory, in the order in which they ended. New samples inherit prompt, label and
metadata from the sample that the function was given, unless they set them.
`sampling_params` is SGLang's dictionary. `args` has every setting, the router's address, and two helpers that record
tokens, log-probabilities and weight versions: `args.turns` (`adapters/sglang/multi_turn.py`) samples one chat turn, and
`args.agents` (`adapters/agents/endpoint.py`) provides an address for an agent that speaks the protocol of OpenAI or
Anthropic. A function that sends requests to the router itself must fill the sample itself. Without spans, its samples
get the weight version that was live when their generation began. Missing log-probabilities are computed by the engines
afterwards, which needs `rollout_temperature` 1.

A sample that fails for reasons of infrastructure, such as a tool server that is down, is generated again at once, while
the other samples of its group go on. The function reports such a failure with an `InfrastructureError`, an error of a
connection (`errors.is_infrastructure`) or a sample of status FAILED without a reward. Any other error may depend on the
response, so the sample is not left out: its group ends its attempt, and the next attempt generates only the samples
that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from typing import Any

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator, sampling_seed
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.columns.column import NO_LIMITS, SampleLimits
from miles_async.errors import (
    EngineLostError,
    InfrastructureError,
    MilesError,
    RouterLostError,
    TemplateError,
    TrajectoryError,
    UserError,
    is_infrastructure,
)
from miles_async.identity import IdentityMap
from miles_async.json_values import shown, shown_type
from miles_async.rollout.contract import Arguments, complete
from miles_async.sample_schema import accept_values, check_columns
from miles_async.time_limit import TimeLimit
from miles_async.types import DropReason, Group, Sample, SampleStatus
from miles_async.user_code import USER_CODE_ERRORS, is_cancellation

GenerateFunction = Callable[[Any, Sample, dict[str, Any]], Coroutine[Any, Any, Sample | list[Sample]]]
_UNFINISHED = (SampleStatus.PENDING, SampleStatus.ABORTED)
ABORT_GRACE_SECONDS = 5.0
"""Time that a function has to return after an abort (a tool may be running) before it is cancelled."""
FIRST_PAUSE_SECONDS = 1.0
"""Pause before a failed sample is generated again; it doubles with each failure of the sample."""
OnDiscarded = Callable[[Group, Sample, DropReason, int, str], None]
"""`(group, sample, reason, tokens, error)`: called when the `tokens` response tokens of a sample were discarded."""


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
        max_attempts: int,
        engines_abort: bool = False,
        seed: int | None = None,
        limits: SampleLimits = NO_LIMITS,
        on_discarded: OnDiscarded | None = None,
    ) -> None:
        """`timeout_seconds` is the time that a sample has for all of its `max_attempts` attempts. The time in which it
        waits in line, for a place at the engines or at a reward, does not count.

        `engines_abort` means that engines abort all requests when weights are published. A function that sends its own
        requests may then return ABORTED because of an engine. `seed` is as in `sampling_seed`. `on_discarded` is called
        for each response that is discarded while the other samples of the group go on.
        """
        self._function = function
        self._args = args
        self._sampling = sampling
        self._engine = engine
        self.requests = engine.requests
        self._turns = turns
        self._live_version = live_version
        self._timeout_seconds = timeout_seconds
        self._max_attempts = max_attempts
        self._on_discarded = on_discarded
        self._engines_abort = engines_abort
        self._seed = seed
        self._limits = limits
        self._running: IdentityMap[Group, tuple[list[Sample], list[asyncio.Task[list[Sample]]]]] = IdentityMap()
        """The samples of each group that are being generated, and their tasks."""

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None:
        """Generate the unfinished samples of a group, concurrently; `sampling` overrides the default parameters.

        Raises TrajectoryError if the function raises or returns an invalid sample, InfrastructureError if samples
        failed only for reasons of infrastructure, in their last attempt or because their time ended. Failed samples
        have status FAILED, and the error names them.
        """
        # A function may show the model other messages than those of the row. If it samples those of the row, the error
        # is raised again.
        with suppress(TemplateError, UserError):
            self._engine.tokenize(group)
        trajectories = group.trajectories
        unfinished = [i for i, [first, *_] in enumerate(trajectories) if first.status in _UNFINISHED]
        chosen = sampling or self._sampling
        roots = [trajectories[i][0] for i in unfinished]
        # An abort marks the samples only until this call ends, so that it cannot stop a later attempt at the group.
        with self._turns.generating(roots):
            tasks = [
                asyncio.create_task(self._generate_sample(group, root, i, chosen))
                for i, root in zip(unfinished, roots, strict=True)
            ]
            self._running[group] = roots, tasks
            try:
                # Every task is awaited before a failure is raised, so that none changes the group afterwards.
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                for task in tasks:
                    task.cancel()
                del self._running[group]
        for i, outcome in zip(unfinished, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                trajectories[i] = outcome
        group[:] = chain.from_iterable(trajectories)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        failed = [sample for sample in group if sample.status is SampleStatus.FAILED and sample.reward is None]
        for error in errors:
            if not isinstance(error, InfrastructureError):
                if isinstance(error, TrajectoryError):
                    error.samples = failed
                raise error
        if errors and not any(sample.status is SampleStatus.ABORTED for sample in group):
            raise InfrastructureError(str(errors[0]), failed)

    async def abort(self, group: Group | None = None) -> None:
        """Abort requests at once. A function that does not return in time is cancelled, and its sample is reset."""
        if group is None:
            stopped = list(self._running.values())
        else:
            stopped = [running] if (running := self._running.get(group)) else []
        tasks = [task for _, tasks in stopped for task in tasks]
        samples = [sample for members, _ in stopped for sample in members]
        # Requests end first: most functions return as soon as their request does. The functions whose requests an
        # engine does not end are cancelled.
        with suppress(EngineLostError):
            await self._turns.stop(samples, everything=group is None)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=ABORT_GRACE_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _generate_sample(
        self, group: Group, sample: Sample, number: int, sampling: SamplingParams
    ) -> list[Sample]:
        """Generate the trajectory with this number in its group, and return its segments.

        It is generated again while its infrastructure fails, within its attempts and its time.
        """
        prompt = sample.prompt_dict()
        failures = 0

        def discard(failure: BaseException) -> None:
            # The function left the sample in an unknown state, so nothing of the response can be continued.
            _accept(sample)
            tokens = max(0, len(sample.tokens) - len(prompt["prompt_tokens"]))
            sample.restore_prompt(prompt)
            reason = _reason(failure, stopped=self._turns.stopped(sample))
            if self._on_discarded is not None:
                self._on_discarded(group, sample, reason, tokens, str(failure))

        try:
            async with TimeLimit(self._timeout_seconds):
                while True:
                    try:
                        return await self._attempt(sample, prompt, number, sampling)
                    except InfrastructureError as error:
                        failures += 1
                        if failures == self._max_attempts:
                            raise
                        discard(error)
                        failure: BaseException = error
                    await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (failures - 1))
                    if self._turns.stopped(sample):
                        raise failure
        except TimeoutError:
            failure = InfrastructureError(
                f"sample {sample.index}: the generate function took longer than {self._timeout_seconds:g} s "
                "(generate_timeout_seconds)"
            )
        except (asyncio.CancelledError, MilesError) as error:
            failure = error
        stopped = self._turns.stopped(sample)
        discard(failure)
        if stopped and not failures:
            sample.status = SampleStatus.ABORTED
            return [sample]
        if stopped:
            # The attempts of a sample that failed before end with the abort.
            failure = InfrastructureError(f"sample {sample.index}: the run aborted it after it had failed: {failure}")
        if isinstance(failure, TrajectoryError):
            sample.status, sample.metadata["error"] = SampleStatus.FAILED, str(failure)
        raise failure

    async def _attempt(
        self, sample: Sample, given: Mapping[str, Any], number: int, sampling: SamplingParams
    ) -> list[Sample]:
        """Call the function once. `given` is the sample's `prompt_dict`. Returns finished or aborted segments."""
        version = self._live_version()
        prompt = sample.prompt
        # Agents append their turns to the list of messages, which all samples and attempts of a prompt share.
        sample.prompt = copied = deepcopy(prompt)
        sample.use_lists()
        try:
            result = await self._call(sample, sampling)
        except BaseException:
            for segment in (recorded := self._turns.segments(sample)):
                _accept(segment)
            _join_responses(sample, recorded)
            raise
        finally:
            aborted, recorded = self._engines_abort or self._turns.aborted(sample), self._turns.segments(sample)
            self._turns.forget(sample)
            for segment in (sample, *recorded):
                if segment.prompt is copied:
                    segment.prompt = prompt
        self._accept_result(result, sample)
        if result is sample and len(recorded) > 1:
            # The function may have set these fields on the sample that it was given.
            for segment in recorded:
                segment.metadata, segment.remove_sample = dict(sample.metadata), sample.remove_sample
            result = recorded
        segments = self._segments(result, sample, number)
        for segment in segments:
            segment.inherit(given)
        if any(segment.status is SampleStatus.PENDING for segment in segments):
            raise TrajectoryError(f"sample {sample.index}: the generate function left it unfinished; set its status")
        if any(segment.status is SampleStatus.ABORTED for segment in segments):
            if not aborted:
                # Without an error the prompt would be requeued for ever, because an abort by the run costs no attempt.
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
            if segment.status is SampleStatus.FAILED and segment.reward is None:
                _join_responses(sample, segments)
                error = segment.metadata.get("error", "the generate function returned status FAILED without a reward")
                raise InfrastructureError(f"sample {sample.index}: {error}")
            check_columns(segment, self._limits, None)
            await complete(segment, version, self._engine.score_logprobs)
        return segments

    def _accept_result(self, result: Any, sample: Sample) -> None:
        """Accept the values of the samples that a function returned for `sample`.

        Raises TrajectoryError for another result, and for a value that is refused.
        """
        segments = [result] if isinstance(result, Sample) else result
        if not isinstance(segments, list) or not segments or not all(isinstance(one, Sample) for one in segments):
            raise TrajectoryError(
                f"sample {sample.index}: the generate function returned {shown_type(result)}: return the sample, or "
                "the list of the samples that are the segments of its trajectory"
            )
        for segment in segments:
            accept_values(segment, keeps_objects=True)

    def _segments(self, result: Sample | list[Sample], sample: Sample, number: int) -> list[Sample]:
        """The samples that a function returned for `sample`, without segments in which nothing was sampled."""
        if isinstance(result, Sample):
            result.index, result.trajectory = sample.index, None
            return [result]
        segments = [one for one in result if one.has_trained_tokens or one.status in _UNFINISHED] or result[-1:]
        for segment in segments:
            segment.index, segment.trajectory = sample.index, number
        return segments

    async def _call(self, sample: Sample, sampling: SamplingParams) -> Any:
        try:
            body = sampling_seed(self._seed, sample.index) | sampling.body(sampling.max_new_tokens)
            return await self._function(self._args, sample, body)
        except MilesError:
            raise
        except USER_CODE_ERRORS as error:
            if is_cancellation(error):
                raise
            # A user's code may raise anything; only this sample failed.
            kind = InfrastructureError if is_infrastructure(error) else TrajectoryError
            raise kind(f"sample {sample.index}: the generate function raised {shown(error)}") from error


def _accept(sample: Sample) -> None:
    """Make the values of a failed sample plain, whatever a function has set."""
    with suppress(TrajectoryError):
        accept_values(sample)


def _join_responses(sample: Sample, segments: Sequence[Sample]) -> None:
    """Append the responses of all segments to a failed sample, so that all of them are counted as discarded."""
    responses = [one.tokens[one.prompt_length :] for one in segments]
    sample.tokens = [*sample.tokens[: sample.prompt_length], *chain.from_iterable(responses)]


def _reason(failure: BaseException, *, stopped: bool) -> DropReason:
    """Why a response was discarded."""
    if stopped:
        return DropReason.ABORTED
    if isinstance(failure, EngineLostError):
        return DropReason.ROUTER_LOST if isinstance(failure, RouterLostError) else DropReason.ENGINE_LOST
    return DropReason.FAILED
