"""The data types that the stages of a run exchange.

A run moves `Group`s of `Sample`s from the data source to the optimizer step. The types are plain data; the behaviour
belongs to the stages. `Sample` keeps the field names of slime's `Sample`, so that reward functions, filters and rollout
functions written for slime work unchanged.

Example::

    sample = Sample(index=0, prompt="1+1=", label="2")
    sample.tokens, sample.response, sample.response_length = [10, 11, 12, 13, 14], "2", 1
    sample.rollout_log_probs, sample.spans = [-0.1], [VersionSpan(version=3, start=0, end=1)]
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    group = Group([sample], feed_index="sample_0_0")
    group.oldest_version  # 3
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from itertools import chain, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from miles_async.errors import TrajectoryError
from miles_async.identity import identity_set
from miles_async.json_values import json_value, plain_text, shown

if TYPE_CHECKING:
    # It imports numpy, which the check of a configuration does without.
    from miles_async.sampling_mask import SamplingMask


_COLUMNS = "tokens", "rollout_log_probs", "loss_mask", "sampling_mask", "spans"
"""The fields of a sample with per-token data, except `columns`."""
REWARD_ERROR = "reward_error"
"""The entry of a sample's metadata that states why its reward did not finish, so that the response counts as wrong."""
FROM_DATASET = "from_dataset"
"""The entry of a sample's metadata that states where its prompt is from: the `name` of the data set, the `row`, and the
`epochs` that the data set had been through before; if the run trains several adapters, also the `adapter`. It is set if
the run has several data sets or follows rewards."""

Prompt = str | list[dict[str, Any]]
"""A prompt as text or as chat messages."""


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Return a copy of a prompt as chat messages. A prompt that is text becomes the message of a user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else deepcopy(prompt)


class SampleStatus(StrEnum):
    """The progress of one response; the values are slime's."""

    PENDING = "pending"
    """Not generated yet, or partly generated and waiting to be continued."""
    COMPLETED = "completed"
    """The model ended its response."""
    TRUNCATED = "truncated"
    """The response reached the length limit."""
    ABORTED = "aborted"
    """The run aborted the request before the response ended; the tokens so far may be continued."""
    FAILED = "failed"
    """The generation or the reward failed; `metadata["error"]` holds the error message."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled by weight version `version`; positions count from the response."""

    version: int
    start: int
    end: int
    oldest_keys: int | None = None
    """The oldest version whose keys and values they were sampled with; None if that is `version`."""
    reused: int = 0
    """Number of tokens before `start` whose keys and values of older versions were not computed again for the span."""

    @property
    def oldest(self) -> int:
        """The oldest version that the tokens come from: that of the keys, or else of the weights."""
        return self.version if self.oldest_keys is None else self.oldest_keys


def versions_of(samples: Iterable[Iterable[VersionSpan]]) -> set[int]:
    """The weight versions that sampled tokens, and those of the oldest keys that they used. A sample is its spans."""
    return {version for spans in samples for span in spans for version in (span.version, span.oldest)}


