"""What users, clients and data hand in becomes plain or is refused where it enters, and costs only its sample."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.adapters.agents.trajectories import TrajectoryBuffer
from miles_async.adapters.datasets.rows import JsonlRows
from miles_async.errors import DataRowError, TrajectoryError
from miles_async.events import GroupFiltered, decode, encode
from miles_async.json_values import UnrepresentableError, finite_number, json_value, shown, shown_error
from miles_async.parsing import decode_json, parse
from miles_async.pipeline.checkpoint import progress_of
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.training import metadata_means
from miles_async.rewards import grader_pool
from miles_async.rewards.rewarder import Rewarder
from miles_async.rollout.contract import flat_args
from miles_async.sample_schema import PostedSample, accept_values
from miles_async.token_values import TokenValues
from miles_async.types import Group, Sample, SampleStatus, Verdict, VersionSpan
from tests.configuration import run_config
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import DirectJournal, Feed, Trace, lifecycle_of
from workers.functions import dynamic_filter


def own_member() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    "value, reason",
    [
        (own_member(), "is nested more than 64 levels deep"),
        ({"a": Mute()}, "contains an object of class Mute that cannot be read: RuntimeError: no text"),
        ([10**5000], "contains an object of class int that cannot be read: ValueError"),
    ],
)
def test_a_value_that_cannot_be_represented_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(UnrepresentableError) as error:
        json_value(value)
    assert str(error.value).startswith(reason)


def test_any_object_can_be_shown_in_an_error_message() -> None:
    assert shown(Mute()) == "an object of class Mute"
    assert shown_error(KeyError(Mute())) == "KeyError: (its message cannot be read)"
    assert shown_error(ValueError("half \ud83d")) == "ValueError: half ?"
    assert len(shown("x" * 10_000)) < 1000


@pytest.mark.parametrize(
    "value, number",
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(2.0), 2.0),
        ("1", None),
        (None, None),
        (10**400, None),
        (float("nan"), None),
        (1e308, None),
        (np.array([1.0, 2.0]), None),
        (Mute(), None),
    ],
)
def test_a_number_of_any_library_becomes_a_float(value: Any, number: float | None) -> None:
    assert finite_number(value) == number


@pytest.mark.parametrize(
    "field, value, plain",
    [
        ("index", np.int64(3), 3),
        ("metadata", {"score": np.float32(0.5), 1: (2,)}, {"score": 0.5, "1": [2]}),
        ("label", np.array([1, 2]), [1, 2]),
        ("response", "half \ud83d", "half ?"),
        ("tokens", [np.int64(1), 2], TokenValues([1, 2], "int32")),
        ("rollout_log_probs", np.array([-1]), TokenValues([-1.0], "float32")),
        ("loss_mask", [True], TokenValues([1], "int8")),
        ("remove_sample", np.bool_(True), True),
        ("status", "truncated", SampleStatus.TRUNCATED),
        ("prompt", ({"role": "user", "content": "Q"},), [{"role": "user", "content": "Q"}]),
    ],
)
def test_a_field_becomes_plain(field: str, value: Any, plain: Any) -> None:
    sample = Sample(index=7, tokens=[1, 2], response_length=1)
    setattr(sample, field, value)
    accept_values(sample)
    assert getattr(sample, field) == plain
    assert type(getattr(sample, field)) is type(plain)


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("metadata", None, "its metadata is None and not a dictionary"),
        ("metadata", {"a": own_member()}, "its metadata['a'] is nested more than 64 levels deep"),
        ("label", own_member(), "its label is nested more than 64 levels deep"),
        ("response", b"text", "its response is b'text' and not a text"),
        ("prompt", 3, "its prompt is 3 and neither a text nor a list of messages"),
        ("status", "done", "its status cannot be 'done'"),
        ("remove_sample", "no", "its remove_sample is 'no' and not a bool"),
        ("tokens", [1, "2"], "tokens[1]: expected int, got str"),
        ("tokens", own_member(), "tokens is nested"),
        ("sampling_mask", 3, "sampling_mask: expected array, got int"),
        ("spans", [VersionSpan("1", 0, 1)], "spans[0].version: expected int, got str"),  # type: ignore[arg-type]
    ],
)
def test_a_field_that_is_refused_is_named_and_leaves_a_plain_sample(field: str, value: Any, reason: str) -> None:
    sample = Sample(index=7, tokens=[1, 2], response_length=1)
    setattr(sample, field, value)
    with pytest.raises(TrajectoryError) as error:
        accept_values(sample)
    assert str(error.value).startswith("sample 7: ")
    assert reason in str(error.value)
    json.dumps(sample.to_dict())
    accept_values(sample)


def test_a_checkpoint_can_be_written_while_a_function_of_a_user_changes_a_sample() -> None:
    run_state, feed = RunState(VirtualClockOf(), DirectJournal(Trace())), Feed()
    lifecycle = lifecycle_of(run_state, feed)
    group = Group([Sample(index=0, prompt="Q", metadata={"rows": [1]})], feed_index="sample_0_0")
    lifecycle.feed(group)
    group[0].metadata["score"] = np.float32(0.5)
    group[0].metadata["rows"].append(own_member())
    progress = progress_of(0, run_state, lifecycle, lambda: (feed.position(), []))
    [owed] = json.loads(json.dumps(progress))["owed"]
    assert owed["samples"][0]["metadata"] == {"rows": [1]}


def test_a_prompt_that_is_fed_again_is_the_one_that_is_owed() -> None:
    group = Group([Sample(index=0, prompt="Q", label="A", metadata={"a": [1]})], feed_index="sample_0_0")
    group.track_prompt()
    group[0].label, group[0].metadata = None, {}
    group.reset()
    assert (group[0].prompt, group[0].label, group[0].metadata) == ("Q", "A", {"a": [1]})


class VirtualClockOf(VirtualClock):
    """A clock that stands still, for tests without a loop."""

    def __init__(self) -> None:
        self.monotonic = lambda: 0.0
        self._wall_offset = 0.0


@pytest.mark.parametrize("reward", [None, "1/2", {"acc": 1.0}, [1.0], 10**400, float("nan"), own_member()])
def test_a_raw_reward_that_is_no_number_is_left_out_of_the_means(reward: Any) -> None:
    samples = [Sample(metadata={"raw_reward": 1.0, "round_number": 2}), Sample(metadata={"raw_reward": reward})]
    samples[1].metadata["round_number"] = np.int64(4)
    assert metadata_means(samples) == {"round_number": 3.0}


@pytest.mark.parametrize("reward", [10**400, 1e308, np.array([1.0, 2.0]), Mute(), {"score": own_member()}])
def test_a_reward_that_cannot_be_trained_on_costs_only_its_sample(reward: Any) -> None:
    async def function(args: Any, sample: Sample) -> Any:
        return reward if sample.index else {"score": np.float32(0.5)}

    group = Group([Sample(index=0), Sample(index=1)], feed_index="sample_0_0")
    rewarder = Rewarder(function, None, name="my.reward", timeout_seconds=5.0, reward_key="score")
    with pytest.raises(TrajectoryError, match=r"sample 1: .*my\.reward") as error:
        asyncio.run(rewarder.score(group))
    assert error.value.samples == [group[1]]
    assert group[0].scalar_reward == 0.5


def test_a_dictionary_without_reward_key_costs_only_its_sample() -> None:
    async def function(args: Any, sample: Sample) -> Any:
        return 1.0 if sample.index else {"score": 1.0}

    group = Group([Sample(index=0), Sample(index=1)])
    with pytest.raises(TrajectoryError, match=r"sample 0: .*set reward_key to one of score") as error:
        asyncio.run(Rewarder(function, None, name="my.reward", timeout_seconds=5.0).score(group))
    assert error.value.samples == [group[0]]


def sometimes(args: Any, group: Group) -> Any:
    group.clear()
    return args.verdicts.pop(0)


def test_a_filter_loses_only_the_group_for_which_it_returns_nonsense() -> None:
    config = run_config(dynamic_sampling_filter_path=f"{__name__}.sometimes")
    verdicts = [Verdict(False, 0.25), Mute(), Verdict(True, Mute())]  # type: ignore[arg-type]
    keep, group = dynamic_filter(config, flat_args(config, verdicts=verdicts)), Group([Sample(index=0)])
    verdict = keep(group)
    event = GroupFiltered(time=0.0, sequence=0, reason=verdict.reason)
    assert decode(encode(event)) == event
    for _ in range(2):
        with pytest.raises(TrajectoryError, match=r"dynamic_sampling_filter_path .*sometimes returned"):
            keep(group)
    assert len(group) == 1, "the filter had a copy of the list"


@pytest.mark.parametrize(
    "content", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"\xff", b"1e999"]
)
def test_json_that_cannot_be_decoded_is_refused_with_a_sentence(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        decode_json(content, dict[str, Any])
    (tmp_path / "data.jsonl").write_bytes(content + b"\n")
    with pytest.raises(DataRowError, match=r"data.jsonl, line 1: not valid JSON: "):
        JsonlRows(tmp_path / "data.jsonl")[0]


def posted(**fields: Any) -> dict[str, Any]:
    spans = [{"version": 0, "start": 0, "end": 1}]
    sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0], "weight_versions": spans}
    return {**sample, "reward": 1.0, **fields}


@pytest.mark.parametrize(
    "fields, key, reason",
    [
        ({}, "caf\udce9", "the idempotency key is not valid UTF-8"),
        ({"reward": 1e308}, None, "the reward 1e\\+308 is not finite or too large"),
        ({"metadata": {"a": own_member()}}, None, "its metadata is nested more than 64 levels deep"),
    ],
)
def test_a_posted_value_that_cannot_be_stored_is_refused_before_it_is_recorded(
    fields: dict[str, Any], key: str | None, reason: str
) -> None:
    buffer = TrajectoryBuffer(4, 1, log=DirectJournal(Trace()))
    with pytest.raises(InvalidRequestError, match=reason):
        asyncio.run(buffer.add([posted(**fields)], lambda name: [], lambda name: None, key=key))
    assert buffer._groups.empty()


def test_an_error_message_has_no_half_of_a_surrogate_pair() -> None:
    assert str(TrajectoryError("KeyError: \ud83d")) == "KeyError: ?"


async def test_objects_in_metadata_reach_the_reward_of_the_user_and_are_plain_afterwards() -> None:
    """A generate function may hand a game, or a dictionary with integers as keys, to the reward function."""
    sample = Sample(index=0, prompt="?", metadata={"moves": {1: "e4"}, "board": Path("board")})
    accept_values(sample, keeps_objects=True)
    assert sample.to_dict()["metadata"] == {"moves": {"1": "e4"}, "board": "board"}
    seen: list[Any] = []

    def reward(args: Any, scored: Sample) -> float:
        seen.append((scored.metadata["moves"][1], scored.metadata["board"].name))
        return 1.0

    rewarder = Rewarder(reward, None, name="mine.reward", timeout_seconds=5.0)
    await rewarder.score(Group([sample], feed_index="sample_0_0"))
    await rewarder.close()
    assert seen == [("e4", "board")]
    assert sample.metadata == {"moves": {"1": "e4"}, "board": "board"}


@pytest.mark.parametrize("posted", [{"loss_mask": ["\ud8b0"]}, {"\ud8b0": 1}])
def test_half_a_surrogate_pair_in_place_of_a_number_or_as_a_key_is_an_error_of_the_sample(posted: Any) -> None:
    with pytest.raises(TrajectoryError, match="sample 3: a text has half of a surrogate pair; send valid UTF-8"):
        parse(posted, PostedSample, "sample 3")


def test_a_sample_with_an_object_that_cannot_be_pickled_reaches_a_grader_as_text() -> None:
    lock = threading.Lock()
    samples = [Sample(metadata={"moves": (1, 2)}), Sample(metadata={"lock": lock})]
    kept, sent = pickle.loads(grader_pool._request_of(samples))
    assert (kept.metadata["moves"], sent.metadata["lock"]) == ([1, 2], str(lock))
    [alone] = pickle.loads(grader_pool._request_of(samples[:1]))
    assert alone.metadata == {"moves": (1, 2)}
