"""`--custom-generate-function-path`: each sample through the user's own function (seed `slime-walkthrough`).

    async def generate(args, sample, sampling_params) -> Sample

`sampling_params` is SGLang's dictionary. `args` has every setting, the router's address, and two ways to sample that
keep tokens, log-probabilities and weight versions by themselves: `args.turns` (`adapters/sglang/multi_turn.py`), one
turn at a time, and `args.agents` (`adapters/agents/endpoint.py`), an OpenAI-compatible address for an agent. A function
that talks to the router itself fills the sample itself; a sample it returns without spans counts as old as the version
that was live when its generation began, and log-probabilities that it did not keep are asked of the engines afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.config.user_functions import load_function
from miles_async.errors import MilesError, TrajectoryError, UserError
from miles_async.rollout.contract import Arguments, check_lengths, complete
from miles_async.types import Group, Sample, SampleStatus

GenerateFunction = Callable[[Any, Sample, dict[str, Any]], Coroutine[Any, Any, Sample]]
STOP_PATIENCE_SECONDS = 5.0
"""How long a function may go on after an abort (a tool that runs, say) before it is cancelled."""


def load_generate_function(path: str) -> GenerateFunction:
    """Raises UserError when it cannot be imported or is not an `async def`."""
    function = load_function(path, setting="custom_generate_function_path")
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"custom_generate_function_path {path!r} is no async function: write it with async def")
    return function


class FunctionGenerator:
    """Implements `ports.Generator` with a generate function; `engine` is what `turns` draws from."""

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
    ) -> None:
        self._function = function
        self._args = args
        self._sampling = sampling
        self._engine = engine
        self._turns = turns
        self._live_version = live_version
        self._timeout_seconds = timeout_seconds
        self._under_way: dict[int, tuple[Group, list[asyncio.Task[None]]]] = {}
        """By identity of the group."""

    @property
    def in_flight(self) -> int:
        return self._engine.in_flight

    @property
    def busy_seconds(self) -> float:
        return self._engine.busy_seconds

    async def generate(self, group: Group) -> None:
        """Raises TrajectoryError when the function raises or takes too long, UserError when it breaks the contract."""
        self._engine.tokenize(group)
        unfinished = [i for i, s in enumerate(group) if s.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        tasks = [asyncio.create_task(self._one(group, place)) for place in unfinished]
        self._under_way[id(group)] = group, tasks
        try:
            # All are awaited before one failure is told, so that nothing writes into the group afterwards.
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            del self._under_way[id(group)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def abort(self, group: Group | None = None) -> None:
        """Requests end at once; a function that does not return soon after is cancelled and its sample reset."""
        if group is None:
            stopped = list(self._under_way.values())
        else:
            stopped = [under_way] if (under_way := self._under_way.get(id(group))) else []
        tasks = [task for _, tasks in stopped for task in tasks]
        samples = [sample for members, _ in stopped for sample in members]
        await self._turns.stop(samples, everything=group is None)
        try:
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=STOP_PATIENCE_SECONDS)
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late)
        finally:
            self._turns.release(samples)

    async def _one(self, group: Group, place: int) -> None:
        sample, born = group[place], self._live_version()
        prompt = sample.tokens[: sample.prompt_length]
        try:
            result = await self._call(sample)
        except (asyncio.CancelledError, MilesError):
            # It ended in whatever state: nothing of it can be continued, or told from the prompt by its length.
            aborted, status = self._turns.stopped(sample), sample.status
            sample.tokens, sample.response_length = prompt, 0
            sample.reset()
            sample.status = SampleStatus.ABORTED if aborted else status
            if not aborted:
                raise
            return
        if not isinstance(result, Sample):
            raise UserError(f"the generate function returned a {type(result).__name__}: return the sample")
        if result.status is SampleStatus.PENDING:
            raise TrajectoryError(f"sample {sample.index}: the generate function left it unfinished; set its status")
        if result.status is not SampleStatus.ABORTED:
            await complete(result, born, self._engine.score_logprobs)
            check_lengths(result, "the generate function returned")
        group[place] = result

    async def _call(self, sample: Sample) -> Any:
        params = self._sampling.body(self._sampling.max_new_tokens)
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
            # The user's code may raise anything; it is this sample that failed.
            raise TrajectoryError(f"sample {sample.index}: the generate function raised {error!r}") from error
