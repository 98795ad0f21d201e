"""The interfaces between the pipeline and the outside world, one Protocol each.

`pipeline/` uses these interfaces and nothing else. `adapters/` implements them for Ray, SGLang, Megatron and Mooncake;
`tests/sim/` implements them under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from miles_async.types import DropReason, EngineLoad, Group, LearnerProgress, Sample, SendOutcome, StepReport

if TYPE_CHECKING:
    # The fault points are the methods of these interfaces. `--help` lists them, and needs no events.
    from miles_async.scheduling.lineage import Lineage
    from miles_async.stored_run import Changes, StoredRun


class Clock(Protocol):
    """The time of day, a clock for durations, and a sleep; all in seconds."""

    def time(self) -> float:
        """Wall-clock seconds (`time.time`), for the time stamps of events only: the system may set this clock."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps (`time.monotonic`), for durations, deadlines and ages in this process.

        It stops while the machine is suspended.
        """
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


class DataSource(Protocol):
    """Prompts in feed order, recycled ones first (slime's `RolloutDataSourceWithBuffer`).

    Its position is stored apart from the groups that were returned to it.
    """

    def get_samples(self, num_samples: int, adapter: str = "") -> list[Group]:
        """Take up to `num_samples` groups of pending samples; fewer are returned only if the data is exhausted.

        They are for `adapter` if the run trains several.
        """
        ...

    def add_samples(self, samples: Sequence[Group]) -> None:
        """Return groups to the front of the feed: recycled ones after a reset, partial ones with their tokens.

        A group may be a plain list of samples. Samples that a group left out return to the group. Raises UserError for
        a group of another size than new groups have; no group is returned then.
        """
        ...

    @property
    def metadata(self) -> dict[str, Any]:
        """Values that a rollout function keeps, which are part of the position. A caller may change it."""
        ...

    def metadata_changed(self) -> None:
        """Read `metadata` again for the next position: a function may keep the dictionary and change it later."""
        ...

    def position(self) -> dict[str, Any]:
        """The position in the data, ready for JSON."""
        ...

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue from a `position`, without returned groups."""
        ...

    def returned(self) -> Sequence[Group]:
        """The groups that were returned and not taken again yet, in the state in which they were returned."""
        ...


class Requests(Protocol):
    """Counts the requests of a generator."""

    @property
    def in_flight(self) -> int:
        """Number of requests at the engines now."""
        ...

    @property
    def in_line(self) -> int:
        """Number of requests that wait for a free place at the engines."""
        ...

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start in which the engines had at least one request."""
        ...


class Generator(Protocol):
    """Generates the responses of a group, in place."""

    async def generate(self, group: Group) -> None:
        """Set tokens, log-probabilities, spans and status of every sample that is not finished.

        Raises TrajectoryError if the group cannot be generated (a 4xx answer, a prompt that is too long),
        EngineLostError if its engine was lost and another attempt may succeed, and RouterLostError if the requests
        reached no engine.
        """
        ...

    async def abort(self, group: Group | None = None) -> None:
        """Abort the generation of one group, or of every group if `group` is None.

        The pending `generate` calls return, with status ABORTED and the tokens so far. Nothing happens if the group is
        not being generated.
        """
        ...

    @property
    def requests(self) -> Requests:
        """The requests that the generator has sent or will send."""
        ...


class Rewarder(Protocol):
    """Scores a finished group, in place."""

    async def score(self, group: Group) -> None:
        """Set `reward` on every sample without one. Raises TrajectoryError if a reward cannot be computed."""
        ...


class DeadLetters(Protocol):
    """Keeps the prompts that failed in every attempt, so that no prompt is lost silently."""

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        """Keep a group with the reason for its last drop and the error message."""
        ...


class RunStore(Protocol):
    """Keeps the state of a run where it survives the rollout worker."""

    async def write(self, changes: Changes) -> None:
        """Store one batch in one transaction. Raises StoreError if that fails; nothing of the batch is stored then.

        What is both stored and removed in one batch is removed. Values return as JSON has them.
        """
        ...

    async def read(self) -> StoredRun | None:
        """Return the stored state; None if nothing has been stored. Raises FatalError if the store is damaged."""
        ...

    async def load(self, sequence: int) -> list[Sample]:
        """Return the samples of a finished group that is stored. Raises FatalError if the store is damaged."""
        ...

    async def load_posted(self, feed_index: str) -> list[Sample]:
        """Return the samples of a posted group that is stored. Raises FatalError if the store is damaged."""
        ...


class Learner(Protocol):
    """The processes that train, all ranks together."""

    def pack(self, groups: Sequence[Group]) -> None:
        """Begin to pack a batch while another one is trained. The next `train` uses it if it gets these groups."""
        ...

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        """Take the optimizer steps of one batch. Raises FatalError if a rank is lost."""
        ...

    async def progress(self) -> LearnerProgress:
        """Return what was trained and staged, after earlier calls to the learner have finished.

        Raises FatalError if a rank is lost. If the ranks differ because a call failed on some of them, this ends all of
        them first.
        """
        ...

    async def offload(self) -> None:
        """Free the memory of devices that are shared with engines, until `onload`."""
        ...

    async def onload(self) -> None:
        """Move model and optimizer back to the devices."""
        ...

    async def work_seconds(self) -> float:
        """Return the seconds that the ranks have worked so far, added up: the sum grows while a rank works.

        It does not grow while all ranks wait for a call or for each other. Does not return while a rank is frozen.
        Raises FatalError if a rank is lost.
        """
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
    """Moves weights from the learner to the engines: connect once, then stage and send each version.

    In a run that trains an adapter, a version is an adapter that engines hold beside older ones: `send` loads it, and
    `drop` drops those that requests may not name any more.

    Staging and sending are two phases so that only sending has to happen while the engines are paused.
    """

    async def connect(self, engines: Sequence[str]) -> None:
        """Connect to exactly these engines; all others are disconnected. The staged version stays staged.

        An engine that was restarted is connected at its new address. Raises EngineLostError if an engine does not
        answer, is out of reach of its transport or holds its weights in another layout than the others.
        """
        ...

    async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None:
        """Copy the learner's current weights into the staging buffers as `version`, in the layout of the engines.

        They are those of `adapter` if the run trains several. `lineage` has the versions of its weights; None leaves it
        as it is.

        Called between optimizer steps while engines generate. The next `train` may begin as soon as this returns.
        """
        ...

    async def send(self, version: int, engine: str) -> SendOutcome:
        """Send the staged version to an engine and verify it there. A failure is in the outcome and is not raised."""
        ...

    async def compare(self, engine: str) -> str | None:
        """Compare the log-probabilities that the engine and the learner compute with the staged version, if necessary.

        Returns a sentence if they differ too much. Raises EngineLostError if the engine does not answer.
        """
        ...

    async def drop(self, engine: str) -> None:
        """Let an engine drop the adapters that no request may name, now that the staged version is live.

        `send` drops those that are left. Raises EngineLostError if the engine does not answer.
        """
        ...

    async def fall_back(self, engine: str) -> str | None:
        """Use the next transport for this engine from now on; return its name, or None if there is no other one."""
        ...


class Fleet(Protocol):
    """The engines and the router in front of them. A routed engine receives requests; a fenced one does not."""

    def routed(self) -> Sequence[str]:
        """Return the names of the engines that receive requests."""
        ...

    def serving(self) -> bool:
        """Return whether requests reach an engine: the router answers, and it has a routed engine."""
        ...

    def members(self) -> Sequence[str]:
        """Return the names of all engines of the run, including those that are being restarted."""
        ...

    async def loads(self) -> Sequence[EngineLoad]:
        """Return how full the routed engines are. An engine that does not answer is left out."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop decoding on every routed engine; return when all have stopped.

        `mode` is `retract` (requests lose their KV cache and continue later), `in_place` (requests keep it) or `abort`.
        """
        ...

    async def commit(self, engine: str, version: int) -> None:
        """Make a paused engine drop everything it cached under older weights and report `version` from now on.

        An engine that holds the version as an adapter is not paused and drops nothing.

        Raises EngineLostError if the engine does not report that version afterwards.
        """
        ...

    async def resume(self) -> None:
        """Let every routed engine decode again."""
        ...

    async def fence(self, engine: str, reason: str) -> None:
        """Take an engine out of the router: it receives no requests until it holds the current version."""
        ...

    async def admit(self, engine: str) -> None:
        """Add an engine that holds the current version to the router.

        Raises EngineLostError if the router does not take it.
        """
        ...

    async def dismiss(self, engine: str) -> None:
        """Remove an engine for good: it receives no requests and is not restarted."""
        ...

    async def check(self, engine: str) -> None:
        """Return once the engine has generated a token after this call, for any request.

        A paused engine generates nothing; it only has to answer. Raises EngineLostError if the engine is gone or does
        not answer in time.
        """
        ...

    async def restart(self, engine: str) -> None:
        """Stop the processes of the engine that still run, and start them again.

        The engine receives no requests before `admit`. Raises EngineLostError if it does not start.
        """
        ...

    async def offload(self) -> None:
        """Release the memory of devices that the learner shares, until `onload`. No request may be in flight."""
        ...

    async def onload(self) -> None:
        """Allocate the memory again. Its contents are undefined: a version has to be sent before the next request."""
        ...

    async def check_router(self) -> None:
        """Restart a router that is gone, and correct its list of engines.

        Raises EngineLostError if that fails for now.
        """
        ...
