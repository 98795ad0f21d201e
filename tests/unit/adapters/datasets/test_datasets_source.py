"""The order in which prompts are fed, the rows that are held out, and the errors for broken data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.errors import TemplateError, UserError
from miles_async.modes.shipped import Supervised
from miles_async.types import Group, Sample
from tests.configuration import KEYS, run_config

ROWS = [{"prompt": f"q{i}", "label": f"a{i}", "metadata": {"level": i}} for i in range(6)]


def write_rows(folder: Path, rows: list[Any]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def to_parquet(rows: str, schema: Any = None) -> Path:
    """Convert JSON lines to Parquet. Arrow reads the lines, because a table of Python objects would import pandas."""
    from pyarrow import json as json_lines
    from pyarrow import parquet

    path = Path(rows).with_suffix(".parquet")
    table = json_lines.read_json(rows, parse_options=json_lines.ParseOptions(explicit_schema=schema))
    parquet.write_table(table, path, row_group_size=2)
    return path


def open_rows(path: str, **data: Any) -> BufferedSource:
    settings = {"prompt_data": path, **KEYS, "eval_size": 0, "rollout_shuffle": False} | data
    return open_data(run_config(**settings, n_samples_per_prompt=2))


def prompts(groups: list[Group]) -> list[Any]:
    return [group[0].prompt for group in groups]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path, ROWS)


@pytest.mark.parametrize(
    "prompt, read",
    [
        ('[{"role": "user", "content": "1 + 1"}]', [{"role": "user", "content": "1 + 1"}]),
        ('[{"x": 1}]', '[{"x": 1}]'),
        ('[{"role": "user"', '[{"role": "user"'),
    ],
)
def test_messages_may_be_text_in_json(prompt: str, read: Any, tmp_path: Path) -> None:
    source = open_rows(write_rows(tmp_path, [{"prompt": prompt, "label": "2"}]))
    assert prompts(source.get_samples(1)) == [read]


def test_a_prompt_may_be_the_index_of_a_task_for_a_generate_function(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"index": 0}, {"index": 12}])
    own = {"prompt_data": path, "input_key": "index", "label_key": None}
    source = open_data(run_config(**own, custom_generate_function_path="agents.generate"))
    assert prompts(source.get_samples(2)) == ["0", "12"]
    with pytest.raises(UserError, match="'index' is a int, not a string or a list of messages"):
        open_data(run_config(**own))


def test_a_group_holds_the_samples_of_one_prompt_with_rising_indices(rows: str) -> None:
    first, second = open_rows(rows).get_samples(2)
    assert [sample.prompt for sample in first] == ["q0", "q0"]
    assert [sample.index for sample in (*first, *second)] == [0, 1, 2, 3]
    assert first.feed_index == "sample_0_0"
    assert second[0].label == "a1"
    assert second[0].metadata["level"] == 1
    assert second[0].metadata is not second[1].metadata


def test_feed_indices_continue_over_epochs(rows: str) -> None:
    groups = open_rows(rows).get_samples(8)
    assert prompts(groups) == ["q0", "q1", "q2", "q3", "q4", "q5", "q0", "q1"]
    assert [group.feed_index for group in groups[5:]] == ["sample_0_5", "sample_1_6", "sample_1_7"]


def test_each_epoch_has_another_order_that_depends_on_the_seed(rows: str) -> None:
    fed = prompts(open_rows(rows, rollout_shuffle=True).get_samples(12))
    first, second = fed[:6], fed[6:]
    assert sorted(first) == sorted(second) == [f"q{i}" for i in range(6)]
    assert first != second
    assert first == prompts(open_rows(rows, rollout_shuffle=True).get_samples(6))
    assert first != prompts(open_rows(rows, rollout_shuffle=True, rollout_seed=7).get_samples(6))


def test_recycled_groups_go_first_and_keep_their_feed_index(rows: str) -> None:
    source = open_rows(rows)
    early, later = source.get_samples(2)
    early.reset()
    source.add_samples([early])
    source.add_samples([later])
    assert [group.feed_index for group in source.get_samples(3)] == ["sample_0_0", "sample_0_1", "sample_0_2"]


def test_returned_plain_lists_keep_their_feed_index(rows: str) -> None:
    source = open_rows(rows)
    group = source.get_samples(1)[0]
    source.add_samples([list(group)])  # type: ignore[list-item]
    assert source.get_samples(1)[0].feed_index == "sample_0_0"


def test_an_incomplete_group_cannot_be_returned(rows: str) -> None:
    source = open_rows(rows)
    group = source.get_samples(1)[0]
    group.pop()
    with pytest.raises(UserError, match="group sample_0_0 was returned with 1 samples"):
        source.add_samples([group])


def test_a_restored_source_continues_where_the_saved_one_stopped(rows: str) -> None:
    saved, restored = open_rows(rows, rollout_shuffle=True), open_rows(rows, rollout_shuffle=True)
    saved.get_samples(8)
    restored.seek(json.loads(json.dumps(saved.position())))
    expected, found = saved.get_samples(9), restored.get_samples(9)
    assert found == expected
    assert [group.feed_index for group in found] == [group.feed_index for group in expected]


def test_held_out_rows_are_never_fed_even_if_the_file_repeats_them(tmp_path: Path) -> None:
    source = open_rows(write_rows(tmp_path, ROWS * 3), eval_size=2)
    held_out = prompts(source.eval_problems())
    fed = prompts(source.get_samples(24))
    warm_start = [sample.prompt for sample in islice(source.warm_start_problems(), 50)]
    assert len(set(held_out)) == 2
    assert set(fed) == set(warm_start) == {row["prompt"] for row in ROWS} - set(held_out)


def test_evaluation_gets_fresh_groups_of_one_sample_each_time(rows: str) -> None:
    source = open_rows(rows, eval_size=2)
    before, after = source.eval_problems(), source.eval_problems()
    before[0][0].response = "spent"
    assert [len(group) for group in after] == [1, 1]
    assert after[0][0].response == ""
    assert after[0].feed_index == "eval_0"


def test_holding_out_all_rows_is_refused_with_the_setting_to_change(rows: str) -> None:
    with pytest.raises(UserError, match=r"holds 6 different prompts.*set eval_size below 6"):
        open_rows(rows, eval_size=6)


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"prompt": "q", "label"', r"data\.jsonl, line 2: not valid JSON"),
        ("[1]", r"data\.jsonl, line 2: a list instead of a JSON object"),
        ('{"prompt": "q", "answer": 1}', r"data\.jsonl, line 2: no key 'label' \(label_key\).*'prompt', 'answer'"),
        ('{"prompt": [], "label": 1}', r"data\.jsonl, line 2: 'prompt' is not a list of messages, each with a role"),
        ('{"prompt": [{"content": "q"}], "label": 1}', r"data\.jsonl, line 2: 'prompt' is not a list of messages"),
        ('{"prompt": 3, "label": 1}', r"data\.jsonl, line 2: 'prompt' is a int"),
    ],
)
def test_a_broken_line_is_reported_with_file_and_line_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "q", "label": "a"}}\n{line}\n')
    with pytest.raises(UserError, match=complaint):
        open_rows(str(path))


def report_of(path: str, **data: Any) -> tuple[BufferedSource, list[tuple[str, str]]]:
    """A source over `path`, and the list of the problems that it reports."""
    said: list[tuple[str, str]] = []
    settings = {"prompt_data": path, **KEYS, "eval_size": 0, "rollout_shuffle": False} | data
    config = run_config(**settings, n_samples_per_prompt=2)
    return open_data(config, report=lambda reason, sentence: said.append((reason, sentence))), said


def test_a_broken_row_that_is_found_during_the_run_is_reported_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "q", "label": 1}\n' * 1000 + '{"prompt": "q"}\n{"prompt": "last", "label": 2}\n')
    source, said = report_of(str(path))
    groups = source.get_samples(1001)
    assert groups[-1][0].prompt == "last"
    [(reason, sentence)] = said
    assert reason == "bad_row"
    assert "data.jsonl, line 1001: no key 'label'" in sentence
    assert len(list(islice(source.warm_start_problems(), 3000))) == 3000


def test_rows_without_answers_need_no_label_key(tmp_path: Path) -> None:
    source = open_rows(write_rows(tmp_path, [{"prompt": "q"}]), label_key=None)
    assert source.get_samples(1)[0][0].label is None


def test_the_keys_of_rows_are_those_of_slime_unless_they_are_set(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [{"input": "q", "label": "a", "metadata": {"level": 1}}])
    [[sample]] = open_data(run_config(prompt_data=rows)).get_samples(1)
    assert (sample.prompt, sample.label, sample.metadata["level"]) == ("q", None, 1)


def test_a_key_below_a_key_and_the_name_of_the_data_set_are_read_from_rows_of_verl(tmp_path: Path) -> None:
    answer = {"style": "rule", "ground_truth": "4"}
    row = {"prompt": "2 + 2", "data_source": "openai/gsm8k", "reward_model": answer, "extra_info": {"index": 5}}
    keys = {"label_key": "reward_model.ground_truth", "metadata_key": "extra_info"}
    [[sample, _]] = open_rows(write_rows(tmp_path, [row]), **keys).get_samples(1)
    assert (sample.label, sample.metadata["data_source"], sample.metadata["index"]) == ("4", "openai/gsm8k", 5)


def test_metadata_and_tools_are_read_from_the_configured_keys(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = write_rows(tmp_path, [{"prompt": "q", "label": 1, "extra": {"level": 3}, "functions": tools}])
    [sample, _] = open_rows(path, metadata_key="extra", tool_key="functions").get_samples(1)[0]
    assert (sample.metadata["level"], sample.metadata["tools"]) == (3, tools)
    with pytest.raises(UserError, match=r"line 1: 'label' is a int, not a dict"):
        open_rows(path, metadata_key="label")


@pytest.mark.parametrize(
    "part, expected", [("@[1:3]", ["q1", "q2"]), ("@[-2:]", ["q4", "q5"]), ("@[:1]", ["q0"]), ("@[4:99]", ["q4", "q5"])]
)
def test_a_range_of_rows_can_be_selected(rows: str, part: str, expected: list[str]) -> None:
    assert prompts(open_rows(rows + part).get_samples(len(expected) + 1)) == [*expected, expected[0]]


def test_an_empty_range_of_rows_is_refused(rows: str) -> None:
    with pytest.raises(UserError, match=r"data\.jsonl@\[9:\] has no rows"):
        open_rows(rows + "@[9:]")


def test_parquet_is_read_like_jsonl(tmp_path: Path, rows: str) -> None:
    path = to_parquet(rows)
    config = run_config(
        prompt_data=f"{path}@[1:]",
        **KEYS,
        eval_size=0,
        rollout_shuffle=False,
        n_samples_per_prompt=2,
        cache_dir=str(tmp_path / "cache"),
    )
    groups = open_data(config).get_samples(6)
    assert prompts(groups) == ["q1", "q2", "q3", "q4", "q5", "q1"]
    assert groups[0][0].metadata["level"] == 1
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError, match="is not a valid Parquet file"):
        open_data(config)


def test_dates_of_a_parquet_file_are_fed_as_text(tmp_path: Path) -> None:
    import pyarrow as pa

    when, time = "2026-01-02T03:04:05", pa.timestamp("s", tz="UTC")
    rows = write_rows(tmp_path, [{"prompt": "1+1", "label": f"{when}Z", "metadata": {"when": f"{when}Z"}}])
    path = to_parquet(rows, pa.schema({"prompt": pa.string(), "label": time, "metadata": pa.struct({"when": time})}))
    [group] = open_rows(str(path), cache_dir=str(tmp_path)).get_samples(1)
    assert (group[0].label, group[0].metadata["when"]) == (f"{when}+00:00", f"{when}+00:00")


def test_without_data_blank_samples_are_fed_with_rising_indices() -> None:
    source = open_data(run_config(disable_rollout_global_dataset=True, n_samples_per_prompt=2))
    [first, second] = source.get_samples(2)
    assert [sample.index for sample in (*first, *second)] == [0, 1, 2, 3]
    assert (first[0].prompt, second.feed_index) == ("", "sample_0_1")


def test_a_saved_position_of_other_data_is_refused(rows: str) -> None:
    state = open_rows(rows, rollout_shuffle=True).position()
    with pytest.raises(UserError, match="rollout_shuffle was True and is False"):
        open_rows(rows).seek(state)


def test_a_saved_position_of_changed_data_is_refused(rows: str) -> None:
    state = open_rows(rows).position()
    text = Path(rows).read_text()
    Path(rows).write_text(text.replace("1", "2", 1))
    with pytest.raises(UserError, match="content was"):
        open_rows(rows).seek(state)
    Path(rows).write_text(text)
    state["order"]["n_samples_per_prompt"] = 4
    with pytest.raises(UserError, match="n_samples_per_prompt was 4 and is 2"):
        open_rows(rows).seek(state)


def test_a_saved_position_of_another_slice_of_the_same_length_is_refused(rows: str) -> None:
    state = open_rows(f"{rows}@[0:3]").position()
    with pytest.raises(UserError, match=r"slice of prompt_data was \[0:3\] and is \[1:4\]"):
        open_rows(f"{rows}@[1:4]").seek(state)


@pytest.fixture
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_buffer.py").write_text(SEED_FILTERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_buffer"
    sys.modules.pop("my_buffer", None)


SEED_FILTERS = """
def custom_buffer_filter(args, rollout_id, buffer, num_samples):
    sorted_buffer = sorted(buffer, key=lambda x: x[0].reward, reverse=True)
    return sorted_buffer[:num_samples]

