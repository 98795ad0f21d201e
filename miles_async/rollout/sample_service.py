"""The pipeline's generator and rewarder for users' functions, which may call them from any thread and event loop.

A run passes a `SampleService` to users' functions as `args.sample_service`. Samples get log-probabilities and weight
versions, and requests need permits, as in the pipeline itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.errors import EngineLostError, InfrastructureError, RouterLostError, TrajectoryError
from miles_async.pipeline.grading import score
from miles_async.ports import Rewarder
from miles_async.types import Group, Sample, SampleStatus

T = TypeVar("T")
ROUTER_LOST_PAUSE_SECONDS = 1.0
"""Time between two requests while no engine can be reached."""


class SampleGenerator(Protocol):
    """A `ports.Generator` that takes sampling parameters."""

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None: ...

    async def abort(self, group: Group | None = None) -> None: ...


class SampleService:
    """Generates and scores groups in the pipeline's event loop. Create it inside that loop.

    Example, in the thread of a worker::

        group = Group.of(data_source.get_samples(1)[0])
        await args.sample_service.generate(group, args.sample_service.sampling_params)
        await args.sample_service.score(group)
    """

    def __init__(self, sampling: SamplingParams, *, max_attempts: int) -> None:
        """`sampling` are the parameters of training samples. Nothing can be generated or scored before `connect`.

        Samples whose reward fails for reasons of infrastructure are scored up to `max_attempts` times.
        """
        self._loop = asyncio.get_running_loop()
        self._sampling = sampling
        self._max_attempts = max_attempts
        self._generator: SampleGenerator
        self._evaluator: SampleGenerator
        self._rewarder: Rewarder
        self.states: dict[type, Any] = {}
        """One object per class that keeps state for the whole run, such as slime's `GenerateState`."""

    def connect(self, *, generator: SampleGenerator, evaluator: SampleGenerator, rewarder: Rewarder) -> None:
        """Set the generators, for training and for evaluations, and the rewarder.

        They are created later than the service, because they call users' functions, which receive the service.
        """
        self._generator, self._evaluator, self._rewarder = generator, evaluator, rewarder

    @property
    def sampling_params(self) -> dict[str, Any]:
        """SGLang's dictionary of the sampling parameters of training samples."""
        return self._sampling.body(self._sampling.max_new_tokens)

    async def generate(self, group: Group, sampling_params: dict[str, Any], *, evaluation: bool = False) -> None:
        """Finish every unfinished sample of the group, in place.

        Aborted samples have status ABORTED. If the generation fails, the samples have status FAILED and the error in
        `metadata["error"]`; if only their infrastructure failed, the other samples are complete. Waits while no engine
        can be reached.
        """
        generator = self._evaluator if evaluation else self._generator
        work = _when_reachable(generator, group, SamplingParams.of(sampling_params))
        await self.in_pipeline(_marking_failures(group, work))

    async def score(self, group: Group) -> None:
        """Set the rewards of all samples of the group. If that fails, the samples have status FAILED, as above."""
        await self.in_pipeline(_marking_failures(group, self._score(group)))

    async def rewards_of(self, samples: list[Sample]) -> list[Any]:
        """Return the rewards of the samples, which stay as they are. Raises TrajectoryError if the reward fails."""
        copies = Group(replace(sample, reward=None, trajectory=None) for sample in samples)
        await self.in_pipeline(self._score(copies))
        return [sample.reward for sample in copies]

    async def abort(self) -> None:
        """Abort all requests of training samples. Returns when they have ended."""
        await self.in_pipeline(self._generator.abort())

    async def in_pipeline(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the pipeline's event loop, from any loop."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _score(self, group: Group) -> None:
        """Raises InfrastructureError for the samples that still have no reward after the last attempt."""
        error = await score(group, self._rewarder, sleep=asyncio.sleep, max_attempts=self._max_attempts)
        if error is not None:
            raise error


async def _when_reachable(generator: SampleGenerator, group: Group, sampling: SamplingParams) -> None:
    while True:
        try:
            return await generator.generate(group, sampling)
        except RouterLostError:
            await asyncio.sleep(ROUTER_LOST_PAUSE_SECONDS)


async def _marking_failures(group: Group, work: Awaitable[None]) -> None:
    """Await work on a group. If it fails, samples without a reward get the status FAILED."""
    try:
        await work
    except (TrajectoryError, EngineLostError) as error:
        failed = error.samples if isinstance(error, InfrastructureError) else group
        for sample in failed:
            if sample.reward is None:
                sample.status, sample.metadata["error"] = SampleStatus.FAILED, str(error)
