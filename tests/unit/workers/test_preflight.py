"""Errors that are found before any process starts."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from miles_async.adapters.storage.rollout_file import save_groups
from miles_async.adapters.storage.warm_starts import Example
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import TrajectoryError, UserError
from miles_async.rollout.contract import flat_args
from miles_async.types import Group, Sample
from tests.configuration import KEYS, run_config
from tests.unit.gym import CHAIN_SUM
from workers.functions import dynamic_filter
from workers.preflight import (
    HTTP2_PREFACE,
    HTTP2_SETTINGS,
    check_ray,
    lock_checkpoints,
    preflight,
)

RUNNABLE = CHAIN_SUM | {"rm_type": "reasoning_gym", "eval_size": 0}


def config(**settings: Any) -> RunConfig:
    return run_config(**RUNNABLE | settings)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "preflight_mine.py").write_text(
        "def rewarded(args, group):\n"
        "    return group[0].reward >= args.tis_clip\n"
        "def broken(args, group):\n"
        "    return group[9]\n"
        "def generate(args, rollout_id, data_source, evaluation=False):\n"
        "    return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "preflight_mine"
    sys.modules.pop("preflight_mine", None)


def test_a_valid_run_passes_and_needs_no_labels_without_a_warm_start() -> None:
    checked = preflight(config())
    assert (checked.problems, checked.check) == ([], [])


def test_a_run_that_only_trains_needs_neither_data_nor_a_reward_but_its_batches(tmp_path: Path) -> None:
    path = tmp_path / "0.st"
    settings = {"reasoning_gym_task": None, "rm_type": None, "load_debug_rollout_data": str(path)}
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 1}
    with pytest.raises(UserError, match=r"rollout data .*0\.st cannot be read"):
        preflight(config(**settings, **sizes))
    save_groups(path, 0, [group(1.0)])
    preflight(config(**settings, **sizes))
    with pytest.raises(UserError, match="holds 1 groups: set rollout_batch_size to 1"):
        preflight(config(**settings))


@pytest.mark.parametrize("setting", ["over_sampling_filter_path", "rollout_sample_filter_path", "buffer_filter_path"])
def test_a_filter_that_cannot_be_imported_is_named_with_its_setting(setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting} 'nowhere.f' cannot be imported"):
        preflight(config(**{setting: "nowhere.f"}))


def test_a_warm_start_gets_separate_examples_for_training_and_for_the_check() -> None:
    checked = preflight(config(warm_start_max_steps=1))
    assert (len(checked.check), len(checked.problems)) == (512, 8192)


def test_a_warm_start_formats_prompts_with_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.preflight.WARM_START_EXAMPLES", 1)
    plain, chat = (
        preflight(config(warm_start_max_steps=1, warm_start_template=template)).check[0]
        for template in ("{prompt}", "user: {prompt}<eos>assistant: ")
    )
    assert chat == Example(f"user: {plain.prompt}<eos>assistant: ", plain.answer)


def test_a_function_makes_several_examples_of_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.preflight.WARM_START_EXAMPLES", 1)
    settings = config(warm_start_max_steps=1, warm_start_examples_path=f"{__name__}.two_examples")
    [first, second, third] = preflight(settings).check[:3]
    assert (first.answer, second.answer) == ("first", "second")
    assert first.prompt == second.prompt != third.prompt


def test_a_function_may_yield_the_examples_of_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.preflight.WARM_START_EXAMPLES", 1)
    settings = config(warm_start_max_steps=1, warm_start_examples_path=f"{__name__}.yielded_examples")
    assert preflight(settings).check[0].answer == "first"


def chats(folder: Path) -> dict[str, Any]:
    """Settings of a run whose rows are lists of messages with tools."""
    path = folder / "chats.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{row}?"}], "label": row, "tools": [{}]} for row in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"prompt_data": str(path), **KEYS, "reasoning_gym_task": None, "rm_type": "exact", "warm_start_max_steps": 1}


def test_a_warm_start_gets_the_messages_and_tools_of_a_row(tmp_path: Path) -> None:
    first = preflight(config(**chats(tmp_path))).problems[0]
    assert first == Example([{"role": "user", "content": f"{first.answer}?"}], first.answer, [{}])


def test_a_text_template_of_the_warm_start_is_refused_for_messages(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="warm_start_template is a template for texts, and the prompts of the data are lists"
    ):
        preflight(config(**chats(tmp_path), warm_start_template="Q: {prompt}"))


def test_a_tokenizer_that_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        preflight(config(hf_checkpoint=str(tmp_path)))


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    weights.unlink()
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(UserError) as refused:
        preflight(
            config(
                hf_checkpoint=str(tmp_path),
                run_dir=str(tmp_path / "file" / "runs"),
                agent_port=holder.getsockname()[1],
                dynamic_sampling_filter_path="nowhere.keep",
                reasoning_gym_task="chain_sun",
            )
        )
    beginnings = ["hf_checkpoint", "run_dir", "agent_port", "dynamic_sampling_filter_path", "reasoning_gym_task"]
    assert [sentence.split()[0] for sentence in refused.value.args] == beginnings
    assert str(refused.value).splitlines() == list(refused.value.args)


def test_checks_that_depend_on_a_failed_one_are_left_out(tmp_path: Path) -> None:
    """Without the tokenizer nothing can be said about the prompts."""
    checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    data = {"prompt_data": str(tmp_path / "rows.jsonl"), "reasoning_gym_task": None, "rm_type": "exact"}
    with pytest.raises(UserError) as refused:
        preflight(config(hf_checkpoint=str(tmp_path), apply_chat_template=True, **data))
    [sentence] = refused.value.args
    assert "tokenizer.json is not a valid tokenizer" in sentence


def yielded_examples(sample: Sample) -> Iterator[tuple[str, str]]:
    yield from two_examples(sample)


def two_examples(sample: Sample) -> list[tuple[str, str]]:
    return [(str(sample.prompt), "first"), (str(sample.prompt), "second")]


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"reasoning_gym_task": "chain_sun"}, "reasoning_gym_task 'chain_sun' is unknown; did you mean chain_sum"),
        ({"rollout_function_path": "nowhere.generate"}, "rollout_function_path 'nowhere.generate' cannot be imported"),
        ({"rm_type": None, "custom_rm_path": "nowhere.reward"}, "custom_rm_path 'nowhere.reward' cannot be imported"),
        ({"dynamic_sampling_filter_path": "nowhere.keep"}, "dynamic_sampling_filter_path 'nowhere.keep' cannot be"),
    ],
)
def test_an_unavailable_resource_is_named_with_its_setting(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        preflight(config(**settings))


def checkpoint(folder: Path) -> Path:
    """A checkpoint's files as far as they are looked at before anything starts; returns the weights file."""
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    save_file({"weight": np.zeros(1000, np.float32)}, folder / "model.safetensors")
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    return folder / "model.safetensors"


