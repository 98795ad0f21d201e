"""`args` of users' functions has the flags of slime and Miles."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from miles_async.compat.miles.flags import FLAGS as MILES
from miles_async.compat.slime.flags import FLAGS as SLIME
from miles_async.config.fields import SETTINGS
from miles_async.config.presets import preset
from miles_async.rollout.contract import Arguments, flat_args
from tests.configuration import run_config


def of(*flags: str) -> Arguments:
    return flat_args(run_config(*flags))


@pytest.mark.parametrize("name", sorted({*SLIME, *MILES} - set(SETTINGS)))
def test_args_has_each_flag_of_slime_and_miles(name: str) -> None:
    _ = getattr(flat_args(run_config()), name)


def test_a_flag_that_was_not_passed_is_none_and_a_switch_is_false() -> None:
    args = of()
    assert args.rollout_max_context_len is args.eval_max_context_len is None
    assert args.eval_prompt_data is args.eval_config is None
    assert args.multimodal_keys is args.start_rollout_id is None
    assert args.use_rollout_routing_replay is args.use_opd is False


def test_a_flag_has_the_value_of_the_setting_that_it_sets() -> None:
    args = of("--rollout-max-context-len", "4096", "--use-tis", "--rollout-health-check-interval", "7")
    assert (args.rollout_max_context_len, args.use_tis, args.rollout_health_check_interval) == (4096, True, 7)
    assert of("--off-policy-correction", "sequence").use_tis is False
    assert of("--disable-grpo-std-normalization").disable_grpo_std_normalization is True
    assert of("--grpo-std-normalization").disable_grpo_std_normalization is False


def test_a_flag_that_accepts_only_what_a_run_does_has_this_value() -> None:
    assert of().train_backend == "megatron"


def test_groups_that_are_not_used_are_generated_again_unless_a_flag_or_the_preset_of_miles_drops_them() -> None:
    for flags, expected in ([], ("retry", 3)), (["--async-unused-samples-handler", "drop"], ("drop", 1)):
        args = of(*flags)
        assert (args.async_unused_samples_handler, args.max_attempts) == expected
    of_preset = flat_args(run_config(max_attempts=preset("miles")["max_attempts"]))
    assert of_preset.async_unused_samples_handler == "drop"
    args = of("--fully-async")
    assert (args.async_unused_samples_handler, args.fully_async, of().fully_async) == ("drop", True, False)


def test_the_flags_of_evaluations_are_those_of_the_data_sets(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    flags = ["--eval-prompt-data", "aime", str(rows), "math", str(rows), "--n-samples-per-eval-prompt", "4"]
    args = of(*flags, "--eval-top-p", "0.7")
    assert args.eval_prompt_data == ["aime", str(rows), "math", str(rows)]
    assert (args.n_samples_per_eval_prompt, args.eval_top_p) == (4, 0.7)
    several = {"a": {"path": str(rows), "top_p": 0.5}, "b": {"path": str(rows)}}
    assert flat_args(run_config(eval_datasets=several)).eval_top_p is None


def test_a_key_of_the_custom_configuration_wins_over_the_flag_of_slime(tmp_path: Path) -> None:
    file = tmp_path / "mis.yaml"
    file.write_text("use_tis: true\ntis_level: token\n")
    args = of("--custom-config-path", str(file))
    assert (args.use_tis, args.tis_level) == (True, "token")


def test_evaluations_may_have_another_context_length_than_the_rollouts() -> None:
    flags = ["--rollout-max-context-len", "4096", "--eval-max-context-len", "16384"]
    args = of(*flags)
    assert (args.rollout_max_context_len, args.eval_max_context_len) == (4096, 16384)
    args = of("--eval-max-context-len", "4096")
    assert (args.rollout_max_context_len, args.eval_max_context_len, args.rollout_max_prompt_len) == (None, 4096, None)
    args = of("--rollout-max-context-len", "4096")
    assert (args.rollout_max_context_len, args.eval_max_context_len) == (4096, 4096)


def test_a_limit_of_the_context_leaves_out_prompts_without_room_for_a_response_and_limits_no_engine() -> None:
    args = of("--rollout-max-context-len", "4096", "--rollout-max-response-len", "4096")
    assert (args.rollout_max_prompt_len, args.rollout_max_response_len) == (4095, 4096)
    assert "context_length" not in args.sglang_server_args
    assert of("--rollout-max-context-len", "4096", "--rollout-max-prompt-len", "100").rollout_max_prompt_len == 100


def test_a_function_may_set_what_is_not_a_setting() -> None:
    args = flat_args(run_config(), tokenizer="of the run")
    args.rollout_max_context_len, args.tokenizer = 100, "its own"
    assert (args.rollout_max_context_len, args.tokenizer) == (100, "its own")
    with pytest.raises(AttributeError, match=r"args\.rollout_batch_size is read-only"):
        args.rollout_batch_size = 1


def test_attributes_of_a_deep_copy_are_its_own_and_the_objects_of_the_run_are_shared() -> None:
    service: Any = object()
    args = flat_args(run_config(), sample_service=service)
    args.results = [1]
    copied = deepcopy(args)
    copied.results.append(2)
    copied.sample = "its own"
    assert (args.results, copied.results, copied.sample_service is service) == ([1], [1, 2], True)
    assert not hasattr(args, "sample")
