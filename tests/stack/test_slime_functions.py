"""Functions that users wrote for slime work unchanged when a setting names their path."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.config.user_functions import load_function
from miles_async.errors import UserError
from miles_async.pipeline.training import metadata_means
from miles_async.rewards.factory import RunRewards
from miles_async.rollout.contract import RolloutFunctionAdapter, flat_args
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, Sample
from tests.configuration import KEYS, run_config
from tests.sim.world import Trace, World
from workers.functions import BatchPreparation, dynamic_filter

MINE = "tests.stack.slime_functions"


def group(*rewards: Any) -> Group:
    return Group(
        [Sample(index=position, reward=reward) for position, reward in enumerate(rewards)], feed_index="sample_0_0"
    )


def source(folder: Path, **settings: Any) -> BufferedSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{row}", "label": row}) + "\n" for row in range(6)))
    data = {"prompt_data": str(path), **KEYS, "eval_size": 0, "n_samples_per_prompt": 2}
    whole = run_config(**data, **settings)
    checkpoint = whole.model.hf_checkpoint
    tokenizer = None if checkpoint is None else CheckpointTokenizer.of_run(whole.data, checkpoint)
    return open_data(whole, tokenizer=tokenizer)


@pytest.mark.parametrize("key", [None, "acc"])
def test_the_dynamic_filter_with_its_tensor_decides(key: str | None) -> None:
    settings = run_config(dynamic_sampling_filter_path=f"{MINE}.check_reward_nonzero_std", reward_key=key)
    keep = dynamic_filter(settings, flat_args(settings))
    same, apart = ((1.0, 1.0), (0.0, 1.0)) if key is None else (({key: 1.0}, {key: 1.0}), ({key: 0.0}, {key: 1.0}))
    assert [keep(group(*same)).keep, keep(group(*apart)).keep] == [False, True]


def test_the_over_sampling_filter_with_its_tensors_chooses() -> None:
    function = load_function(f"{MINE}.sort_by_reward_std", setting="over_sampling_filter_path")
    rollout = {"rollout_batch_size": 4, "over_sampling_batch_size": 6, "num_rollout": 2, "n_samples_per_prompt": 2}
    world = World(
        config=run_config(**rollout),
        schedule=Schedule.SYNCHRONOUS,
        choose=lambda groups: function(None, groups),
    ).run()
    assert [len(batch) for batch in world.trainer.batches] == [4, 4]
    assert world.audit.violations == []


@pytest.mark.parametrize("name, expected", [("pop_first", ["q0", "q1"]), ("custom_buffer_filter", ["q2", "q1"])])
def test_the_buffer_filters_return_every_group_once(tmp_path: Path, name: str, expected: list[str]) -> None:
    data = source(tmp_path, buffer_filter_path=f"{MINE}.{name}")
    back = data.get_samples(3)
    for position, returned in enumerate(back):
        returned[0].reward = float(position)
    data.add_samples([list(returned) for returned in back])  # type: ignore[misc]
    fed = [groups[0].prompt for groups in data.get_samples(2)]
    assert fed == expected
    left = [str(groups[0].prompt) for groups in data.get_samples(2)]
    assert sorted([*fed, *left]) == ["q0", "q1", "q2", "q3"]


async def test_rewards_of_samples_and_of_groups_are_awaited() -> None:
    async def scored(*responses: str, **settings: Any) -> list[float]:
        samples = [Sample(response=text, response_length=len(text), label="ab") for text in responses]
        scored_group = Group(samples, feed_index="sample_0_0")
        await RunRewards(run_config(**settings), None).score(scored_group)
        return [sample.scalar_reward for sample in scored_group]

    assert await scored("ab", "c", custom_rm_path=f"{MINE}.custom_rm") == [1.0, 0.0]
    grouped = {"custom_rm_path": f"{MINE}.custom_group_rm", "group_rm": True, "reward_key": "score"}
    assert await scored("ab", "c", **grouped) == [1.0, 0.5]


async def test_a_rollout_function_fills_the_groups_of_the_data_buffer(tmp_path: Path) -> None:
    settings = run_config(
        rollout_function_path=f"{MINE}.generate_rollout",
        rollout_batch_size=3,
        n_samples_per_prompt=2,
        reward_key="score",
    )

    async def rate(sample: Sample) -> None:
        sample.rollout_log_probs = [-0.5] * sample.response_length

    function = load_function(settings.rollout.rollout_function_path, setting="rollout_function_path")
    args, data = flat_args(settings), source(tmp_path)
    run: Any = SimpleNamespace(
        get_samples=data.get_samples, trainer_version=0, live_version=0, version_when_taken=lambda sample: 0
    )
    groups = await RolloutFunctionAdapter(function, args, settings, score_tokens=rate)(0, run, 3)
    await BatchPreparation(settings, args, Trace())(0, groups)
    assert [[sample.scalar_reward for sample in trained] for trained in groups] == [[0.0, 1.0]] * 3
    assert [trained.feed_index for trained in groups] == ["sample_0_0", "sample_0_1", "sample_0_2"]
    assert metadata_means([sample for trained in groups for sample in trained]) == {"raw_reward": 0.5}


def test_a_missing_chat_template_is_reported_before_anything_starts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match=r"apply_chat_template is set, but the tokenizer of .* has no chat template"):
        source(tmp_path, apply_chat_template=True, hf_checkpoint=str(tmp_path / "plain"))
