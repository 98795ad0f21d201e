"""What a reward plug-in provides: a function of a sample, and where the function runs.

A plug-in is a subclass of `Reward` (see `miles_async/plugins.py`). Its name is a value of `rm_type`, and of
`metadata["rm_type"]` in a row:

    [project.entry-points."miles_async.rewards.functions"]
    starts_with_label = "my_package:StartsWithLabel"

A function that `custom_rm_path` names needs no plug-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

from miles_async.errors import UserError
from miles_async.plugins import Kind, Plugin, errors_of
from miles_async.types import Sample

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig

BOXED = "boxed_"
"""With this prefix of its name, a reward sees only the content of the last box of the response."""

RewardFunction = Callable[[Any, Sample], Any]
"""`fn(args, sample)` returns a number, or a dictionary of numbers and other values."""


class RunsIn(Enum):
    """Where a reward is computed."""

    THREAD = auto()
    """In a thread of the rollout worker: the reward takes linear time and evaluates nothing."""
    GRADER = auto()
    """In a confined grader process, which gets no metadata: the reward parses text of the model, which may never
    end."""
    CHILD = auto()
    """In a confined process for each sample: the reward evaluates text of the model as code."""
    SERVER = auto()
    """In the event loop: the reward asks a server. The function that `open` returns is async, limits its own time, and
    has an async method `close`."""


class Reward(Plugin):
    """A reward function. A plug-in overrides `score`, or `open` if scoring needs a library or holds something."""

    runs_in: ClassVar[RunsIn] = RunsIn.THREAD
    wrong: ClassVar[float | Mapping[str, float]] = 0.0
    """The reward of a response that cannot be scored within the limits. The first entry of a dictionary is trained on,
    unless `reward_key` names another one."""
    may_be_dictionary: ClassVar[bool] = False
    """Whether the reward may be a dictionary, whose entry `reward_key` is trained on."""
    compares: ClassVar[bool] = False
    """The reward compares the response with the label of its row, so that every row needs one."""
    reads_box: ClassVar[bool] = False
    """The reward takes the content of a box for one formula, so the prefix `boxed_` keeps the box around it."""
    reads_around_box: ClassVar[str | None] = None
    """What the reward looks for outside of boxes. The prefix `boxed_`, which removes it, is refused then."""
    reads: ClassVar[Sequence[str]] = ()
    """Names of settings that the reward reads besides its own. Confined processes get no other settings, because
    settings can hold keys."""

    def open(self, settings: Any) -> RewardFunction:
        """Return the function that scores a sample.

        Each process that computes the reward calls this once, before it is confined. `settings` has the reward's own
        settings and those in `reads` as attributes.
        """
        return self.score

    def score(self, args: Any, sample: Sample) -> Any:
        """Return the reward of a finished sample. `args` has all settings in a thread, and `settings` elsewhere."""
        raise NotImplementedError

    def of_row(self, metadata: Mapping[str, Any]) -> str | None:
        """Return the name of the reward that scores a row with this metadata in place of this one; None for this one.

        Raises UserError if no reward fits the row.
        """
        return None

    def missing(self, config: RunConfig) -> str | None:
        """What the reward lacks in this run, and what to do, as the end of a sentence that begins with its name.

        None if the run can use the reward.
        """
        return None

    @property
    def path(self) -> str:
        """The path of the class, by which grader processes import it."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @property
    def settings(self) -> Sequence[str]:
        """The names of the settings that the reward receives."""
        return (*(self.Settings.model_fields if self.Settings is not None else ()), *self.reads)

    @property
    def keys(self) -> Sequence[str]:
        """The entries that can be trained on, as far as they are known."""
        return tuple(self.wrong) if isinstance(self.wrong, Mapping) else ()

    def key(self, reward_key: str | None) -> str | None:
        """The entry that is trained on if `reward_key` is set to this value."""
        return next(iter(self.keys), reward_key) if reward_key not in self.keys else reward_key


class Rewards(Kind[Reward]):
    """The reward plug-ins. Each name may have the prefix `boxed_`."""

    def has(self, name: str) -> bool:
        return super().has(name.removeprefix(BOXED))

    def find(self, name: str) -> Reward:
        if not self.has(name) and "." not in name:
            raise UserError(self.missing(name))
        return super().find(name.removeprefix(BOXED))

    def missing(self, name: str | None) -> str:
        *names, last = self.names
        return (
            f"rm_type {name!r} is unknown: set {', '.join(names)} or {last}, or name your own function with "
            "custom_rm_path"
        )

    def accept(self, name: Any) -> Any:
        """Any name: `complaints` refuses an unknown one, for a run, a data set and a row in the same words."""
        return name


REWARDS = Rewards("reward", Reward, "miles_async.rewards.functions")


def complaints(name: str | None, config: RunConfig, *, of_row: bool = False) -> Iterator[str]:
    """Yield why the reward `name` cannot be used in this run, one sentence each.

    The name of a row (`of_row`) is not a dotted path, because data must not import modules.
    """
    if name is None or (not REWARDS.has(name) and (of_row or "." not in name)):
        yield REWARDS.missing(name)
        return
    try:
        reward = REWARDS.find(name)
        with errors_of(reward, "check the run"):
            lacks = reward.missing(config)
    except UserError as error:
        yield str(error)
        return
    if lacks is not None:
        yield f"rm_type {name.removeprefix(BOXED)} {lacks}"
    if name.startswith(BOXED) and reward.reads_around_box:
        yield (
            f"rm_type {name} would give every response the reward of a wrong one, because {reward.name} looks for "
            f"{reward.reads_around_box}, which is outside the box: set {reward.name}, which reads the box, too"
        )


def usable_reward(name: str | None) -> Reward | None:
    """The reward of this name; None if there is none, or if it cannot be used."""
    try:
        return None if name is None else REWARDS.find(name)
    except UserError:
        return None


def row_reward(metadata: Mapping[str, Any], default: str | None = None) -> str | None:
    """The reward that a row names for itself, as in slime, or that `default` chooses for the row; None if neither does.

    Raises UserError if `default` has no reward for the row.
    """
    if named := str(metadata.get("rm_type") or "").strip():
        return named
    reward = usable_reward(default)
    return None if reward is None else reward.of_row(metadata)