def pop_last(args, rollout_id, buffer, num_samples):
    return [list(buffer.pop()) for _ in range(min(num_samples, len(buffer)))]

def everything(args, rollout_id, buffer, num_samples):
    taken = list(reversed(buffer))
    buffer.clear()
    return taken

def throw_away(args, rollout_id, buffer, num_samples):
    buffer.clear()
    return []
"""


def returned(source: BufferedSource, *rewards: float | None) -> None:
    """Groups with these rewards go back to the source."""
    for group, reward in zip(source.get_samples(len(rewards)), rewards, strict=True):
        for sample in group:
            sample.reward = reward
        source.add_samples([group])


def test_a_buffer_filter_of_slime_that_removes_no_group_returns_each_group_once(rows: str, filters: str) -> None:
    source, said = report_of(rows, buffer_filter_path=f"{filters}.custom_buffer_filter")
    returned(source, 0.1, 0.9, 0.5)
    assert prompts(source.get_samples(2)) == ["q1", "q2"]
    assert prompts(source.get_samples(2)) == ["q0", "q3"]
    assert said == []


def test_a_buffer_filter_that_removes_what_it_returns_works_too(rows: str, filters: str) -> None:
    source, said = report_of(rows, buffer_filter_path=f"{filters}.pop_last")
    returned(source, None, None)
    assert prompts(source.get_samples(3)) == ["q1", "q0", "q2"]
    assert said == []


def test_groups_beyond_the_requested_number_return_to_the_buffer(rows: str, filters: str) -> None:
    source, said = report_of(rows, buffer_filter_path=f"{filters}.everything")
    returned(source, None, None, None)
    assert [prompts(source.get_samples(1)) for _ in range(4)] == [["q2"], ["q1"], ["q0"], ["q3"]]
    assert said == []


def test_a_buffer_filter_that_raises_or_discards_groups_is_reported(rows: str, filters: str) -> None:
    source, said = report_of(rows, buffer_filter_path=f"{filters}.custom_buffer_filter")
    returned(source, None, None)
    assert prompts(source.get_samples(2)) == ["q0", "q1"]
    assert [reason for reason, _ in said] == ["buffer_filter_raised"]
    source, said = report_of(rows, buffer_filter_path=f"{filters}.throw_away")
    returned(source, None)
    assert prompts(source.get_samples(1)) == ["q1"]
    assert said == [("buffer_filter_removed", "buffer_filter_path removed group sample_0_0 without returning it")]


class Template:
    """A tokenizer that returns the arguments with which it renders."""

    has_template = True

    def render(self, messages: Any, tools: Any = None, *, template_kwargs: Any = None) -> str:
        if messages[0]["content"] == "unfit":
            raise TemplateError("roles must alternate")
        return json.dumps([messages, tools])


def test_a_buffer_filter_that_is_a_coroutine_function_is_refused(rows: str) -> None:
    with pytest.raises(UserError, match=r"buffer_filter_path 'asyncio\.sleep' is async"):
        open_rows(rows, buffer_filter_path="asyncio.sleep")


def rendered(path: str, **data: Any) -> tuple[BufferedSource, list[str]]:
    """A source that renders the prompts of `path`, and the list of the sentences that it reports."""
    said: list[str] = []
    settings = {"prompt_data": path, **KEYS, "eval_size": 0, "apply_chat_template": True} | data
    tokenizer: Any = Template()
    return open_data(run_config(**settings), tokenizer=tokenizer, report=lambda reason, text: said.append(text)), said


def test_chats_are_rendered_with_tools_and_unfit_ones_are_skipped(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path, [{"prompt": "unfit", "label": 1}, {"prompt": "hi", "label": 1, "tools": [{"name": "t"}]}]
    )
    source, said = rendered(path)
    messages, tools = json.loads(str(source.get_samples(1)[0][0].prompt))
    assert messages == [{"role": "user", "content": "hi"}]
    assert tools == [{"name": "t"}]
    assert said == ["the prompt 'unfit' cannot be used: roles must alternate"]


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q", "images": None}]


def test_prompts_that_are_lists_of_messages_stay_messages(tmp_path: Path) -> None:
    source = open_rows(write_rows(tmp_path, [{"prompt": CHAT, "label": 1}]))
    group = source.get_samples(1)[0]
    assert [sample.prompt for sample in group] == [CHAT, CHAT]
    assert Group.from_prompt_dict(json.loads(json.dumps(group.prompt_dict())))[0].prompt == CHAT
    messages = group[0].messages
    messages[0]["content"] = "changed by an agent"
    assert (group[0].prompt, group[1].messages) == (CHAT, CHAT)
    assert Sample(prompt="q").messages == [{"role": "user", "content": "q"}]


def test_supervised_conversations_stay_messages_also_if_prompts_are_rendered(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": CHAT, "label": 1}, {"prompt": "text", "label": 1}])
    source, _ = rendered(path, rollout_function_path=Supervised.function)
    messages, text = (group[0].prompt for group in source.get_samples(2))
    assert messages == CHAT
    assert isinstance(text, str)
    assert json.loads(text)[0] == [{"role": "user", "content": "text"}]


def test_a_byte_order_mark_and_windows_line_ends_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(Path(write_rows(tmp_path, ROWS)).read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    assert prompts(open_rows(str(path)).get_samples(2)) == ["q0", "q1"]


def test_blank_lines_are_skipped_and_the_keys_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('\n{"q": "é", "a": 1}\n\n{"q": "last", "a": 2}')
    groups = open_rows(str(path), input_key="q", label_key="a").get_samples(2)
    assert [(group[0].prompt, group[0].label) for group in groups] == [("é", 1), ("last", 2)]


def test_a_missing_data_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read: No such file"):
        open_rows(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(UserError, match="no data: set prompt_data"):
        open_data(run_config())


def test_chats_without_a_tokenizer_are_refused_with_the_setting_to_change(rows: str) -> None:
    with pytest.raises(UserError, match="set hf_checkpoint"):
        open_rows(rows, apply_chat_template=True)
