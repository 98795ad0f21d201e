"""Calls hooks of the user with each finished sample before its reward (`--rollout-sample-hook-path`), as in slime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.columns.column import SampleLimits
from miles_async.config.user_functions import load_function, with_keywords
from miles_async.errors import EngineLostError, InfrastructureError, TrajectoryError, is_infrastructure
from miles_async.identity import identity_set
from miles_async.json_values import shown, shown_type
from miles_async.rewards.threads import Threads
from miles_async.rollout.contract import Arguments
from miles_async.rollout.generate import FunctionGenerator
from miles_async.sample_schema import accept_values, check_columns, keep_origins
from miles_async.time_limit import TimeLimit
from miles_async.types import Group, Sample
from miles_async.user_code import USER_CODE_ERRORS, call_plain_or_async, is_cancellation

SETTING = "rollout_sample_hook_path"


class HookedGenerator:
    """Implements `ports.Generator`: generates with another generator, and then calls the hooks."""

    def __init__(
        self,
        generator: SGLangGenerator | FunctionGenerator,
        paths: Sequence[str],
        args: Arguments,
        limits: SampleLimits,
        *,
        timeout_seconds: float,
        evaluation: bool,
    ) -> None:
        """`limits` are those of the samples, and `timeout_seconds` is for each call of a hook.

        Raises UserError if a hook cannot be imported.
        """
        self._generator = generator
        self.requests = generator.requests
        self._args = args
        self._limits = limits
        self._timeout_seconds = timeout_seconds
        self._threads = Threads()
        # A sample belongs to no batch yet.
        keywords = {"rollout_id": None, "evaluation": evaluation}
        self._hooks = [(path, with_keywords(load_function(path, setting=SETTING), keywords)) for path in paths]

    async def abort(self, group: Group | None = None) -> None:
        """See `ports.Generator.abort`."""
        await self._generator.abort(group)

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None:
        """Generate the unfinished samples of a group, and call the hooks with those that this call finishes.

        Raises what the generator raises, and TrajectoryError that names the sample whose hook failed.
        """
        finished_before = identity_set(sample for sample in group if sample.finished)
        try:
            await self._generator.generate(group, sampling)
        except (TrajectoryError, EngineLostError):
            # The next attempt keeps the samples that are finished, so it does not generate them.
            await self._call_hooks(group, finished_before)
            raise
        await self._call_hooks(group, finished_before)

    async def _call_hooks(self, group: Group, finished_before: Container[Sample]) -> None:
        new = [i for i, sample in enumerate(group) if sample.finished and sample not in finished_before]
        results = await asyncio.gather(*(self._hooked(group[i]) for i in new), return_exceptions=True)
        for i, result in zip(new, results, strict=True):
            if isinstance(result, Sample):
                group[i] = result
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _hooked(self, sample: Sample) -> Sample:
        hooked, given = sample, sample.prompt_dict()
        with keep_origins([sample]):
            for path, hook in self._hooks:
                returned = await self._call(path, hook, hooked, sample)
                if returned is not None and not isinstance(returned, Sample):
                    sentence = f"{SETTING} {path} returned {shown_type(returned)}: return a sample or nothing"
                    raise TrajectoryError(f"sample {sample.index}: {sentence}", [sample])
                hooked = hooked if returned is None else returned
        hooked.index, hooked.trajectory = sample.index, sample.trajectory
        accept_values(hooked, keeps_objects=True)
        hooked.inherit(given)
        check_columns(hooked, self._limits, None)
        return hooked

    async def _call(self, path: str, hook: Callable[..., Any], hooked: Sample, sample: Sample) -> Any:
        limit = TimeLimit(self._timeout_seconds)
        try:
            # The threads of `asyncio` would keep the process alive if a plain hook never returned.
            return await limit.run(call_plain_or_async(hook, self._args, hooked, in_thread=self._threads.run))
        except USER_CODE_ERRORS as error:
            if is_cancellation(error):
                raise
            with suppress(TrajectoryError):
                accept_values(sample)
            late = f"took longer than {self._timeout_seconds:g} s (generate_timeout_seconds)"
            cause = late if limit.expired() else f"raised {shown(error)}"
            kind = InfrastructureError if is_infrastructure(error) else TrajectoryError
            raise kind(f"sample {sample.index}: {SETTING} {path} {cause}", [sample]) from error
