"""Rows and evaluation data sets choose their reward, as in slime."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import eval_groups, open_data
from miles_async.config.schema import RunConfig
from miles_async.errors import InfrastructureError, TrajectoryError, UserError
from miles_async.rewards.factory import RunRewards
from miles_async.rewards.plugin import REWARDS, Reward
from miles_async.rewards.rewarder import Rewarder
from miles_async.types import FROM_DATASET, Group, Sample
from tests.configuration import KEYS, run_config
from tests.plugin_packages import install_plugin
from tests.scoring import scored
from tests.unit.config.test_config_checks import refusal

RECORDED = json.loads(Path(__file__).with_name("slime_rewards.json").read_text())
"""What slime's `async_rm` chooses; see `record_slime_rewards.py`."""
CHECKED_AT_START = 1000


def of_run(args: Any, sample: Sample) -> float:
    return 2.0


def of_data_set(args: Any, sample: Sample) -> dict[str, float]:
    return {"right": 3.0, "short": 4.0}


Rows = Sequence[Mapping[str, Any]]
OWN = {"mine.run": f"{__name__}.of_run", "mine.data_set": f"{__name__}.of_data_set"}


def own(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the paths of this module's functions."""
    return {name: OWN.get(value, value) for name, value in values.items()}


def rows_file(folder: Path, rows: Rows) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "label": "a", **row}) + "\n" for i, row in enumerate(rows)))
    return str(path)


def configured(folder: Path, rows: Rows, **settings: Any) -> RunConfig:
    path = rows_file(folder, rows)
    data_set = {"path": path} | settings.pop("data_set", {})
    defaults = {"prompt_data": path, **KEYS, "eval_size": 0, "eval_datasets": {"d": data_set}, "rm_type": "exact"}
    return run_config(**defaults | settings)