class Turn(NamedTuple):
    """Response tokens `[start, end)` of one chat turn."""

    start: int
    end: int
    sampled: bool
    """True if the model sampled the tokens, which are then trained on; False for tokens of a tool or a user."""


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Sample:
    """One response to one prompt.

    `tokens` holds P prompt ids followed by R response ids, with R = `response_length`. `loss_mask`,
    `rollout_log_probs` and `sampling_mask` have R entries. Their declarations are in `miles_async/columns`. They may be
    set to lists, which become `TokenValues` when the run accepts the sample.
    """

    index: int | None = None
    """Position of the sample in the data, counted over all groups; None if a rollout function set none."""
    trajectory: int | None = None
    """The number of the trajectory that this sample is a segment of: samples of a group with the same number are
    segments of one trajectory. None if the sample is a trajectory by itself."""
    prompt: Prompt = ""
    """The prompt as text or as chat messages."""
    label: Any = None
    """The expected answer."""
    metadata: dict[str, Any] = field(default_factory=dict)

    tokens: MutableSequence[int] = field(default_factory=list)
    """Token ids of prompt and response, P + R entries."""
    response: str = ""
    """The response as text."""
    response_length: int = 0
    """R: number of response tokens."""
    loss_mask: MutableSequence[int] | None = None
    """1 for each response token that is trained on, else 0; None means all ones."""
    rollout_log_probs: MutableSequence[float] = field(default_factory=list)
    """Log-probability of each response token under the weights that sampled it, in the distribution from which it was
    drawn: with top-p or top-k, the one over the kept tokens."""
    sampling_mask: SamplingMask | None = None
    """The tokens that top-p or top-k kept for each response token; None if the whole vocabulary was kept."""
    spans: list[VersionSpan] = field(default_factory=list)
    """The weight versions that sampled the response, in order. Tokens no model sampled (tool output) have no span."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The values of token columns that plug-ins declare, by name (`miles_async/columns/column.py`)."""
    reward: float | dict[str, Any] | None = None
    reward_key: str | None = None
    """The entry of a dictionary reward that is trained on."""
    remove_sample: bool = False
    """Set by a sample filter: the sample counts in its group's advantages, but its tokens are not trained on."""
    status: SampleStatus = SampleStatus.PENDING

    # An alias, because code written for slime uses `Sample.Status.COMPLETED`.
    Status = SampleStatus

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the prompt as chat messages. A prompt that is text becomes the message of a user."""
        return as_messages(self.prompt)

    @property
    def prompt_length(self) -> int:
        """P: number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def has_trained_tokens(self) -> bool:
        """Whether the loss mask of a response token is 1."""
        return self.response_length > 0 and (self.loss_mask is None or 1 in self.loss_mask)

    @property
    def dataset(self) -> str:
        """Name of the data set that the prompt is from; empty in a run with one data set, and for other prompts."""
        return str(self.origin.get("name", ""))

    @property
    def adapter(self) -> str:
        """Name of the adapter that the prompt trains; empty unless the run trains several."""
        return str(self.origin.get("adapter", ""))

    @property
    def origin(self) -> Mapping[str, Any]:
        """See `FROM_DATASET`; empty if the run did not set it."""
        # Rows and functions of users may put anything into the metadata.
        origin = self.metadata.get(FROM_DATASET)
        return origin if isinstance(origin, dict) and isinstance(origin.get("epochs"), int | float) else {}

    @property
    def turns(self) -> list[Turn]:
        """The response, split into chat turns wherever the loss mask changes."""
        mask = [1] * self.response_length if self.loss_mask is None else list(self.loss_mask)
        starts = [i for i, entry in enumerate(mask) if i == 0 or bool(entry) != bool(mask[i - 1])]
        return [Turn(start, end, bool(mask[start])) for start, end in pairwise([*starts, len(mask)])]

    @property
    def finished(self) -> bool:
        """Whether the response is complete: the model ended it, or it reached the length limit."""
        return self.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)

    @property
    def scalar_reward(self) -> float:
        """The reward as a number. Raises TrajectoryError if the sample has no numeric reward."""
        reward = self.reward
        if isinstance(reward, dict):
            if self.reward_key is None:
                raise TrajectoryError(
                    f"sample {self.index} has a dictionary as its reward: set reward_key to one of its entries"
                )
            reward = reward.get(self.reward_key)
        if not isinstance(reward, (int, float)):
            raise TrajectoryError(
                f"sample {self.index} has the reward {reward!r}: return a number from the reward function"
            )
        return float(reward)

    def get_reward_value(self, args: Any) -> float:
        """slime's name for `scalar_reward`; `args.reward_key` names the entry of a dictionary reward."""
        if isinstance(self.reward, dict) and self.reward_key is None:
            self.reward_key = args.reward_key
        return self.scalar_reward

    @property
    def rollout_id(self) -> int | None:
        """slime's name for `trajectory`."""
        return self.trajectory

    @rollout_id.setter
    def rollout_id(self, number: int | None) -> None:
        self.trajectory = number

    @property
    def _prompt_tokens(self) -> list[int]:
        """The tokens of `prompt`. None are known for a segment, which may begin with other messages."""
        return list(self.tokens[: self.prompt_length]) if self.trajectory is None else []

    def reset(self) -> None:
        """Discard the response and its reward; keep the prompt, so that the sample can be generated again."""
        prompt = self._prompt_tokens
        self.discard_columns()
        self.tokens, self.trajectory = prompt, None
        self.response, self.response_length = "", 0
        self.reward, self.reward_key, self.remove_sample = None, None, False
        self.metadata.pop(REWARD_ERROR, None)
        self.status = SampleStatus.PENDING

    def use_lists(self) -> None:
        """Make the columns of numbers real lists: code written for slime sends them as JSON, which knows no others."""
        self.tokens, self.rollout_log_probs = list(self.tokens), list(self.rollout_log_probs)
        self.loss_mask = None if self.loss_mask is None else list(self.loss_mask)

    def discard_columns(self) -> None:
        """Discard all per-token data, including the tokens of the prompt."""
        self.copy_columns(Sample())

    def copy_columns(self, other: Sample) -> None:
        """Take over the per-token data of another sample, which then changes independently of this one."""
        for name in _COLUMNS:
            setattr(self, name, copy(getattr(other, name)))
        self.columns = {name: copy(value) for name, value in other.columns.items()}

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as values that JSON can express if the values of the sample are accepted."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["metadata"] = json_value(self.metadata)
        for name in ("tokens", "rollout_log_probs", "loss_mask"):
            values[name] = None if values[name] is None else list(values[name])
        values["columns"] = {name: list(column) for name, column in self.columns.items()}
        values["sampling_mask"] = None if self.sampling_mask is None else self.sampling_mask.to_dict()
        values["spans"] = [asdict(span) for span in self.spans]
        return values

    def prompt_dict(self) -> dict[str, Any]:
        """What `reset` keeps, as plain data that shares nothing with the sample."""
        return {
            "index": self.index,
            "prompt": json_value(self.prompt),
            "prompt_tokens": self._prompt_tokens,
            "label": json_value(self.label),
            "metadata": {name: json_value(value) for name, value in self.metadata.items() if name != REWARD_ERROR},
        }

    def restore_prompt(self, values: Mapping[str, Any]) -> None:
        """Set the prompt to the result of `prompt_dict`, and discard the response."""
        self.reset()
        self.index, self.prompt, self.label = values["index"], json_value(values["prompt"]), json_value(values["label"])
        self.metadata, self.tokens = json_value(values["metadata"]), list(values["prompt_tokens"])

    def inherit(self, values: Mapping[str, Any]) -> None:
        """Take what the sample does not set itself from the result of `prompt_dict`, and the origin in any case."""
        self.prompt = self.prompt or json_value(values["prompt"])
        self.label = json_value(values["label"]) if self.label is None else self.label
        given = json_value(values["metadata"])
        origin = {FROM_DATASET: given[FROM_DATASET]} if FROM_DATASET in given else {}
        self.metadata = {**given, **self.metadata, **origin}

    @staticmethod
    def from_prompt_dict(values: Mapping[str, Any]) -> Sample:
        """A pending sample from the result of `prompt_dict`. Raises KeyError for a missing field."""
        fields = {name: values[name] for name in ("index", "prompt", "label", "metadata")}
        return Sample(**fields, tokens=values["prompt_tokens"])

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Sample:
        """The inverse of `to_dict`; dictionaries of slime's `Sample.to_dict`, which have no `spans`, are read too.

        Raises KeyError or TypeError for a missing or an unknown field, and TrajectoryError for a sample of slime with
        images or other multimodal inputs.
        """
        arguments = dict(values) if "spans" in values else _without_slime_fields(values)
        arguments["status"] = SampleStatus(arguments["status"])
        arguments["spans"] = [VersionSpan(**span) for span in arguments["spans"]]
        # slime's dictionaries have no sampling mask.
        if (mask := arguments.get("sampling_mask")) is not None:
            from miles_async.sampling_mask import SamplingMask

            arguments["sampling_mask"] = SamplingMask.from_dict(mask)
        return Sample(**arguments)


