"""What users' rollout functions are called with, and what they may return."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_async.columns.column import NO_LIMITS
from miles_async.compat.slime.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from miles_async.config.schema import Section
from miles_async.config.user_functions import load_function
from miles_async.errors import TrajectoryError, UserError
from miles_async.observability.console.logging import configure_logging, log_file
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import as_groups, call_rollout_function, flat_args
from miles_async.sample_schema import check_sample
from miles_async.types import Group, Sample
from tests.configuration import run_config


def finished(index: int | None, prompt: str = "q", feed_index: str = "sample_0_0") -> Sample:
    return Sample(
        index=index,
        prompt=prompt,
        metadata={"feed_index": feed_index},
        tokens=[1, 2, 3],
        response_length=2,
        rollout_log_probs=[-0.1, -0.2],
    )


class NoData:
    """A data source that is handed on but never asked."""


async def call(function: Any, *, evaluation: bool = False) -> Any:
    source: RolloutSource = NoData()  # type: ignore[assignment]
    args = flat_args(run_config(), sglang_router_port=30000)
    return await call_rollout_function(function, args, 5, source, evaluation=evaluation)


def test_args_has_an_attribute_for_every_setting_and_every_value_of_the_run() -> None:
    config = run_config(rollout_batch_size=7)
    args = flat_args(config, sglang_router_ip="127.0.0.1")
    assert args.rollout_batch_size == 7
    assert args.tiny_hidden_size == config.model.tiny_model.hidden_size
    assert args.sglang_router_ip == "127.0.0.1"


def test_args_has_the_attributes_that_users_add() -> None:
    args = flat_args(run_config(custom_args={"tis_level": "token", "rollout_batch_size": 1}))
    assert args.tis_level == "token"
    assert args.rollout_batch_size == 32, "a setting is not replaced"


def test_setting_names_are_unique_in_args() -> None:
    def names(section: Section) -> list[str]:
        found = []
        for name, value in section:
            found += names(value) if isinstance(value, Section) else [section.flag_prefix + name]
        return found

    flat = names(run_config())
    assert len(flat) == len(set(flat))


def test_args_have_the_clip_range_and_the_mean_of_the_objective_if_these_are_unset() -> None:
    args = flat_args(run_config(advantage_estimator="gspo", eps_clip_high=0.01))
    assert (args.eps_clip, args.eps_clip_high, args.loss_aggregation) == (3e-4, 0.01, "sequence_mean")


def test_settings_are_read_only_in_args_which_suggest_the_nearest_setting() -> None:
    args = flat_args(run_config())
    with pytest.raises(AttributeError, match=r"args\.lr is read-only"):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="did you mean 'rollout_batch_size'"):
        _ = args.rollout_batchsize


def test_an_attribute_that_a_function_sets_is_seen_by_all_functions_of_the_process() -> None:
    args = flat_args(run_config(custom_args={"level": "token"}))
    of_generation = args.with_values(turns="its turns")
    of_generation.level, of_generation.tools = "sample", ["search"]
    assert (args.level, args.tools, args.with_values(rollout_batch_size=1).tools) == ("sample", ["search"], ["search"])
    assert not hasattr(flat_args(run_config()), "tools"), "another run"


def test_args_can_be_sent_to_another_process_with_what_functions_have_set() -> None:
    args = flat_args(run_config(n_samples_per_prompt=8))
    args.tools = ["search"]
    sent = pickle.loads(pickle.dumps(args))
    assert (sent.n_samples_per_prompt, sent.tools) == (8, ["search"])


async def test_an_async_function_is_awaited_with_all_documented_arguments() -> None:
    async def function(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        await asyncio.sleep(0)
        return args.sglang_router_port, rollout_id, type(data_source), evaluation

    assert await call(function, evaluation=True) == (30000, 5, NoData, True)


async def test_a_plain_function_does_not_block_the_event_loop() -> None:
    def function(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        return threading.current_thread()

    assert await call(function) is not threading.main_thread()


async def test_a_plain_function_that_returns_a_coroutine_is_awaited_too() -> None:
    async def later(rollout_id: int) -> int:
        return rollout_id

    assert await call(lambda args, rollout_id, data_source, evaluation: later(rollout_id)) == 5


@pytest.mark.parametrize(
    "output", [RolloutFnTrainOutput([[finished(0)]]), RolloutFnEvalOutput({"set": {"rewards": [1.0]}}, {"rate": 0.5})]
)
async def test_the_contents_of_the_output_objects_of_slime_are_taken(
    output: RolloutFnTrainOutput | RolloutFnEvalOutput,
) -> None:
    contents = output.samples if isinstance(output, RolloutFnTrainOutput) else output.data
    assert await call(lambda *arguments, evaluation: output) is contents


class Plain:
    """An object that JSON does not know, as a key or a value."""

    def __str__(self) -> str:
        return "plain"


@pytest.mark.usefixtures("_logging_restored")
@pytest.mark.parametrize(
    "metrics, logged",
    [
        ({name: 0.5}, {name: 0.5})
        for name in ("rollout", "event", "level", "logger", "timestamp", "exc_info", "self", "metrics", "", "a/b c")
    ]
    + [
        ({1: 2, ("a", 1): 3, None: 4}, {"1": 2, "['a', 1]": 3, "None": 4}),
        ({Plain(): Plain()}, {"plain": "plain"}),
        ({"of_numpy": np.float32(0.5), "nested": {2: np.arange(2)}}, {"of_numpy": 0.5, "nested": {"2": [0, 1]}}),
        ([("accuracy", 0.5)], {"values": [["accuracy", 0.5]]}),
        (np.array([0.5, 1.5]), {"values": [0.5, 1.5]}),
    ],
)
async def test_metrics_of_any_shape_and_with_any_names_are_in_the_log(
    metrics: Any, logged: Any, tmp_path: Path
) -> None:
    configure_logging("json")
    lines = tmp_path / "run.jsonl"
    with log_file(lines):
        contents = await call(lambda *arguments, evaluation: RolloutFnTrainOutput([[finished(0)]], metrics))
    assert contents == [[finished(0)]]
    line = json.loads(lines.read_text())
    assert (line["event"], line["rollout"], line["metrics"]) == ("metrics of the rollout function", 5, logged)


async def test_an_object_with_an_async_call_runs_in_the_event_loop() -> None:
    class Rollout:
        async def __call__(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
            return asyncio.get_running_loop()

    assert await call(Rollout()) is asyncio.get_running_loop()


def test_groups_are_returned_unchanged() -> None:
    group = Group([finished(0), finished(1)], feed_index="sample_0_0", attempt=2, sequence=9)
    assert as_groups([group], 2, 2)[0] is group


def test_lists_of_samples_become_groups_with_their_feed_index() -> None:
    groups = as_groups([[finished(0), finished(1)], [finished(2, "r", "sample_0_1"), finished(3, "r")]], 2, 2)
    assert [type(group) for group in groups] == [Group, Group]
    assert [group.feed_index for group in groups] == ["sample_0_0", "sample_0_1"]


def test_a_flat_list_in_any_order_is_grouped_by_index() -> None:
    groups = as_groups([finished(index) for index in (3, 0, 1, 2)], 2, 2)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]


def test_a_flat_list_without_indices_is_grouped_in_order() -> None:
    groups = as_groups([finished(None, prompt) for prompt in "aabb"], 2, 2)
    assert [[sample.prompt for sample in group] for group in groups] == [["a", "a"], ["b", "b"]]


def test_an_empty_batch_is_accepted() -> None:
    assert as_groups([], 2, 2) == []


def test_a_group_of_the_wrong_size_is_reported_with_its_sample() -> None:
    with pytest.raises(
        UserError, match=r"1 samples in the group of sample 4 \(sample_0_0\): n_samples_per_prompt is 2"
    ):
        as_groups([finished(4)], 2, 2)
    with pytest.raises(UserError, match="3 samples in the group of sample 4"):
        as_groups([[finished(4), finished(5), finished(6)]], 2, 2)


def test_a_sample_that_stands_for_two_responses_is_refused() -> None:
    sample = finished(4)
    with pytest.raises(UserError, match=r"a sample twice in the group of sample 4"):
        as_groups([[sample, sample]], 2, 2)


def test_wrong_lengths_are_reported_with_their_sample() -> None:
    mask, logprobs, tokens = finished(6), finished(7), finished(8)
    mask.loss_mask = [1]
    logprobs.rollout_log_probs = [-0.1]
    tokens.tokens = [1]
    for sample, complaint in (
        (mask, "sample 6: loss_mask has 1 entries; response_length is 2"),
        (logprobs, "sample 7: rollout_log_probs has 1 entries; response_length is 2"),
        (tokens, "sample 8: tokens has 1 entries, fewer than response_length 2"),
    ):
        with pytest.raises(TrajectoryError, match=complaint):
            check_sample(sample, NO_LIMITS, None)


@pytest.mark.parametrize("result", [None, {"samples": []}, [None], [[]], [["text"]]])
def test_another_return_type_is_refused(result: Any) -> None:
    with pytest.raises(UserError, match="the rollout function returned"):
        as_groups(result, 2, 2)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_rollout.py").write_text("SIZE = 3\n\ndef generate_rollout(): return 'mine'\n")
    (tmp_path / "my_broken.py").write_text("raise ValueError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rollout"
    for name in ("my_rollout", "my_broken"):
        sys.modules.pop(name, None)


def test_a_function_is_loaded_by_its_path(user_module: str) -> None:
    assert load_function(f"{user_module}.generate_rollout", setting="x")() == "mine"


@pytest.mark.parametrize(
    "path, complaint",
    [
        ("generate", "rollout_function_path 'generate' names no function of a module: write module.function"),
        ("my_rollouts.f", "'my_rollouts.f' cannot be imported: ModuleNotFoundError: No module named 'my_rollouts'"),
        ("my_broken.f", "'my_broken.f' cannot be imported: ValueError: no licence"),
        ("my_rollout.generate_rollouts", "no function 'generate_rollouts'; did you mean generate_rollout?"),
        ("my_rollout.SIZE", "'my_rollout.SIZE' is a int, not a function"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_a_function_that_cannot_be_loaded_is_refused(path: str, complaint: str) -> None:
    with pytest.raises(UserError) as error:
        load_function(path, setting="rollout_function_path")
    assert complaint in str(error.value)
