"""A run with several data sets: how prompts are chosen, what each data set sets, and what a resume restores."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.feed import RECENT_GROUPS
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.errors import UserError
from miles_async.types import Group
from tests.configuration import KEYS, run_config


def rows_of(folder: Path, name: str, rows: int = 1000, **keys: Any) -> str:
    """A file with prompts such as `math 3`."""
    path = folder / f"{name}.jsonl"
    prompt, label = keys.get("input_key", "prompt"), keys.get("label_key", "label")
    path.write_text("".join(json.dumps({prompt: f"{name} {row}", label: row}) + "\n" for row in range(rows)))
    return str(path)


@pytest.fixture
def datasets(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Two data sets, of which the first gets three of four prompts."""
    return {
        "math": {"prompt_data": rows_of(tmp_path, "math"), "weight": 3},
        "code": {"prompt_data": rows_of(tmp_path, "code")},
    }


def opened(datasets: dict[str, dict[str, Any]], *, said: list[str] | None = None, **settings: Any) -> BufferedSource:
    config = run_config(datasets=datasets, n_samples_per_prompt=2, **{**KEYS, **settings})
    return open_data(config, warn=(said if said is not None else []).append)


def prompts(groups: list[Group]) -> list[Any]:
    return [group[0].prompt for group in groups]


def scored(source: BufferedSource, groups: list[Group], *rewards: float) -> None:
    """Let the data source see the groups with these rewards of their samples."""
    for group in groups:
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = reward
        source.observe(group)


def test_data_sets_take_turns_in_proportion_to_their_weights(datasets: dict[str, dict[str, Any]]) -> None:
    groups = opened(datasets).get_samples(40)
    assert Counter(group.dataset for group in groups) == {"math": 30, "code": 10}
    assert Counter(group.dataset for group in groups[:8]) == {"math": 6, "code": 2}, "at any time, not only in the end"
    assert prompts(groups)[:4] == ["math 0", "math 1", "code 0", "math 2"]


def test_feed_indices_and_sample_indices_are_unique_over_all_data_sets(datasets: dict[str, dict[str, Any]]) -> None:
    groups = opened(datasets).get_samples(8)
    assert [group.feed_index for group in groups] == [f"sample_0_{n}" for n in range(8)]
    assert [sample.index for group in groups for sample in group] == list(range(16))


def test_a_data_set_inherits_what_it_does_not_set(tmp_path: Path) -> None:
    own: dict[str, Any] = {"input_key": "question", "label_key": "answer"}
    datasets = {
        "own": {"prompt_data": rows_of(tmp_path, "own", **own), **own},
        "flat": {"prompt_data": rows_of(tmp_path, "flat", input_key="text")},
    }
    groups = opened(datasets, input_key="text").get_samples(2)
    assert [(group[0].prompt, group[0].label) for group in groups] == [("own 0", 0), ("flat 0", 0)]


class Template:
    """A tokenizer that returns the arguments with which it renders."""

    has_template = True

    def render(self, messages: Any, tools: Any = None, *, template_kwargs: Any) -> str:
        return f"{messages[0]['content']} {template_kwargs}"


def test_a_data_set_may_have_its_own_arguments_of_the_chat_template(datasets: dict[str, dict[str, Any]]) -> None:
    own = {"apply_chat_template_kwargs": {"enable_thinking": True, "depth": 2}}
    config = run_config(
        datasets={**datasets, "code": datasets["code"] | own},
        **KEYS,
        apply_chat_template=True,
        apply_chat_template_kwargs={"enable_thinking": False, "tone": "dry"},
    )
    tokenizer: Any = Template()
    groups = open_data(config, tokenizer=tokenizer).get_samples(3)
    assert prompts(groups)[1:] == [
        "math 1 {'enable_thinking': False, 'tone': 'dry'}",
        "code 0 {'enable_thinking': True, 'tone': 'dry', 'depth': 2}",
    ]


def test_a_broken_data_set_is_named(datasets: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"datasets\.code: prompt_data .*no key 'question'"):
        opened({**datasets, "code": datasets["code"] | {"input_key": "question"}})


def test_problems_that_one_data_set_holds_out_are_fed_from_none(tmp_path: Path) -> None:
    path = rows_of(tmp_path, "math", 8)
    source = opened({"math": {"prompt_data": path, "eval_size": 3}, "same": {"prompt_data": path}})
    held_out = prompts(source.eval_problems())
    assert len(held_out) == 3
    assert not set(held_out) & set(prompts(source.get_samples(20)))
    assert {group.dataset for group in source.eval_problems()} == {"math"}, "so it is scored with the reward of math"


