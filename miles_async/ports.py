"""The interfaces between the pipeline and the outside world, one Protocol each.

`pipeline/` uses these interfaces and nothing else. `adapters/` implements them for Ray, SGLang, Megatron and Mooncake;
`tests/sim/` implements them under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miles_async.types import DropReason, EngineLoad, Group, StepReport, WriteOutcome


class Clock(Protocol):
    """The time, in seconds."""

    def now(self) -> float:
        """Wall-clock seconds (`time.time`), so that events of several processes can be compared."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


class DataSource(Protocol):
    """Prompts in feed order, recycled ones first (slime's `RolloutDataSourceWithBuffer`)."""

    def get_samples(self, num_samples: int) -> list[Group]:
        """Take up to `num_samples` groups of pending samples; fewer are returned only if the data is exhausted."""
        ...

    def add_samples(self, samples: Sequence[Group]) -> None:
        """Return groups to the front of the feed: recycled ones after a reset, partial ones with their tokens."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, ready for JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        ...


class Generator(Protocol):
    """Generates the responses of a group, in place."""

    async def generate(self, group: Group) -> None:
        """Set tokens, log-probabilities, spans and status of every sample.

        Raises TrajectoryError if the group cannot be generated (a 4xx answer, a prompt that is too long), and
        EngineLostError if its engine was lost and another attempt may succeed.
        """
        ...

    async def abort(self, group: Group | None = None) -> None:
        """Abort the generation of one group, or of every group if `group` is None.

        The pending `generate` calls return, with status ABORTED and the tokens so far.
        """
        ...

    @property
    def in_flight(self) -> int:
        """Number of requests at the engines now."""
        ...

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start in which the engines had at least one request."""
        ...


class Rewarder(Protocol):
    """Scores a finished group, in place."""

    async def score(self, group: Group) -> None:
        """Set `reward` on every sample. Raises TrajectoryError if a reward cannot be computed."""
        ...


class DeadLetters(Protocol):
    """Keeps the prompts that failed in every attempt, so that no prompt is lost silently."""

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        """Keep a group with the reason for its last drop and the error message."""
        ...


class Learner(Protocol):
    """The processes that train, all ranks together."""

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        """Take the optimizer steps of one batch. Raises FatalError if a rank is lost."""
        ...

    async def offload(self) -> None:
        """Free the memory of devices that are shared with engines, until `onload`."""
        ...

    async def onload(self) -> None:
        """Move model and optimizer back to the devices."""
        ...

    async def copy_state(self, rollout_id: int) -> None:
        """Copy the state of a checkpoint. Called between two `train` calls; the next may begin when this returns."""
        ...

    async def write_state(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        """Write the copied state and `progress` as a checkpoint, atomically.

        Raises FatalError if the checkpoint cannot be written; the previous checkpoint is then intact.
        """
        ...


class WeightChannel(Protocol):
    """Moves weights from the learner to the engines. Two phases, so that only the write lies inside the pause."""

    @property
    def name(self) -> str:
        """The way that is taken first, such as `p2p`."""
        ...

    async def stage(self, version: int) -> None:
        """Copy the learner's present weights aside as `version`, in the layout the engines need.

        Called between optimizer steps; generation goes on. The next `train` may begin as soon as this returns.
        """
        ...

    async def write(self, version: int, engines: Sequence[str]) -> list[WriteOutcome]:
        """Write the staged version to each engine and verify it; one outcome per engine, none raised."""
        ...

    async def meet(self, engines: Sequence[str]) -> None:
        """These are the engines from now on; one that was started since is met anew. What is staged stays staged.

        Raises EngineLostError when one of them cannot be reached this way.
        """
        ...

    async def fall_back(self, engine: str) -> str | None:
        """Write to this engine by the next way from now on; its name, or None when there is no other left."""
        ...


class Fleet(Protocol):
    """The engines and the router in front of them."""

    def routed(self) -> Sequence[str]:
        """The names of the engines that requests may reach now."""
        ...

    def members(self) -> Sequence[str]:
        """The names of all engines that belong to the run, those that are being replaced among them."""
        ...

    async def loads(self) -> Sequence[EngineLoad]:
        """How full the routed engines are; one that does not answer is left out."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop decoding on every routed engine (`retract`, `in_place` or `abort`); returns when all have stopped."""
        ...

    async def commit(self, engine: str, version: int) -> None:
        """Drop what was cached under older weights and announce `version` on a paused, freshly written engine.

        Raises EngineLostError when the engine does not then report that version.
        """
        ...

    async def resume(self) -> None:
        """Let every routed engine decode again."""
        ...

    async def fence(self, engine: str, reason: str) -> None:
        """Take an engine out of the router: nothing reaches it until it holds the current version."""
        ...

    async def admit(self, engine: str) -> None:
        """Let requests reach an engine that holds the current version.

        Raises EngineLostError when the router refuses it.
        """
        ...

    async def dismiss(self, engine: str) -> None:
        """Remove an engine for good: no requests, and it is not started anew."""
        ...

    async def check(self, engine: str) -> None:
        """Return once the engine has drawn a token since the call, for whoever it was; while paused, a sign of life.

        Raises EngineLostError when it is gone, or too slow.
        """
        ...

    async def restart(self, engine: str) -> None:
        """End what is left of the engine and start it anew; nothing reaches it before `admit`.

        Raises EngineLostError when it does not come up.
        """
        ...

    async def offload(self) -> None:
        """Leave the devices' memory to the learner that shares them, until `onload`; no request may be under way."""
        ...

    async def onload(self) -> None:
        """Take the memory back; weights and cache are then to be written anew."""
        ...

    async def check_router(self) -> None:
        """Bring a router that is gone back, and its list of engines in order.

        Raises EngineLostError when that cannot be done now.
        """
        ...