_SLIME_ONLY = frozenset(
    (
        "apply_chat_template_kwargs",
        "custom_rm_path",
        "generate_function_path",
        "group_index",
        "non_generation_time",
        "prefix_cache_info",
        "rollout_routed_experts",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "session_id",
        "spec_info",
        "teacher_log_probs",
        "train_metadata",
        "weight_versions",
    )
)
"""Fields of slime's `Sample` that have no counterpart here. The token sets of top-p are among them, because slime's
log-probabilities are those of the whole distribution."""


def _without_slime_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a dictionary of slime's `Sample.to_dict` to the fields of `Sample`, with `spans` as in `Sample.to_dict`.

    slime records one weight version per request, without the tokens that it sampled. All tokens get the oldest version,
    so that no token counts as fresher than it is. Attributes that a user's code has added become metadata.
    """
    known = {entry.name for entry in fields(Sample)}
    own = {name: value for name, value in values.items() if name in known}
    multimodal = {name: value for name, value in values.items() if name.startswith("multimodal_")}
    if used := [name for name, value in multimodal.items() if value]:
        raise TrajectoryError(
            f"sample {values.get('index')} has {' and '.join(used)}: only text can be trained; leave such samples out"
        )
    converted = {"rollout_id", *multimodal}
    added = {name: value for name, value in values.items() if name not in known | converted | _SLIME_ONLY}
    own["metadata"] = {**values.get("metadata", {}), **added}
    own["rollout_log_probs"] = values.get("rollout_log_probs") or []
    own["trajectory"] = values.get("rollout_id")
    versions = [int(version) for version in values.get("weight_versions", ()) if str(version).isdecimal()]
    length = values.get("response_length", 0)
    own["spans"] = [{"version": min(versions), "start": 0, "end": length}] if versions and length else []
    return own


def trajectories_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples by trajectory, in the order of their first segments."""
    trajectories: list[list[Sample]] = []
    by_number: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.trajectory is None:
            trajectories.append([sample])
        elif (segments := by_number.get(sample.trajectory)) is not None:
            segments.append(sample)
        else:
            by_number[sample.trajectory] = segments = [sample]
            trajectories.append(segments)
    return trajectories


