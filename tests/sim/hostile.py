"""A simulated run whose users, clients and data hand in hostile values, with the real store and real checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.adapters.agents.trajectories import BufferFullError, TrajectoryBuffer
from miles_async.adapters.datasets import problems
from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.storage import run_store
from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.events import AnyEvent, DataSkipped, Event, encode
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.pipeline.run_ports import Ports
from miles_async.ports import DeadLetters
from miles_async.rewards.rewarder import Rewarder
from miles_async.rollout.contract import RolloutFunctionAdapter, flat_args
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, Sample, VersionSpan
from tests.configuration import run_config
from tests.sim.agents import AgentEngines, AgentModel, AgentWorld
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Trainer
from workers.functions import dynamic_filter

ROLLOUTS, BATCH, SAMPLES = 4, 4, 2
ROWS, CHECKED_ROWS = 60, 4
"""Rows of the data, and those that are checked before the run."""
ENTRANCES = ("reward", "generate", "filter", "rollout", "returned", "buffer", "rows", "metadata", "posted")
"""Where a value enters: functions of the user, groups that a rollout function gives back, the buffer filter, rows of
the data, the metadata of the data source, and groups that a client posts."""
FIELDS = (
    *("index", "trajectory", "prompt", "label", "metadata", "tokens", "response", "response_length", "loss_mask"),
    *("rollout_log_probs", "sampling_mask", "spans", "reward", "reward_key", "remove_sample", "status"),
    *("feed_index", "raw_reward", "error", "reward_error", "key"),
)
"""Fields of a sample, and entries of its metadata."""


@dataclass(frozen=True)
class Attack:
    """What happens at a place for every `period`-th sample."""

    entrance: str
    action: str
    """`return` the value, `raise` an error that contains it, `cancel` as a task that was cancelled does, or `set` a
    field to the value."""
    value: Any
    field: str = "metadata"
    period: int = 3


@dataclass(frozen=True)
class Made:
    """A value that is made when it is used, because a report could not print it."""

    name: str
    make: Callable[[], Any] = field(repr=False, compare=False)


def made(value: Any) -> Any:
    """Make the values in lists and dictionaries, too."""
    if isinstance(value, Made):
        return value.make()
    if type(value) is list:
        return [made(entry) for entry in value]
    if type(value) is dict:
        return {key: made(entry) for key, entry in value.items()}
    return value


class AwkwardError(Exception):
    def __str__(self) -> str:
        message: str = self.args[0]
        return message


class NoThread(Executor):
    """Runs calls at once, because nothing wakes a loop with virtual time that waits for a thread."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **settings))
        except Exception as error:
            # The caller gets it from the future.
            future.set_exception(error)
        return future


class InlineStore(SqliteRunStore):
    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)