def test_a_resumed_run_continues_each_data_set_and_their_turns(datasets: dict[str, dict[str, Any]]) -> None:
    shuffled: dict[str, Any] = {"rollout_shuffle": True, "dataset_sampling": "difficulty"}
    saved, restored = opened(datasets, **shuffled), opened(datasets, **shuffled)
    scored(saved, saved.get_samples(103), 1.0, 1.0)
    restored.seek(json.loads(json.dumps(saved.position())))
    assert restored.position() == saved.position()
    expected, found = saved.get_samples(200), restored.get_samples(200)
    assert [(group.feed_index, group[0].prompt) for group in found] == [
        (group.feed_index, group[0].prompt) for group in expected
    ]
    assert [feed.state() for feed in restored.feeds.values()] == [feed.state() for feed in saved.feeds.values()]


def test_weights_may_change_with_a_resume(datasets: dict[str, dict[str, Any]]) -> None:
    saved = opened(datasets)
    saved.get_samples(40)
    changed = opened({**datasets, "code": datasets["code"] | {"weight": 9}})
    changed.seek(saved.position())
    assert Counter(group.dataset for group in changed.get_samples(40)) == {"math": 10, "code": 30}


def test_a_saved_position_of_other_data_sets_is_refused(datasets: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    state = opened(datasets).position()
    with pytest.raises(UserError, match="of the data sets math, code, and the run has the data sets math"):
        opened({"math": datasets["math"]}).seek(state)
    with pytest.raises(UserError, match="of the data sets math, code, and the run has one data set"):
        open_data(run_config(**{**datasets["code"], **KEYS, "n_samples_per_prompt": 2})).seek(state)
    shorter = {**datasets, "code": {"prompt_data": rows_of(tmp_path, "short", 5)}}
    with pytest.raises(UserError, match=r"number of rows was 1000 and is 5.*for data set code"):
        opened(shorter).seek(state)


def test_a_resumed_run_trains_the_same_adapter_on_each_data_set(datasets: dict[str, dict[str, Any]]) -> None:
    """Prompts that wait for another attempt name their adapter: under another name, nothing would ever take them."""

    def of_adapters(**adapters: str) -> BufferedSource:
        named = {name: {**datasets[name], "adapter": adapter} for name, adapter in adapters.items()}
        return opened(named, adapters={adapter: {} for adapter in adapters.values()})

    before = of_adapters(math="one", code="two")
    before.get_samples(1, "two")
    state = before.position()
    with pytest.raises(UserError, match="adapter was two and is one"):
        of_adapters(math="one", code="one").seek(state)
    again = of_adapters(math="one", code="two")
    again.seek(state)
    assert [group.adapter for group in again.get_samples(1, "two")] == ["two"]


def test_an_exhausted_data_set_is_said_once(tmp_path: Path, datasets: dict[str, dict[str, Any]]) -> None:
    said: list[str] = []
    source = opened({**datasets, "few": {"prompt_data": rows_of(tmp_path, "few", 3)}}, said=said)
    source.get_samples(60)
    assert said == ["data set few is exhausted: its 3 rows were used once, and are used again"]


def test_a_data_set_that_teaches_nothing_is_said_once_until_its_rewards_differ_again(
    datasets: dict[str, dict[str, Any]],
) -> None:
    said: list[str] = []
    source = opened(datasets, said=said)

    def answered(groups: int, *rewards: float) -> None:
        taken = [group for group in source.get_samples(4 * groups) if group.dataset == "code"]
        scored(source, taken, *rewards)

    answered(RECENT_GROUPS - 1, 1.0, 1.0)
    assert said == []
    answered(5, 1.0, 1.0)
    [sentence] = said
    assert "data set code: the samples of each of its last 32 prompts had the same reward (1 on average)" in sentence
    answered(1, 0.0, 1.0)
    answered(RECENT_GROUPS - 1, 0.0, 0.0)
    assert len(said) == 1
    answered(1, 0.0, 0.0)
    assert "(0 on average)" in said[1]


def test_a_run_with_one_file_is_told_the_same_about_its_data(tmp_path: Path) -> None:
    said: list[str] = []
    config = run_config(prompt_data=rows_of(tmp_path, "math", 30), n_samples_per_prompt=2, **KEYS)
    source, resumed = open_data(config, warn=said.append), open_data(config, warn=said.append)
    scored(source, source.get_samples(30), 1.0, 1.0)
    assert said == []
    resumed.seek(json.loads(json.dumps(source.position())))
    groups = resumed.get_samples(35)
    assert said.pop() == "the data set is exhausted: its 30 rows were used once, and are used again"
    scored(resumed, groups, 1.0, 1.0)
    assert said == [
        "the data set: the samples of each of its last 32 prompts had the same reward (1 on average), so comparing "
        "them teaches nothing: change its prompts"
    ]
    assert "from_dataset" not in groups[0][0].metadata


@pytest.mark.parametrize("settings", [{"datasets": True}, {"prompt_data": True}], ids=["data sets", "one file"])
def test_prompts_outside_of_the_band_are_left_out_of_the_next_epoch(settings: dict[str, Any], tmp_path: Path) -> None:
    path = rows_of(tmp_path, "math", 4)
    data = {"datasets": {"math": {"prompt_data": path}}} if "datasets" in settings else {"prompt_data": path}
    source = open_data(run_config(**data, **KEYS, n_samples_per_prompt=2, dataset_sampling="difficulty"))
    easy, hard, good, other = source.get_samples(4)
    scored(source, [easy], 1.0, 1.0)
    scored(source, [hard], 0.0, 0.0)
    scored(source, [good, other], 0.0, 1.0)
    assert prompts(source.get_samples(2)) == ["math 2", "math 3"]
    assert prompts(source.get_samples(4)) == ["math 0", "math 1", "math 2", "math 3"], "they are tried again"


def test_the_band_can_be_set(tmp_path: Path) -> None:
    settings = {"dataset_sampling": "difficulty", "difficulty_band": [0.0, 0.5], "n_samples_per_prompt": 2}
    source = open_data(run_config(prompt_data=rows_of(tmp_path, "math", 2), **KEYS, **settings))
    hard, easy = source.get_samples(2)
    scored(source, [hard], 0.0, 0.0)
    scored(source, [easy], 1.0, 1.0)
    assert prompts(source.get_samples(2)) == ["math 0", "math 0"]


def test_a_data_set_without_a_prompt_in_the_band_goes_on_with_all(tmp_path: Path) -> None:
    said: list[str] = []
    source = opened({"math": {"prompt_data": rows_of(tmp_path, "math", 4)}}, said=said, dataset_sampling="difficulty")
    scored(source, source.get_samples(4), 1.0, 1.0)
    assert prompts(source.get_samples(1)) == ["math 0"]
    assert said[-1] == "data set math: no prompt has a mean reward within difficulty_band, so all are tried again"


def test_rewards_that_are_not_finite_say_nothing_about_a_prompt(tmp_path: Path) -> None:
    path = rows_of(tmp_path, "math", 2)
    source = opened({"math": {"prompt_data": path}}, dataset_sampling="difficulty")
    scored(source, source.get_samples(2), 1.0, float("nan"))
    assert prompts(source.get_samples(2)) == ["math 0", "math 1"]


@pytest.mark.parametrize("origin", ["mine", {"name": "math"}, {"name": "math", "epochs": "many"}, None])
def test_a_row_may_use_the_key_of_the_origin_for_itself(origin: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "label": 1, "metadata": {"from_dataset": origin}}))
    source = open_data(run_config(prompt_data=str(path), **KEYS, n_samples_per_prompt=2))
    [group] = source.get_samples(1)
    assert group.dataset == ""
    scored(source, [group], 0.0, 1.0)