def test_a_checkpoint_whose_weights_are_missing_or_cut_off_is_named(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    settings = config(hf_checkpoint=str(tmp_path))
    preflight(settings)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=rf"hf_checkpoint {tmp_path}: model\.safetensors is broken: .*; copy the file again"
    ):
        preflight(settings)
    weights.unlink()
    with pytest.raises(UserError, match=r"holds no \*\.safetensors"):
        preflight(settings)


@pytest.mark.parametrize("parameters", ["args, rollout_id, data_source", "rollout_id, data_source, evaluation=False"])
def test_a_rollout_function_with_an_older_signature_is_refused_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"older_{len(parameters)}"
    (tmp_path / f"{name}.py").write_text(f"def rollout({parameters}): ...\n")
    with pytest.raises(UserError, match=r"write fn\(args, rollout_id, data_source, evaluation=False\)"):
        load_function(f"{name}.rollout", setting="rollout_function_path")


def group(reward: float) -> Group:
    sample = Sample(index=0, tokens=[1, 2], response_length=1, rollout_log_probs=[-0.5], reward=reward)
    return Group([sample], feed_index="sample_0_0")


def test_the_configured_filter_decides_which_groups_are_kept(user_module: str) -> None:
    settings = config(dynamic_sampling_filter_path=f"{user_module}.rewarded", tis_clip=2.0)
    keep = dynamic_filter(settings, flat_args(settings))
    assert [keep(group(1.0)).keep, keep(group(3.0)).keep] == [False, True]
    keep_all = dynamic_filter(config(), flat_args(config()))
    assert keep_all(group(1.0))


def test_a_filter_that_raises_fails_the_group(user_module: str) -> None:
    settings = config(dynamic_sampling_filter_path=f"{user_module}.broken")
    with pytest.raises(TrajectoryError, match=r"group sample_0_0: filter preflight_mine\.broken raised IndexError"):
        dynamic_filter(settings, flat_args(settings))(group(1.0))


@pytest.mark.parametrize("kind", ["dynamic_sampling", "over_sampling", "rollout_sample"])
def test_a_filter_that_is_a_coroutine_function_is_refused(kind: str) -> None:
    """A coroutine counts as true: the dynamic filter would keep every group."""
    settings = {f"{kind}_filter_path": "asyncio.sleep", "over_sampling_batch_size": 64}
    with pytest.raises(UserError, match=rf"{kind}_filter_path 'asyncio.sleep' is async: write it with a plain def"):
        preflight(config(**settings))


@pytest.mark.parametrize("setting", ["agent_port", "metrics_port", "sglang_router_port"])
def test_a_port_in_use_is_reported_before_anything_starts(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(
            UserError,
            match=rf"{setting} {port} is not available \(Address already in use\): set --.*-port to a free port",
        ):
            preflight(config(**{setting: port}))


@pytest.mark.parametrize("setting", ["run_dir", "store_dir", "save"])
def test_a_folder_that_is_not_writable_is_reported_before_anything_starts(tmp_path: Path, setting: str) -> None:
    (tmp_path / "file").touch()
    settings = config(**{setting: str(tmp_path / "file" / "runs")})
    complaint = rf"{setting} {tmp_path}/file/runs is not writable: set --.* to a folder that is"
    with pytest.raises(UserError, match=complaint), lock_checkpoints(settings):
        preflight(settings)


def test_a_ray_address_without_a_cluster_is_reported() -> None:
    check_ray(None)
    check_ray("auto")
    with pytest.raises(UserError, match=r"no Ray cluster answers at ray_address 127\.0\.0\.1:9 .*refused"):
        check_ray("127.0.0.1:9")


@pytest.mark.parametrize("answer, ray", [(HTTP2_SETTINGS, True), (b"HTTP/1.1 505 HTTP Version Not Supported", False)])
def test_another_server_at_the_address_of_a_ray_cluster_is_detected(answer: bytes, ray: bool) -> None:
    """The dashboard's, say: Ray itself would go on trying for minutes."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(len(HTTP2_PREFACE))
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(serve, listener)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with (
            nullcontext()
            if ray
            else pytest.raises(UserError, match=f"{address} is not the address of a Ray head node: set the port")
        ):
            check_ray(address)
