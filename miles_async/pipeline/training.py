"""Trains one batch: calls the learner, emits the step's events, and handles losses that are not finite."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from statistics import fmean

from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError
from miles_async.events import StepEnded, StepStarted
from miles_async.json_values import finite_number
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.run_state import RunState
from miles_async.ports import DeadLetters, Learner
from miles_async.scheduling.bounds import StalenessGate
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason, Group, Sample, StepReport


@dataclass(eq=False, repr=False)
class Training:
    """Takes the optimizer steps of batches, one batch at a time."""

    run_state: RunState
    lifecycle: GroupLifecycle
    learner: Learner
    dead_letters: DeadLetters
    gate: StalenessGate
    config: RunConfig

    def __post_init__(self) -> None:
        self._not_finite: defaultdict[str, list[list[Group]]] = defaultdict(list)
        """By adapter, its latest consecutive batches whose loss or gradient was not finite."""

    async def step(
        self, rollout_id: int, groups: list[Group], beside: Callable[[], asyncio.Task[None]] | None = None
    ) -> bool:
        """Train one batch, and return whether it changed the weights.

        `beside` starts a task that runs beside the learner, until the step ends.

        If a loss or gradient is not finite, the batch is dropped. Raises FatalError after
        `max_nonfinite_batches` such batches of an adapter in a row, whose groups are then dead-lettered.
        """
        run_state = self.run_state
        adapter = self._adapter_of(groups)
        [version] = (
            run_state.lineages[adapter].newest(run_state.trainer_version) if groups else [run_state.trainer_version]
        )
        ages = [run_state.age_of(group) for group in groups]
        if any(map(self.gate.too_old, ages)):
            raise FatalError(
                f"a group of staleness {max(ages)} reached the step despite --max-weight-staleness; report this bug"
            )
        if self.config.rollout.shuffle_rewards:
            shuffle_rewards(groups, seed=self.config.data.rollout_seed + rollout_id)
        run_state.journal.emit(
            StepStarted(
                time=run_state.clock.time(),
                rollout=rollout_id,
                version=version,
                staleness=ages,
                groups=[group.sequence or 0 for group in groups],
                adapter=adapter,
            )
        )
        # The learner finishes the batch even if this process dies, so the store must hold the batch before.
        await run_state.journal.flush()
        # The task begins only after the learner has taken its batch.
        task = None if beside is None else beside()
        try:
            report = await self.learner.train(rollout_id, groups)
        finally:
            if task is not None:
                task.cancel()
        self.conclude(rollout_id, groups, report)
        return report.finite

    def conclude(self, rollout_id: int, groups: list[Group], report: StepReport) -> None:
        """Record the end of a step. Raises FatalError like `step`."""
        run_state = self.run_state
        # The responses of a group that a rollout function generated are lost with the rollout worker.
        known = [group for group in groups if group.response_tokens]
        samples = [sample for group in known for sample in group]
        trajectories = sum(len(group.trajectories) for group in known)
        run_state.mark_progress()
        run_state.journal.emit(
            StepEnded(
                time=run_state.clock.time(),
                rollout=rollout_id,
                seconds=report.seconds,
                tokens=report.tokens,
                finite=report.finite,
                reward=mean_reward(known),
                response_length=sum(sample.response_length for sample in samples) / max(trajectories, 1),
                metrics=finite_metrics({**report.metrics, **metadata_means(samples)}),
            )
        )
        if report.finite:
            self.lifecycle.advance(groups, GroupState.TRAINED, rollout=rollout_id)
            run_state.changed_adapter = self._adapter_of(groups)
            self._not_finite.pop(self._adapter_of(groups), None)
        else:
            self._drop_nonfinite(rollout_id, groups)

    def _adapter_of(self, groups: Sequence[Group]) -> str:
        """The adapter that a batch trains; the name is empty unless the run trains several."""
        return self.run_state.adapter_of(groups[0]) if groups else ""

    def _drop_nonfinite(self, rollout_id: int, groups: list[Group]) -> None:
        for group in groups:
            self.lifecycle.drop(group, DropReason.NONFINITE)
        adapter = self._adapter_of(groups)
        batches = self._not_finite[adapter]
        batches.append(groups)
        if (times := len(batches)) < self.config.learner.max_nonfinite_batches:
            return
        of = f" of adapter {adapter}" if adapter else ""
        which = f"{times} batches{of} in a row, up to rollout" if times > 1 else f"the batch{of} of rollout"
        sentence = f"loss or gradient was not finite in {which} {rollout_id}"
        for group in chain.from_iterable(batches):
            self.dead_letters.dead_letter(group, DropReason.NONFINITE, sentence)
        raise FatalError(f"{sentence}; their groups are in the dead letters: check their rewards, or lower lr")


def mean_reward(groups: Sequence[Group]) -> float:
    """Mean over the trajectories with a finite reward; 0 if there are none."""
    rewards = [reward for group in groups for reward in group.rewards if isfinite(reward)]
    return sum(rewards) / max(len(rewards), 1)


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without NaN and infinity, which JSON (the format of stored events) cannot represent."""
    return {name: value for name, value in metrics.items() if isfinite(value)}


def metadata_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Means of `raw_reward` and `round_number`, which functions written for slime set in the metadata of samples.

    A mean is left out unless all samples have a number.
    """
    means = {}
    for name in ("raw_reward", "round_number"):
        numbers: list[float] = []
        for sample in samples:
            if (number := finite_number(sample.metadata.get(name))) is None:
                break
            numbers.append(number)
        if samples and len(numbers) == len(samples):
            means[name] = fmean(numbers)
    return means


def shuffle_rewards(groups: Sequence[Group], seed: int) -> None:
    """Permute the rewards among all trajectories of a batch, in place: a control experiment with nothing to learn.

    All segments of a trajectory get the reward of another trajectory's last segment.
    """
    trajectories = [segments for group in groups for segments in group.trajectories]
    rewards = [segments[-1].reward for segments in trajectories]
    random.Random(seed).shuffle(rewards)
    for segments, reward in zip(trajectories, rewards, strict=True):
        for segment in segments:
            segment.reward = reward