def chosen_here(record: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    names = []

    async def score(rewarder: Rewarder, group: Group) -> None:
        names.append(rewarder.name)

    monkeypatch.setattr(Rewarder, "score", score)
    row = {} if record["row"] is None else {"metadata": {"rm_type": record["row"]}}
    config = configured(folder, [row], **own(record["run"]), data_set=own(record["data_set"] or {}))
    rewards = RunRewards(config, None)
    dataset = config.rollout.eval_datasets["d"]
    if record["data_set"] is None:
        asyncio.run(rewards.score(open_data(config).get_samples(1)[0]))
    else:
        asyncio.run((rewards.of(dataset) or rewards).score(eval_groups(config, "d", dataset)[0]))
    [name] = names
    return next((recorded for recorded, path in OWN.items() if path == name), name)


def test_the_reward_of_a_sample_is_the_one_that_slime_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    different = [
        (record["run"]["custom_rm_path"], record["data_set"], record["chosen"], chosen)
        for record in RECORDED
        if (chosen := chosen_here(record, tmp_path, monkeypatch)) != record["chosen"]
    ]
    # slime ignores the `rm_type` of a data set without a word if the run has a custom reward.
    assert different == [("mine.run", {"rm_type": "gpqa"}, "mine.run", "gpqa")] * 5


async def test_samples_of_several_rows_are_scored_by_their_own_rewards() -> None:
    rewards = RunRewards(run_config(rm_type="exact"), None)
    group = Group(
        [
            Sample(index=0, label="a b", response="b a"),
            Sample(index=1, label="a b", response="b a", metadata={"rm_type": "f1"}),
            Sample(index=2, label="a", response=r"\boxed{a}", metadata={"rm_type": "boxed_exact"}),
        ]
    )
    await rewards.score(group)
    assert [sample.reward for sample in group] == [0.0, 1.0, 1.0]
    await rewards.close()


async def test_the_failures_of_several_rewards_name_their_samples() -> None:
    rewards = RunRewards(run_config(rm_type="exact", rm_url="http://127.0.0.1:9", remote_rm_retries=0), None)
    group = Group(
        [
            Sample(index=0, label="a", response="a"),
            Sample(index=1, label="a", metadata={"rm_type": "remote_rm"}),
            Sample(index=2, metadata={"rm_type": "f1"}),
        ]
    )
    with pytest.raises(TrajectoryError, match="sample 2: reward f1 raised TypeError: the label is None") as raised:
        await rewards.score(group)
    assert raised.value.samples == [group[2]]
    with pytest.raises(InfrastructureError) as unreachable:
        await rewards.score(Group(group[:2]))
    assert unreachable.value.samples == [group[1]]
    assert [sample.reward for sample in group] == [1.0, None, None]
    await rewards.close()


class Own(Reward):
    """A reward without a name."""

    def score(self, args: Any, sample: Sample) -> float:
        return 5.0


async def test_a_setting_may_name_the_class_of_a_reward_by_its_path_but_a_row_may_not(tmp_path: Path) -> None:
    path = f"{__name__}.Own"
    assert await scored("a", rm_type=path) == [5.0]
    with pytest.raises(TrajectoryError, match=rf"rm_type '{path}' is unknown"):
        await scored("a", metadata={"rm_type": path}, rm_type="exact")
    with pytest.raises(UserError, match=rf"line 1: 'metadata': rm_type '{path}' is unknown"):
        open_data(configured(tmp_path, [{"metadata": {"rm_type": path}}]))


async def test_a_reward_that_a_users_function_has_named_wrongly_fails_its_samples() -> None:
    rewards = RunRewards(run_config(rm_type="exact"), None)
    group = Group([Sample(index=0, label="a", response="a", metadata={"rm_type": "exakt"})], feed_index="sample_0_0")
    with pytest.raises(TrajectoryError, match="group sample_0_0: rm_type 'exakt' is unknown: set code"):
        await rewards.score(group)


@pytest.mark.parametrize(
    "name, said", [("exakt", "'exakt' is unknown: set"), ("remote_rm", "remote_rm needs a reward")]
)
def test_an_unusable_reward_among_the_first_rows_is_refused(name: str, said: str, tmp_path: Path) -> None:
    config = configured(tmp_path, [{}, {"metadata": {"rm_type": name}}])
    with pytest.raises(UserError, match=rf"rows.jsonl, line 2: 'metadata': rm_type {said}"):
        open_data(config)
    with pytest.raises(UserError, match=rf"rows.jsonl, line 2: 'metadata': rm_type {said}"):
        eval_groups(config, "d", config.rollout.eval_datasets["d"])


def test_the_reward_that_a_row_names_has_no_effect_and_is_not_checked_under_a_custom_reward(tmp_path: Path) -> None:
    row = {"metadata": {"rm_type": "ifbench"}}
    assert open_data(configured(tmp_path, [row], rm_type=None, custom_rm_path=OWN["mine.run"])).get_samples(1)
    config = configured(tmp_path, [row], data_set={"rm_type": "f1"}, rm_type=None, custom_rm_path=OWN["mine.run"])
    assert eval_groups(config, "d", config.rollout.eval_datasets["d"])


def test_a_later_row_with_an_unknown_reward_is_invalid_and_counted(tmp_path: Path) -> None:
    rows: Rows = [*[{}] * CHECKED_AT_START, {"metadata": {"rm_type": "exakt"}}, {}]
    config = configured(tmp_path, rows, n_samples_per_prompt=1, rollout_shuffle=False)
    said = []
    data = open_data(config, report=lambda reason, sentence: said.append((reason, sentence)))
    data.get_samples(CHECKED_AT_START + 1)
    [(reason, sentence)] = said
    assert reason == "bad_row"
    assert "line 1001: 'metadata': rm_type 'exakt' is unknown" in sentence


def test_the_invalid_rows_of_an_evaluation_data_set_are_counted_once_and_said(tmp_path: Path) -> None:
    rows: Rows = [*[{}] * CHECKED_AT_START, {"metadata": {"rm_type": "exakt"}}, {}, {"metadata": 7}]
    config, said = configured(tmp_path, rows), list[str]()
    groups = eval_groups(config, "d", config.rollout.eval_datasets["d"], warn=said.append)
    assert len(groups) == CHECKED_AT_START + 1
    [warning] = said
    assert warning.startswith("d: 2 rows are invalid and are left out, so 1001 problems are evaluated; the first")
    assert "line 1001: 'metadata': rm_type 'exakt' is unknown" in warning
    assert eval_groups(config, "d", config.rollout.eval_datasets["d"].model_copy(update={"size": 3}), warn=said.append)
    assert len(said) == 1


async def test_a_data_set_with_its_own_function_may_have_its_own_key(tmp_path: Path) -> None:
    own_reward = {"custom_rm_path": OWN["mine.data_set"], "reward_key": "short"}
    config = configured(tmp_path, [{}], data_set=own_reward)
    rewarder = RunRewards(config, None).of(config.rollout.eval_datasets["d"])
    assert rewarder is not None
    [group] = eval_groups(config, "d", config.rollout.eval_datasets["d"])
    await rewarder.score(group)
    assert group.rewards == [4.0]


def test_rows_and_data_sets_that_name_the_same_reward_share_its_processes(tmp_path: Path) -> None:
    config = configured(tmp_path, [{}], rm_type="math", data_set={"rm_type": "math"})
    rewards = RunRewards(config, None)
    rewards.of(config.rollout.eval_datasets["d"])
    assert [name for name, _ in rewards._opened] == ["math"]


def test_the_reward_of_a_data_set_is_checked_before_the_start(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{}])

    def said(**data_set: Any) -> str:
        return refusal(eval_datasets={"aime": {"path": path} | data_set})

    assert "eval_datasets.aime: rm_type 'exakt' is unknown: set code" in said(rm_type="exakt")
    assert "eval_datasets.aime: rm_type remote_rm needs a reward server" in said(rm_type="remote_rm")
    config = configured(tmp_path, [{}], data_set={"custom_rm_path": "no_such_module.f"})
    with pytest.raises(UserError, match=r"custom_rm_path 'no_such_module\.f' cannot be imported"):
        RunRewards(config, None).of(config.rollout.eval_datasets["d"])