class Group(list[Sample]):
    """The `n_samples_per_prompt` trajectories of one prompt: the unit of admission, queueing and training.

    A trajectory is one sample, or several if an agent's context was rewritten or branched: each of its segments is a
    sample with the same `trajectory`. A group is a list of samples, so functions written for slime's `list[Sample]`
    accept it.
    """

    __slots__ = ("attempt", "feed_index", "missing", "sequence", "tracked")

    def __init__(
        self, samples: Iterable[Sample] = (), *, feed_index: str = "", attempt: int = 0, sequence: int | None = None
    ) -> None:
        super().__init__(samples)
        self.feed_index = feed_index
        """The prompt's position in the data, `sample_{epoch}_{index}`. Recycling keeps it."""
        self.attempt = attempt
        """0 for the first attempt; incremented each time the prompt is recycled as stale or failed."""
        self.sequence = sequence
        """The order of admission, assigned by the scheduler to each attempt; None before admission."""
        self.missing: list[Sample] = []
        """Samples without which the group is trained; see `leave_out`."""
        self.tracked: Mapping[str, Any] | None = None
        """The prompt as it was taken from the data or returned to it; see `track_prompt`. None before that."""

    @staticmethod
    def of(samples: Iterable[Sample | list[Sample]]) -> Group:
        """Return a group unchanged; turn a plain list, as slime's functions return it, into a group.

        A list within a plain list holds the segments of one trajectory. The feed index of a plain list comes from its
        first sample's metadata; without one it is empty.
        """
        if isinstance(samples, Group):
            return samples
        members: list[Sample] = []
        for number, entry in enumerate(samples):
            if isinstance(entry, Sample):
                members.append(entry)
                continue
            for segment in entry:
                segment.trajectory = number
            members += entry
        return Group(members, feed_index=members[0].metadata.get("feed_index", "") if members else "")

    def track_prompt(self) -> Mapping[str, Any]:
        """Keep and return the prompt as it is now (`prompt_dict`), which code of a user cannot change afterwards.

        The store and checkpoints contain this prompt, and the next attempt begins with it.
        """
        self.tracked = self.prompt_dict()
        return self.tracked

    def header(self) -> dict[str, Any]:
        """The group without its samples, as plain data: `feed_index`, `attempt` and the prompts `missing`.

        `sequence` is left out: a loaded group gets a new one when it is admitted.
        """
        missing = [json_value(sample.prompt_dict()) for sample in self.missing]
        return {"feed_index": self.feed_index, "attempt": self.attempt, "missing": missing}

    @staticmethod
    def of_header(values: Mapping[str, Any]) -> Group:
        """A group without samples from the result of `header`. Raises KeyError for a missing field."""
        group = Group(feed_index=values["feed_index"], attempt=values["attempt"])
        group.missing += map(Sample.from_prompt_dict, values["missing"])
        return group

    @property
    def prompts(self) -> list[Sample]:
        """One sample of each trajectory of the complete group, including `missing`."""
        samples = sorted([*self, *self.missing], key=lambda sample: sample.index or 0) if self.missing else self
        return [segments[0] for segments in trajectories_of(samples)]

    def prompt_dict(self) -> dict[str, Any]:
        """What generating the complete group again takes, as plain data: its prompt and attempts, without tokens.

        The cost does not depend on the number of generated tokens.
        """
        return {
            "feed_index": self.feed_index,
            "attempt": self.attempt,
            "samples": [sample.prompt_dict() for sample in self.prompts],
        }

    @staticmethod
    def from_prompt_dict(values: Mapping[str, Any]) -> Group:
        """A pending group from the result of `prompt_dict`. Raises KeyError for a missing field."""
        samples = map(Sample.from_prompt_dict, values["samples"])
        return Group(samples, feed_index=values["feed_index"], attempt=values["attempt"])

    @property
    def trajectories(self) -> list[list[Sample]]:
        """The segments of each trajectory."""
        return trajectories_of(self)

    @property
    def dataset(self) -> str:
        """See `Sample.dataset`."""
        return self[0].dataset if self else ""

    @property
    def adapter(self) -> str:
        """See `Sample.adapter`."""
        return self[0].adapter if self else ""

    @property
    def rewards(self) -> list[float]:
        """The reward of each trajectory: the mean of the rewards of its segments.

        Raises what `Sample.scalar_reward` raises.
        """
        if all(sample.trajectory is None for sample in self):
            return [sample.scalar_reward for sample in self]
        return [fmean(segment.scalar_reward for segment in segments) for segments in self.trajectories]

    @property
    def truncated(self) -> list[bool]:
        """Whether a segment of each trajectory reached the length limit."""
        return [any(one.status is SampleStatus.TRUNCATED for one in segments) for segments in self.trajectories]

    @property
    def unfinished_rewards(self) -> list[str]:
        """Why the reward did not finish, for each trajectory that counts as wrong for that reason."""
        last = (segments[-1].metadata for segments in self.trajectories)
        return [metadata[REWARD_ERROR] for metadata in last if REWARD_ERROR in metadata]

    @property
    def versions(self) -> set[int]:
        """The weight versions that sampled tokens of the group, and those of the oldest keys that they used.

        Raises TrajectoryError that names the samples without a span, because a group of unknown age must not pass as a
        fresh one.
        """
        if not self or not all(sample.spans for sample in self):
            raise TrajectoryError(
                f"group {self.feed_index}: a sample has no weight-version span; "
                "the generator must record the version that sampled each token",
                [sample for sample in self if not sample.spans],
            )
        return versions_of(sample.spans for sample in self)

    @property
    def oldest_version(self) -> int:
        """The oldest of `versions`. Raises TrajectoryError as `versions`."""
        return min(self.versions)

    @property
    def aborted(self) -> bool:
        """Whether a sample was aborted; the next attempt may continue its tokens."""
        return any(sample.status is SampleStatus.ABORTED for sample in self)

    @property
    def response_tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(sample.response_length for sample in self)

    @property
    def finished_tokens(self) -> int:
        """Response tokens of the trajectories that are finished."""
        return sum(one.response_length for segments in self.trajectories if _finished(segments) for one in segments)

    def share_rewards(self) -> None:
        """Give a reward that one segment of a trajectory has, the last one if several have, to segments without one."""
        for segments in self.trajectories:
            rewarded = [segment for segment in segments if segment.reward is not None]
            for segment in segments:
                if rewarded and segment.reward is None:
                    segment.reward, segment.reward_key = rewarded[-1].reward, rewarded[-1].reward_key

    def leave_out(self, samples: Sequence[Sample]) -> None:
        """Remove all segments of failed trajectories, so that the group can be trained. `put_back` undoes it."""
        failed = identity_set(samples)
        self.missing += [sample for sample in self if sample in failed]
        self[:] = [sample for sample in self if sample not in failed]

    def complete(self, prompts: Sequence[Sample]) -> None:
        """Add pending copies of those `prompts` that the group lacks to `missing`.

        `prompts` has one sample per trajectory of the complete group. The copies are those of other indices than the
        group has, if there are any.
        """
        present = [*self, *self.missing]
        lacking = len(prompts) - len(trajectories_of(present))
        if lacking > 0:
            indices = {sample.index for sample in present}
            absent_first = sorted(prompts, key=lambda sample: sample.index in indices)
            self.missing += (Sample.from_prompt_dict(sample.prompt_dict()) for sample in absent_first[:lacking])

    def put_back(self) -> None:
        """Return the samples that were left out to the group, one per trajectory, so that they are generated again."""
        if self.missing:
            for sample in (failed := [segments[0] for segments in trajectories_of(self.missing)]):
                sample.reset()
            self[:] = sorted([*self, *failed], key=lambda sample: sample.index or 0)
            self.missing = []

    def reset(self, *, keeps_finished: bool = False) -> None:
        """Discard responses, versions and rewards, so that the tracked prompt can be admitted again.

        One sample per trajectory stays. With `keeps_finished`, finished trajectories stay as they are. Samples that
        were left out return.
        """
        tracked = () if self.tracked is None else self.tracked["samples"]
        prompts = {values["index"]: values for values in tracked if values["index"] is not None}
        self.put_back()
        trajectories = self.trajectories
        for segments in trajectories:
            if not (keeps_finished and _finished(segments)):
                del segments[1:]
                first = segments[0]
                if (prompt := prompts.get(first.index)) is not None:
                    first.restore_prompt(prompt)
                else:
                    first.reset()
        self[:] = chain.from_iterable(trajectories)
        self.sequence = None