CHOICES = """
def hardest(args, datasets):
    return min(datasets, key=lambda name: (datasets[name]["reward"] or 0.0, name))

def unknown(args, datasets):
    return "maths"

def broken(args, datasets):
    return datasets["maths"]
"""


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "dataset_choices.py").write_text(CHOICES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "dataset_choices"


def test_a_function_chooses_the_data_set_by_what_was_earned(datasets: dict[str, dict[str, Any]], choices: str) -> None:
    source = opened(datasets, dataset_sampling=f"{choices}.hardest")
    [first] = source.get_samples(1)
    assert first.dataset == "code"
    scored(source, [first], 1.0, 0.5)
    assert source.get_samples(1)[0].dataset == "math"


@pytest.mark.parametrize(
    "function, sentence",
    [
        ("unknown", "dataset_sampling returned 'maths': return one of math, code"),
        ("broken", "dataset_sampling raised KeyError"),
    ],
)
def test_a_choice_that_fails_ends_the_run(
    function: str, sentence: str, datasets: dict[str, dict[str, Any]], choices: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        opened(datasets, dataset_sampling=f"{choices}.{function}").get_samples(1)


def test_labels_for_the_warm_start_come_from_all_data_sets(datasets: dict[str, dict[str, Any]]) -> None:
    examples = opened(datasets).warm_start_problems()
    assert [str(next(examples).prompt).split()[0] for _ in range(4)] == ["math", "code", "math", "code"]