@dataclass
class SavingTrainer(Trainer):
    folder: CheckpointFolder | None = None

    async def write_state(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        assert self.folder is not None
        draft = self.folder.begin(rollout_id)
        self.folder.write_progress(draft, {"model": {}, **progress})
        self.folder.commit(draft, rollout_id, keep=1)
        await super().write_state(rollout_id, read_progress(self.folder.latest().folder))


@dataclass(kw_only=True)
class HostileWorld(AgentWorld):
    """Every attack begins after its function has worked once: a function that never works ends the run on purpose."""

    attacks: Sequence[Attack]
    folder: Path
    agents: AgentModel = field(default_factory=lambda: AgentModel(failure_rate=0.0))

    def __post_init__(self) -> None:
        global ACTIVE
        ACTIVE = self
        super().__post_init__()
        self.trainer_kind = SavingTrainer
        self.calls: dict[str, int] = {}
        self.struck = 0
        """Values that were handed in, without those in the data."""
        self.logged: list[bytes] = []
        self.posted: set[str] = set()
        self.removed: set[str] = set()
        """Groups that the buffer filter removed without returning them, as the data source reports."""

    def attack(self, entrance: str) -> Attack | None:
        """The attack of this call of a function, if it is its turn."""
        count = self.calls[entrance] = self.calls.get(entrance, -1) + 1
        due = [
            attack for attack in self.attacks if attack.entrance == entrance and count and count % attack.period == 0
        ]
        self.struck += bool(due)
        return replace(due[0], value=made(due[0].value)) if due else None

    def strike(self, entrance: str, samples: Sequence[Sample], result: Any) -> Any:
        """Carry out an attack on one of the samples, and return what the function returns."""
        attack = self.attack(entrance)
        if attack is None:
            return result
        if attack.action == "raise":
            raise AwkwardError(attack.value)
        if attack.action == "cancel":
            raise asyncio.CancelledError
        if attack.action == "return":
            return attack.value
        for sample in samples[-1:]:
            if attack.field in ("feed_index", "raw_reward", "error", "reward_error", "key"):
                sample.metadata[attack.field] = attack.value
            else:
                setattr(sample, attack.field, attack.value)
        return result

    async def _call_tool(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
        returned = await super()._call_tool(args, sample, sampling_params)
        return self.strike("generate", [sample], returned)

    async def reward(self, args: Any, sample: Sample) -> Any:
        return self.strike("reward", [sample], 1.0)

    def choose_returned(self, buffer: list[Group], size: int) -> Any:
        taken = buffer[:size]
        del buffer[:size]
        return self.strike("buffer", [], taken)

    def emit(self, event: Event) -> None:
        super().emit(event)
        self.logged.append(encode(event))

    async def _serve(self, clock: VirtualClock, store: Any, stored: Any) -> None:
        assert isinstance(self.trainer, SavingTrainer)
        self.trainer.folder = CheckpointFolder(self.folder / "checkpoints")
        with patch.object(run_store, "ThreadPoolExecutor", NoThread):
            self.store = InlineStore(self.folder / "store", "sim")
        try:
            await super()._serve(clock, self.store, stored)
            await self._check_store()
        finally:
            self.store.close()

    async def _check_store(self) -> None:
        """All that was stored can be read."""
        stored = await self.store.read()
        assert stored is not None
        for group in stored.groups:
            if group.content is not None:
                assert await self.store.load(group.sequence)
        for name in stored.posted:
            assert await self.store.load_posted(name)

    def _ports(self, clock: VirtualClock) -> Ports:
        letters = DeadLetterFile(self.folder / "dead_letters.jsonl", self.journal)
        self.feed: Any = open_data(self.config, report=self._report)
        self.buffer = TrajectoryBuffer(8, SAMPLES, log=self.journal)
        return replace(
            super()._ports(clock),
            data=self.feed,
            rewarder=Rewarder(self.reward, None, name="my.reward", timeout_seconds=50.0, reward_key="score"),
            dead_letters=_Both(letters, self.dead_letters),
            dynamic_filter=dynamic_filter(self.config, flat_args(self.config)),
        )

    def _report(self, reason: str, sentence: str) -> None:
        if reason == "buffer_filter_removed":
            self.removed.add(sentence.split()[3])
        self.journal.emit(DataSkipped(time=0.0, reason=reason, sentence=sentence))

    def _on_rollout(self, rollout_id: int) -> None:
        if (attack := self.attack("metadata")) is not None:
            self.feed.metadata["value"] = attack.value

    def _rollout_function(self) -> RolloutFunction | None:
        if self.schedule is Schedule.FULLY_ASYNC:
            return None
        assert isinstance(self.fleet, AgentEngines)
        return RolloutFunctionAdapter(
            self._hostile_rollout, flat_args(self.config), self.config, score_tokens=self.fleet.score_logprobs
        )

    async def _hostile_rollout(self, args: Any, rollout_id: int, source: RolloutSource, evaluation: bool) -> Any:
        groups: list[Group] = []
        while len(groups) < args.rollout_batch_size:
            [group] = source.get_samples(1)
            for sample in group:
                sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
                sample.rollout_log_probs, sample.spans = [-1.0], [VersionSpan(max(source.live_version, 0), 0, 1)]
                sample.status = Sample.Status.COMPLETED
            if (attack := self.attack("returned")) is not None:
                if attack.action == "raise":
                    source.discard(group, attack.value)
                else:
                    with suppress(TypeError):
                        group[0].metadata = attack.value
                    source.add_samples([group])
                continue
            with suppress(AwkwardError, asyncio.CancelledError):
                self.strike("rollout", group, None)
            groups.append(group)
        await self._post()
        return groups

    async def _post(self) -> None:
        attack = self.attack("posted")
        if attack is None:
            return
        sample: dict[str, Any] = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0], "reward": 1.0}
        sample["weight_versions"] = [{"version": 0, "start": 0, "end": 1}]
        if attack.action == "return":
            sample["metadata"] = {"value": attack.value}
        elif attack.action == "set":
            sample[attack.field] = attack.value
        key = attack.value if isinstance(attack.value, str) else "key"
        with suppress(InvalidRequestError, BufferFullError):
            name = await self.buffer.add([sample] * SAMPLES, lambda name: [], lambda name: None, key=key)
            self.posted.add(name)
            self.logged.append(msgspec.json.encode({"type": "WarningRaised", "time": 0.0, "text": name}))


