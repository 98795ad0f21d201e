"""Everything that one run needs from the outside, as one value: the ports and the user's functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from miles_async.columns.column import NO_LIMITS, SampleLimits
from miles_async.pipeline.evaluate import EvalSet, Scores
from miles_async.pipeline.journal import Journal
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.ports import Clock, DataSource, DeadLetters, Fleet, Generator, Learner, Rewarder, WeightChannel
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.types import Group, Verdict

EvaluationFunction = Callable[[int, RolloutSource], Awaitable[Scores]]
"""`(rollout_id, source) -> scores`: a user's `--eval-function-path`."""
PrepareBatch = Callable[[int, list[Group]], Awaitable[None]]
"""`(rollout_id, groups)`: changes a batch in place before it is trained."""


async def leave_unchanged(rollout_id: int, groups: list[Group]) -> None:
    """A `PrepareBatch` that does nothing."""


def ignore(argument: object) -> None:
    """An `on_rollout` or `restore_posted` that does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFunctions:
    """The functions that replace or extend what the pipeline does by itself."""

    rollout: RolloutFunction | None = None
    """The rollout function. None takes batches directly from the queue, under the fully asynchronous schedule only."""
    prepare: PrepareBatch = leave_unchanged
    """Called once with each batch before it is trained, after stale groups were replaced."""
    evaluate: EvaluationFunction | None = None
    """A user's evaluation function; None evaluates `Ports.eval_sets`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """The outside of one run. `tests/sim/world.py` builds one under virtual time; `workers/rollout.py` the real one."""

    clock: Clock
    journal: Journal
    data: DataSource
    generator: Generator
    rewarder: Rewarder
    learner: Learner
    channel: WeightChannel
    fleet: Fleet
    dead_letters: DeadLetters
    dynamic_filter: Callable[[Group], Verdict]
    """The dynamic sampling filter, called with each finished group."""
    text_of: Callable[[list[int]], str]
    """Returns the text of tokens, including special tokens, for people to read."""
    processors: Callable[[], float]
    """Returns the fraction of the processors' time on this node that was used since the last call."""
    limits: SampleLimits = NO_LIMITS
    """The limits that the model and the learner set to samples."""
    functions: RunFunctions = RunFunctions()
    keeps_groups: bool | None = False
    """Whether the rollout function has a worker that generates between calls, in place of the producer. None means that
    the run finds out."""
    packs_ahead: bool = False
    """Whether batches are trained as they are in the queue, so that the next one may be packed before it is taken."""
    eval_sets: Sequence[EvalSet] = ()
    """Data sets to evaluate on; those without problems are left out."""
    on_rollout: Callable[[int], None] = ignore
    """Called with the rollout id when the collection of a batch begins."""
    adapters: AdapterVersions | None = None
    """The versions that requests name, if the run trains an adapter."""
    restore_posted: Callable[[Sequence[str]], None] = ignore
    """Called with the feed indexes of the posted groups of a restored run that are not trained yet."""
