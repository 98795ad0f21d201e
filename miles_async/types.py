"""What the stages hand each other.

A run moves `Group`s of `Sample`s from the data source to the optimizer step. Everything here is plain data: the
stages own the behaviour. `Sample` keeps the field names of slime's sample, so that reward functions, filters and
rollout functions written for slime work unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

from miles_async.errors import TrajectoryError


class SampleStatus(StrEnum):
    PENDING = "pending"
    """Not generated yet, or partly generated and waiting to be continued."""
    COMPLETED = "completed"
    """The model ended its answer itself."""
    TRUNCATED = "truncated"
    """Cut at the response limit."""
    ABORTED = "aborted"
    """Stopped by us before it ended; its tokens may be continued."""
    FAILED = "failed"
    """Its generation or reward failed; the text of the failure is in `metadata["error"]`."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled under weight version `version`."""

    version: int
    start: int
    end: int


class Turn(NamedTuple):
    """Response tokens `[start, end)` that one side said."""

    start: int
    end: int
    sampled: bool
    """By the model, and so trained on; else a tool or a user said it."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One response to one prompt.

    `tokens` holds prompt and response ids; the last `response_length` of them are the response. `loss_mask` and
    `rollout_log_probs` have one entry per response token (a mask of None means all ones). `spans` tells which weight
    version sampled which response tokens, half-open and in order; tokens no model sampled (tool output) carry none.
    """

    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)

    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reward: float | dict[str, Any] | None = None
    reward_key: str | None = None
    """The entry that counts, where the reward is a dictionary."""
    remove_sample: bool = False
    """Set by a sample filter: it counts in its group's advantages, but its own tokens are not trained on."""
    status: SampleStatus = SampleStatus.PENDING

    # slime code speaks of `Sample.Status.COMPLETED`.
    Status = SampleStatus

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def turns(self) -> list[Turn]:
        """The response, cut wherever the other side begins to speak."""
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        starts = [place for place, entry in enumerate(mask) if not place or bool(entry) != bool(mask[place - 1])]
        return [Turn(start, end, bool(mask[start])) for start, end in pairwise([*starts, len(mask)])]

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.spans), default=None)

    @property
    def scalar_reward(self) -> float:
        """The reward as the trainer uses it. Raises TrajectoryError while there is none."""
        reward = self.reward
        if isinstance(reward, dict):
            if self.reward_key is None:
                raise TrajectoryError(f"sample {self.index} has a dictionary for a reward: set reward_key to an entry")
            reward = reward.get(self.reward_key)
        if not isinstance(reward, (int, float)):
            raise TrajectoryError(f"sample {self.index} has the reward {reward!r}; the trainer needs a number")
        return float(reward)

    def get_reward_value(self, args: Any) -> float:
        """slime's name for `scalar_reward`; `args.reward_key` says which entry of a dictionary counts."""
        if isinstance(self.reward, dict) and self.reward_key is None:
            self.reward_key = args.reward_key
        return self.scalar_reward

    def reset(self) -> None:
        """Forget the attempt, keep the prompt: the sample can be generated afresh."""
        self.tokens = self.tokens[: self.prompt_length]
        self.response, self.response_length = "", 0
        self.loss_mask, self.reward, self.reward_key, self.remove_sample = None, None, None, False
        self.rollout_log_probs, self.spans = [], []
        self.status = SampleStatus.PENDING

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Sample:
        fields = dict(values)
        fields["status"] = SampleStatus(fields["status"])
        fields["spans"] = [VersionSpan(**span) for span in fields["spans"]]
        return Sample(**fields)


class Group(list[Sample]):
    """The `n_samples_per_prompt` samples of one prompt: the unit of admission, queueing and training.

    It is a list of samples, so functions written for slime's `list[Sample]` take it as it is.
    """

    __slots__ = ("attempt", "feed_index", "sequence")

    def __init__(
        self, samples: Iterable[Sample] = (), *, feed_index: str = "", attempt: int = 0, sequence: int | None = None
    ) -> None:
        super().__init__(samples)
        self.feed_index = feed_index
        """The prompt's place in the data, `sample_{epoch}_{index}`; survives recycling."""
        self.attempt = attempt
        """0 for the first attempt; one more each time the prompt is recycled as stale or failed."""
        self.sequence = sequence
        """The order of admission, given by the scheduler; None before admission. Each attempt gets a new one."""

    @staticmethod
    def of(samples: Iterable[Sample]) -> Group:
        """A group as it is; a plain list, as slime's functions return it, with the feed index its samples name."""
        if isinstance(samples, Group):
            return samples
        members = list(samples)
        return Group(members, feed_index=members[0].metadata.get("feed_index", "") if members else "")

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that sampled any token of the group.

        Raises TrajectoryError where a sample names no version: an unknown age must never pass for a fresh one.
        """
        versions = [sample.oldest_version for sample in self]
        known = [version for version in versions if version is not None]
        if not known or len(known) != len(versions):
            raise TrajectoryError(
                f"group {self.feed_index}: a sample carries no weight-version span; "
                "the generator must record the version that sampled each token"
            )
        return min(known)

    @property
    def response_tokens(self) -> int:
        return sum(sample.response_length for sample in self)

    def reset(self) -> None:
        """Forget tokens, versions and rewards, keep the prompt: the group can be admitted afresh."""
        for sample in self:
            sample.reset()
        self.sequence = None


class Verdict(NamedTuple):
    """What a dynamic filter may return instead of true or false, so that the metrics can tell why groups go."""

    keep: bool
    reason: str = "filter"

    def __bool__(self) -> bool:
        return self.keep


class DropReason(StrEnum):
    """Why a group left without training. Every drop has exactly one."""

    STALE = "stale"
    FILTERED = "filtered"
    FAILED = "failed"
    PROMPT_TOO_LONG = "prompt_too_long"
    ENGINE_LOST = "engine_lost"
    HEAD_DEADLINE = "head_deadline"
    """The head of the window took too long and was sent back (`scheduling/head.py`)."""
    NONFINITE = "nonfinite"
    ABORTED = "aborted"
    PARTIAL = "partial"
    """Aborted at the end of a batch, and given back with its tokens (`--partial-rollout`)."""
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What the learner says of one drained batch (`num_steps_per_rollout` optimizer steps)."""

    started: float
    """Wall-clock seconds (`time.time`) at which the first optimizer step began; `ended` likewise."""
    ended: float
    tokens: int
    """Prompt and response tokens that went through the model."""
    finite: bool
    """False when a loss or gradient was not finite: the weights were left as they were."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Loss, gradient norm, clip fraction and the rest, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """What became of one engine's part of a weight write."""

    engine: str
    seconds: float
    bytes: int
    error: str | None = None
    """None when every byte landed and was verified; otherwise one sentence."""
    final: bool = False
    """The engine is not to be written again: it is gone, or a write that did not end in time may still be under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How full one engine is."""

    kv_usage: float
    """Share of its KV cache in use, 0 to 1."""
    queued: int
    """Requests that wait inside it for room to run."""