@dataclass(frozen=True)
class _Both:
    file: DeadLetters
    box: DeadLetters

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        self.file.dead_letter(group, reason, error)
        self.box.dead_letter(group, reason, error)


ACTIVE: HostileWorld


def keep(args: Any, group: Group) -> Any:
    """The dynamic filter of the active world."""
    return ACTIVE.strike("filter", group, True)


def choose(args: Any, rollout_id: Any, buffer: list[Group], size: int) -> Any:
    """The buffer filter of the active world."""
    return ACTIVE.choose_returned(buffer, size)


def rows(folder: Path, attacks: Sequence[Attack]) -> Path:
    """Write the data: some rows are what the attacks on rows say, the others are valid."""
    path = folder / "data.jsonl"
    lines = []
    for number in range(ROWS):
        line = json.dumps({"prompt": f"{number}+1=", "label": str(number + 1), "metadata": {"number": number}}).encode()
        for attack in attacks if number >= CHECKED_ROWS else ():
            if attack.entrance == "rows" and number % attack.period == 0:
                line = _line(attack)
        lines.append(line.replace(b"\n", b" "))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def _line(attack: Attack) -> bytes:
    value = made(attack.value)
    try:
        raw = value.encode("utf-8", "surrogatepass") if type(value) is str else json.dumps(value).encode()
    except Exception:
        # Not every value can be written into a file.
        raw = b"\xff"
    if attack.action == "return":
        return raw
    name = "label" if attack.action == "raise" else "metadata"
    return b'{"prompt": "1+1=", "label": "2", "' + name.encode() + b'": ' + raw + b"}"


def play(attacks: Sequence[Attack], folder: Path, seed: int, schedule: Schedule) -> HostileWorld:
    """Play a run and judge it: it reaches its end, nothing is lost, and everything that it wrote can be read."""
    settings = run_config(
        rollout_batch_size=BATCH,
        num_rollout=ROLLOUTS,
        n_samples_per_prompt=SAMPLES,
        max_weight_staleness=3,
        max_attempts=2,
        save="anywhere",
        save_interval=2,
        eval_size=0,
        rollout_seed=seed,
        prompt_data=str(rows(folder, attacks)),
        input_key="prompt",
        label_key="label",
        reward_key="score",
        dynamic_sampling_filter_path=f"{__name__}.keep",
        buffer_filter_path=f"{__name__}.choose",
    )
    with patch.object(problems, "CHECKED_AT_START", CHECKED_ROWS):
        world = HostileWorld(config=settings, attacks=attacks, folder=folder, seed=seed, schedule=schedule).run()
    _judge(world)
    return world


def _judge(world: HostileWorld) -> None:
    assert world.audit.violations == []
    assert [len(batch) for batch in world.trainer.batches] == [BATCH] * ROLLOUTS
    trained = [name for batch in world.trainer.batches for name in batch]
    assert len(set(trained)) == len(trained), "no prompt is trained twice"
    live = {group.feed_index for group in world.service.lifecycle.live_groups}
    kept = live | world.returned | world.dead_letters.prompts
    assert world.audit.owed <= kept | world.removed, "no prompt is lost"
    decode = msgspec.json.Decoder(AnyEvent).decode
    assert all(map(decode, world.logged)), "an event cannot be read"
    letters = world.folder / "dead_letters.jsonl"
    written = letters.read_text().splitlines() if letters.exists() else []
    assert len(list(map(json.loads, written))) == len(world.dead_letters.letters)
    assert sorted(world.trainer.saved) == list(range(1, ROLLOUTS, 2))
    for progress in world.trainer.saved.values():
        assert all(map(Group.from_prompt_dict, progress["owed"]))