def _finished(segments: Sequence[Sample]) -> bool:
    return all(sample.finished for sample in segments)


class Verdict(NamedTuple):
    """The result of a dynamic filter, with a reason for the metrics. A filter may also return a plain bool."""

    keep: bool
    reason: str = "filter"
    keep_when_insufficient: bool = False
    """Keep a rejected group if too few candidates for the batch would be left without it, as in slime. It has no effect
    in fully asynchronous runs, where the next groups are being generated anyway."""

    def __bool__(self) -> bool:
        return self.keep

    @staticmethod
    def of(value: object) -> Verdict:
        """Read what a dynamic filter returned: a bool, or an object with `keep` and `reason`.

        `DynamicFilterOutput` of slime and Miles is such an object. A bool may also be NumPy's or a tensor without
        dimensions. Raises TypeError for anything else: most objects count as true whatever they contain.
        """
        try:
            match value:
                case object(keep=keep, reason=reason, keep_when_insufficient=fallback):
                    return Verdict(_as_bool(keep), _as_text(reason), _as_bool(fallback))
                case object(keep=keep, reason=reason):
                    return Verdict(_as_bool(keep), _as_text(reason))
                case _:
                    return Verdict(_as_bool(value))
        except Exception as error:
            # A method of a user's object may raise anything.
            raise TypeError(f"{shown(value)} of type {type(value).__name__}") from error