@pytest.mark.parametrize("name", REWARDS.shipped)
def test_each_built_in_reward_is_documented(name: str) -> None:
    guide = Path(__file__).parents[3] / "docs/how-to/model-data-reward.md"
    assert f"| `{name}` |" in guide.read_text()


def install_strict(folder: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> str:
    """Install a reward named `strict` with this method. Return how sentences name the reward."""
    source = f"from miles_async.rewards.plugin import Reward\nclass Strict(Reward):\n    {method}\n"
    install_plugin(folder, monkeypatch, REWARDS, "strict", "raising_reward:Strict", source)
    return "the entry point strict = raising_reward:Strict of the distribution users"


async def test_a_reward_of_a_package_that_raises_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = install_strict(tmp_path, monkeypatch, "def score(self, args, sample): return sample.metadata['length']")
    rewards = RunRewards(run_config(rm_type="strict"), None)
    with pytest.raises(TrajectoryError) as raised:
        await rewards.score(Group([Sample(index=3, response="a")]))
    assert str(raised.value) == f"sample 3: reward strict ({origin}) raised KeyError: 'length'"
    await rewards.close()


def test_a_reward_of_a_package_that_does_not_open_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = install_strict(tmp_path, monkeypatch, "def open(self, settings): return settings.length")
    with pytest.raises(UserError, match=f"^{origin} failed to open: AttributeError: .*; correct the plug-in$"):
        RunRewards(run_config(rm_type="strict"), None)


def test_a_reward_of_a_package_that_fails_to_check_the_run_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = install_strict(tmp_path, monkeypatch, "def missing(self, config): return config.length")
    assert f"{origin} failed to check the run: AttributeError" in refusal(rm_type="strict")


def rows_of_verl(folder: Path, *sources: str) -> RunConfig:
    """A run on rows of verl, each of another data set."""
    rows = [{"data_source": source, "reward_model": {"ground_truth": "7"}, "extra_info": {}} for source in sources]
    keys = {**KEYS, "label_key": "reward_model.ground_truth", "metadata_key": "extra_info", "rm_type": "data_source"}
    return run_config(prompt_data=rows_file(folder, rows), eval_size=0, n_samples_per_prompt=1, **keys)


async def test_the_data_source_of_a_row_chooses_its_reward(tmp_path: Path) -> None:
    config = rows_of_verl(tmp_path, "openai/gsm8k", "math_dapo", "aime2024", "HuggingFaceH4/MATH-500")
    groups = open_data(config).get_samples(4)
    rewards = RunRewards(config, None)
    for group in groups:
        group[0].response = "#### 7"
        await rewards.score(group)
    await rewards.close()
    # `dapo` looks for an `Answer:` line, and `math` takes the last number without a box.
    assert [group[0].scalar_reward for group in groups] == [1.0, -1.0, -1.0, 1.0]


def test_a_data_source_without_a_reward_is_refused_with_what_to_set(tmp_path: Path) -> None:
    sentence = "a row has data_source 'codecontests', which has no reward: set another rm_type than data_source"
    with pytest.raises(UserError, match=sentence):
        open_data(rows_of_verl(tmp_path, "codecontests"))


def from_dataset(name: str, **sample: Any) -> Group:
    return Group([Sample(index=0, metadata={FROM_DATASET: {"name": name, "epochs": 0.0}}, **sample)])


async def test_each_data_set_for_training_may_have_its_own_reward() -> None:
    datasets = {
        "words": {"prompt_data": "a", "rm_type": "f1"},
        "mine": {"prompt_data": "b", "custom_rm_path": OWN["mine.run"]},
        "flat": {"prompt_data": "c"},
    }
    rewards = RunRewards(run_config(datasets=datasets, rm_type="exact"), None)
    groups = {name: from_dataset(name, label="a b", response="b a") for name in ("words", "mine", "flat", "other")}
    for group in groups.values():
        await rewards.score(group)
    await rewards.close()
    assert [groups[name][0].reward for name in ("words", "flat", "other")] == [1.0, 0.0, 0.0]
    assert ("f1", None) in rewards._opened
    assert (OWN["mine.run"], None) in rewards._opened


async def test_a_run_needs_no_reward_of_its_own_if_each_data_set_has_one() -> None:
    rewards = RunRewards(run_config(datasets={"words": {"prompt_data": "a", "rm_type": "f1"}}, rm_type=None), None)
    await rewards.score(group := from_dataset("words", label="a b", response="b a"))
    assert group[0].reward == 1.0
    with pytest.raises(TrajectoryError, match="belongs to no data set"):
        await rewards.score(from_dataset("other", label="a b", response="b a"))
    await rewards.close()
