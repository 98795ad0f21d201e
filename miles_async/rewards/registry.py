"""The built-in rewards that `rm_type` and a row's `metadata["rm_type"]` name. A new reward is one entry of this table.

The functions are named by their paths and imported when they are first needed, so that the check of a configuration
imports none of their libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from miles_async.config.schema import RunConfig

BOXED = "boxed_"
"""With this prefix, a reward sees only the content of the last box of the response."""


class RunsIn(Enum):
    """Where a reward is computed."""

    THREAD = auto()
    """In a thread of the rollout worker: the reward takes linear time and evaluates nothing."""
    GRADER = auto()
    """In a confined grader process: the reward parses text of the model, which may never end."""
    CHILD = auto()
    """In a confined process for each sample: the reward evaluates text of the model as code."""
    SERVER = auto()
    """At `rm_url`."""


@dataclass(frozen=True, slots=True)
class RewardType:
    """One built-in reward."""

    path: str
    """The function `fn(args, sample)`, as `module.function`; or a class that is created with `args` and then called."""
    runs_in: RunsIn = RunsIn.THREAD
    wrong: float | Mapping[str, Any] = 0.0
    """The reward of a response that cannot be scored within the limits. The first entry of a dictionary is trained on,
    unless `reward_key` names another one."""
    compares: bool = False
    """The reward compares the response with the label of its row, so that every row needs one."""
    needs: str | None = None
    """A setting without which the reward cannot be computed."""
    otherwise: str = ""
    """What to do without it, as the end of an error message that starts with the name of the reward."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The entries that can be trained on; empty if the reward is a number."""
        return tuple(self.wrong) if isinstance(self.wrong, Mapping) else ()

    def key(self, reward_key: str | None) -> str | None:
        """The entry that is trained on if `reward_key` is set to this value."""
        return next(iter(self.keys), reward_key) if reward_key not in self.keys else reward_key


_RULES = "miles_async.rewards.builtin"
_MATHEMATICS = "miles_async.rewards.mathematics"
REWARD_TYPES = {
    "reasoning_gym": RewardType(
        "miles_async.rewards.gym.ReasoningGymReward",
        RunsIn.CHILD,
        needs="reasoning_gym_task",
        otherwise="scores only reasoning_gym_task problems; set rm_type to exact, for example",
    ),
    "exact": RewardType(f"{_RULES}.exact", compares=True),
    "math": RewardType(f"{_MATHEMATICS}.math", RunsIn.GRADER, compares=True),
    "dapo": RewardType(f"{_MATHEMATICS}.dapo", RunsIn.GRADER, wrong={"score": -1.0, "acc": 0.0}, compares=True),
    "deepscaler": RewardType(f"{_MATHEMATICS}.deepscaler", RunsIn.GRADER, compares=True),
    "f1": RewardType(f"{_RULES}.f1", compares=True),
    "gpqa": RewardType(f"{_RULES}.gpqa"),
    "ifeval": RewardType("miles_async.rewards.instructions.ifeval"),
    "remote_rm": RewardType(
        "miles_async.rewards.remote.RemoteReward",
        RunsIn.SERVER,
        needs="rm_url",
        otherwise="needs a reward server: set rm_url to the address of the server",
    ),
}
"""By name, without the prefix `boxed_`."""


def reward_type(name: str | None) -> RewardType | None:
    """The built-in reward of this name, which may have the prefix `boxed_`; None if there is none."""
    return None if name is None else REWARD_TYPES.get(name.removeprefix(BOXED))


def complaints(name: str | None, config: RunConfig) -> Iterator[str]:
    """Yield why the built-in reward `name` cannot be used in this run, one sentence each."""
    kind = reward_type(name)
    if name is None or kind is None:
        *names, last = REWARD_TYPES
        yield (
            f"rm_type {name!r} is unknown: set {', '.join(names)} or {last}, or name your own function with "
            "custom_rm_path"
        )
        return
    has = {"reasoning_gym_task": config.data.reasoning_gym_task, "rm_url": config.rollout.rm_url}
    if kind.needs is not None and has[kind.needs] is None:
        yield f"rm_type {name.removeprefix(BOXED)} {kind.otherwise}"


def row_reward(metadata: Mapping[str, Any]) -> str | None:
    """The built-in reward that a row names for itself, as in slime; None if it names none."""
    return str(metadata.get("rm_type") or "").strip() or None