def _as_bool(value: object) -> bool:
    match value:
        case bool():
            return value
        case object(shape=(), item=item):
            return _as_bool(item())
        case _:
            raise TypeError(f"{shown(value)} is not a bool")


def _as_text(reason: object) -> str:
    return "filter" if reason is None or reason == "" else plain_text(str(reason))


class DropReason(StrEnum):
    """The reason why a group was dropped without training. Every drop has exactly one."""

    STALE = "stale"
    """Its staleness exceeded `--max-weight-staleness`."""
    FILTERED = "filtered"
    """A filter or a rollout function rejected it."""
    FAILED = "failed"
    """Its generation, reward or filter raised."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Its prompt exceeded `--rollout-max-prompt-len`."""
    ENGINE_LOST = "engine_lost"
    """The engine that generated it was lost."""
    ROUTER_LOST = "router_lost"
    """Its requests reached no engine, because the router did not answer. Its prompt is requeued."""
    WORKER_LOST = "worker_lost"
    """The rollout worker was lost before the group had finished. Its prompt is requeued."""
    ROLLED_BACK = "rolled_back"
    """Weights that were rolled back sampled some of its tokens (`--off-lineage`). Its prompt is requeued."""
    HEAD_DEADLINE = "head_deadline"
    """It was the head of the window for too long (`scheduling/window.py`)."""
    NONFINITE = "nonfinite"
    """The loss or a gradient of its batch was not finite."""
    ABORTED = "aborted"
    """Aborted at the end of a batch; its prompt is requeued."""
    PARTIAL = "partial"
    """Aborted at the end of a batch and requeued with its tokens (`--partial-rollout`)."""
    GIVEN_BACK = "given_back"
    """A rollout function gave it back to the data source. Its prompt is requeued, with the tokens that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The learner's report on one batch, with all its optimizer steps."""

    seconds: float
    """From the beginning of the first optimizer step to the end of the last one."""
    tokens: int
    """Prompt and response tokens of the batch, including samples that need no pass because they have no gradient."""
    finite: bool
    """False if a loss or gradient was not finite; the weights are then unchanged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Loss, gradient norm, clip fraction and others, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerProgress:
    """What a learner has done, for a rollout worker that takes over."""

    rollout: int | None
    """The last batch that the weights were trained on, -1 before the first; None if there are no weights to train."""
    groups: Sequence[int]
    """The sequence numbers of its groups. Empty if the weights come from a checkpoint."""
    report: StepReport | None
    """The report on it; None if the weights come from a checkpoint, or before the first batch."""
    version: int
    """The version that was staged last, or that the weights had when they were saved."""
    staged: bool
    """Whether this learner has staged `version` itself. If not, its weights have to be staged as the next version."""
    changed: str | None
    """The adapter whose weights are newer than its newest version: an empty name if the run trains the model or one
    adapter, None if nothing has changed. A batch trains one adapter, which is published before the next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """The result of writing one weight version to one engine."""

    engine: str
    seconds: float
    """Duration of the write."""
    bytes: int
    error: str | None = None
    """None if every byte arrived and was verified; otherwise one sentence."""
    final: bool = False
    """True if the write must not be retried: the engine is gone, or a write that timed out may still be running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of one engine, or of one of its data-parallel ranks."""

    source: str
    """Identifies the process that reports it: an engine that was restarted has another one."""
    kv_usage: float
    """Fraction of the KV cache in use, 0 to 1."""
    queued: int
    """Requests that wait inside the engine."""
    generated: int
    """Tokens that were generated since the engine's start, for all of its clients, but not for health checks. SGLang
    does not count steps that take longer than two seconds."""
    held: int
    """Tokens of the requests that run now; 0 if none runs."""
