"""Settings that follow from others, and what is said about values that others take the place of."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow.parquet import write_table

from miles_async.config.flags import Flags, parse_flags
from miles_async.config.load import config_of_values
from miles_async.config.schema import RunConfig
from miles_async.modes.shipped import Stream


def resolved(line: str) -> tuple[RunConfig, Flags]:
    flags = parse_flags(line.split())
    config, found = config_of_values(flags)
    assert found == []
    return config, flags


def problems(line: str) -> list[str]:
    return config_of_values(parse_flags(line.split()))[1]


def rows(path: Path, count: int) -> Path:
    path.write_text('{"prompt": "a"}\n' * count)
    return path


def test_epochs_become_a_number_of_batches(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", 100)
    config, _ = resolved(f"--prompt-data {data} --num-epoch 3 --rollout-batch-size 32")
    assert config.rollout.num_rollout == 9
    config, _ = resolved(f"--prompt-data {data}@[10:42] --num-epoch 2 --rollout-batch-size 32")
    assert config.rollout.num_rollout == 2


def test_each_epoch_is_rounded_down_to_whole_batches_unless_it_has_none(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", 100)
    for size, batches in ((60, 7), (51, 7), (101, 6), (1000, 1)):
        config, _ = resolved(f"--prompt-data {data} --num-epoch 7 --rollout-batch-size {size}")
        assert config.rollout.num_rollout == batches


def test_rows_of_parquet_files_and_a_last_line_without_an_end_are_counted(tmp_path: Path) -> None:
    write_table(pa.table({"prompt": ["a"] * 64}), tmp_path / "rows.parquet")
    config, _ = resolved(f"--prompt-data {tmp_path}/rows.parquet --num-epoch 1 --rollout-batch-size 32")
    assert config.rollout.num_rollout == 2
    (tmp_path / "two.jsonl").write_text("{}\n{}")
    config, _ = resolved(f"--prompt-data {tmp_path}/two.jsonl --num-epoch 4 --rollout-batch-size 2")
    assert config.rollout.num_rollout == 4


def test_a_number_of_batches_takes_the_place_of_epochs(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", 100)
    assert resolved(f"--prompt-data {data} --num-epoch 3 --num-rollout 5")[0].rollout.num_rollout == 5


@pytest.mark.parametrize("prompts", ["--reasoning-gym-task chain_sum", "--prompt-data owner/name"])
def test_epochs_need_a_file(prompts: str) -> None:
    [sentence] = problems(f"--num-epoch 3 {prompts}")
    assert sentence == "num_epoch needs the number of prompts, which only a file in prompt_data has: set num_rollout"


def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.parquet", 1)
    [sentence] = problems(f"--num-epoch 3 --prompt-data {data}")
    assert sentence.startswith(f"prompt_data {data} is not a Parquet file (")


def test_a_micro_batch_holds_the_longest_sample() -> None:
    config, flags = resolved("--max-tokens-per-gpu 8192 --rollout-max-response-len 8192")
    assert config.learner.max_tokens_per_gpu == 8193
    assert flags.notes == [
        "a sample may have 8193 tokens (rollout_max_prompt_len + rollout_max_response_len), so max_tokens_per_gpu is "
        "8193 instead of 8192"
    ]


def test_context_parallel_ranks_share_the_longest_sample() -> None:
    config, _ = resolved("--max-tokens-per-gpu 100 --rollout-max-response-len 1000 --context-parallel-size 2")
    assert config.learner.micro_batch_tokens >= 1001
    assert config.learner.max_tokens_per_gpu == 502


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    config, flags = resolved("--sequence-parallel")
    assert config.learner.sequence_parallel is False
    assert flags.notes == ["sequence_parallel has no effect, because tensor_model_parallel_size is 1"]
    config, flags = resolved("--sequence-parallel --tensor-model-parallel-size 2")
    assert (config.learner.sequence_parallel, flags.notes) == (True, [])


def test_a_function_scores_in_place_of_a_built_in_reward_as_in_slime() -> None:
    sets = (
        "eval_datasets={a: {path: a.jsonl, rm_type: math, custom_rm_path: mine.f}, b: {path: b.jsonl, rm_type: math}}"
    )
    flags = parse_flags(["--rm-type", "exakt", "--custom-rm-path", "mine.reward", f"rollout.{sets}"])
    config, found = config_of_values(flags)
    assert found == []
    assert (config.rollout.rm_type, config.rollout.custom_rm_path) == (None, "mine.reward")
    assert {name: one.rm_type for name, one in config.rollout.eval_datasets.items()} == {"a": None, "b": "math"}
    assert flags.notes == [
        "rm_type exakt has no effect, because custom_rm_path is set",
        "eval_datasets.a.rm_type math has no effect, because eval_datasets.a.custom_rm_path is set",
    ]


def test_arguments_of_older_versions_of_sglang_have_their_new_names() -> None:
    config, flags = resolved("--sglang-cuda-graph-max-bs 16")
    assert config.engine.sglang_server_args == {"cuda_graph_max_bs_decode": 16}
    assert flags.notes == ["--sglang-cuda-graph-max-bs is cuda-graph-max-bs-decode in the installed SGLang"]


def test_a_tensor_parallelism_of_engines_may_be_repeated() -> None:
    config, _ = resolved("--rollout-num-gpus 4 --rollout-num-gpus-per-engine 4 --sglang-tp-size 4")
    assert config.engine.sglang_server_args == {}


@pytest.mark.parametrize("name", ["slime.rollout.data_source.RolloutDataSourceWithBuffer", "my.Source"])
def test_slimes_own_data_source_is_the_data_of_the_run(name: str) -> None:
    config, _ = resolved(f"--data-source-path {name}")
    assert config.data.data_source_path == (name if name == "my.Source" else None)
    assert not config.rollout.slime_imports  # type: ignore[attr-defined]


UNTRIED = "--sglang-ep-size 2 --rollout-num-gpus-per-engine 2 --rollout-num-gpus 2"


@pytest.mark.parametrize(
    "line, transport, note",
    [
        (
            f"--update-weight-transfer-mode p2p {UNTRIED}",
            "broadcast",
            "--update-weight-transfer-mode p2p is broadcast here, because how --sglang-ep-size divides it was never "
            "tried",
        ),
        (
            f"--update-weight-mode delta --update-weight-transport disk {UNTRIED}",
            "disk",
            "--update-weight-mode --update-weight-transport disk_delta is disk here, because how --sglang-ep-size "
            "divides it was never tried",
        ),
        (
            "--update-weight-transfer-mode broadcast --lora-rank 8",
            None,
            "--update-weight-transfer-mode has no effect, because engines load adapters from files",
        ),
    ],
)
def test_a_flag_of_miles_or_slime_for_weights_that_the_engines_cannot_take_chooses_another_transport(
    line: str, transport: str | None, note: str
) -> None:
    config, flags = resolved(line)
    assert config.weights.weight_transfer == transport
    assert note in flags.notes


@pytest.mark.parametrize("line", ["--update-weight-transfer-mode p2p", f"--weight-transfer p2p {UNTRIED}"])
def test_the_transport_stays_if_engines_take_it_or_if_our_own_setting_names_it(line: str) -> None:
    config, flags = resolved(line)
    assert config.weights.weight_transfer == "p2p"
    assert not any("transfer" in note for note in flags.notes)


def test_the_function_of_miles_for_continuous_generation_drops_groups_and_says_so() -> None:
    for line in ("--fully-async", "--rollout-function-path miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"):
        config, flags = resolved(line)
        assert config.rollout.rollout_function_path == Stream.function
        assert config.rollout.max_attempts == 1
        assert "like miles (default here in parentheses): max_attempts 1 (3)" in flags.notes


@pytest.mark.parametrize(
    "line",
    [
        "--fully-async --async-unused-samples-handler retry",
        "--fully-async --max-attempts 3",
        f"--rollout-function-path {Stream.function}",
        "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    ],
)
def test_groups_have_several_attempts_if_that_is_set_or_the_script_is_not_recognised_as_one_of_miles(line: str) -> None:
    config, flags = resolved(line)
    assert config.rollout.max_attempts == 3
    assert not any(note.startswith("like ") for note in flags.notes)
