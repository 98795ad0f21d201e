from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import notes, problems
from miles_async.config.generation import bounds_of, schedule_of, takes_from_queue
from miles_async.config.learning_rate import learning_rate
from miles_async.config.model_shape import reference_of
from miles_async.config.schema import RunConfig
from miles_async.config.table import table
from miles_async.errors import UserError
from miles_async.modes.shipped import External, Stream, Supervised
from miles_async.scheduling.bounds import Schedule
from tests.configuration import run_config
from tests.planned_models import checkpoint

RUNNABLE: dict[str, Any] = {
    "reasoning_gym_task": "chain_sum",
    "rm_type": "reasoning_gym",
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 8,
    "rollout_skip_special_tokens": True,
}
ASYNC: dict[str, Any] = {"rollout_function_path": Stream.function}


def config(**settings: Any) -> RunConfig:
    return run_config(**RUNNABLE | settings)


def refusals(entry: str = "train_async.py", /, **settings: Any) -> list[str]:
    return problems(config(**settings), entry)


def refusal(entry: str = "train_async.py", /, **settings: Any) -> str:
    (sentence,) = refusals(entry, **settings)
    return sentence


def test_a_valid_configuration_is_accepted() -> None:
    assert refusals() == []
    assert refusals(**ASYNC, max_weight_staleness=2, windowed_fifo_ratio=0.3) == []
    assert refusals("train.py", max_weight_staleness=0) == []


@pytest.mark.parametrize(
    "sizes, advice",
    [
        ((128, 1), "set global_batch_size to 256, or num_steps_per_rollout to 2, or rollout_batch_size to 16"),
        ((24, 2), "set global_batch_size to 128, or rollout_batch_size to 6"),
        ((100, 3), "set global_batch_size to 128 and num_steps_per_rollout to 2"),
        ((None, 3), "set num_steps_per_rollout to 2"),
        ((100, None), "set global_batch_size to 128, or rollout_batch_size to 25"),
    ],
)
def test_incompatible_batch_sizes_are_refused_with_the_nearest_compatible_ones(
    sizes: tuple[int | None, int | None], advice: str
) -> None:
    size, steps = sizes
    said = refusal(rollout_batch_size=32, n_samples_per_prompt=8, global_batch_size=size, num_steps_per_rollout=steps)
    assert said.endswith(advice)
    assert "rollout_batch_size 32 * n_samples_per_prompt 8 = 256 samples" in said


def test_compatible_batch_sizes_are_accepted() -> None:
    sizes = {"rollout_batch_size": 32, "n_samples_per_prompt": 8}
    assert refusals(**sizes, global_batch_size=64, num_steps_per_rollout=4) == []
    assert refusals(**sizes, num_steps_per_rollout=4) == []
    assert refusals(**sizes, global_batch_size=64) == []


def test_the_number_of_optimizer_steps_follows_from_the_size_of_a_step() -> None:
    sizes = {"rollout_batch_size": 16, "n_samples_per_prompt": 8}
    assert config(**sizes).steps_per_rollout == 1
    assert config(**sizes, global_batch_size=32).steps_per_rollout == 4
    assert "trained in 4 optimizer step(s) of 32" in table(config(**sizes, global_batch_size=32), "train.py")
    assert learning_rate(config(**sizes, global_batch_size=32, num_rollout=10)).decay_steps == 40


def test_a_queue_smaller_than_a_batch_is_refused() -> None:
    said = refusal(**ASYNC, rollout_batch_size=32, queue_capacity=31)
    assert "queue_capacity 31 cannot hold a batch" in said
    assert refusals(**ASYNC, rollout_batch_size=32, queue_capacity=32) == []
    assert refusals(rollout_batch_size=32, queue_capacity=31) == []


def test_more_groups_in_flight_than_slots_are_refused_with_the_largest_valid_number() -> None:
    settings = {**ASYNC, "rollout_batch_size": 32, "windowed_fifo_ratio": 0.3, "max_weight_staleness": 1}
    said = refusal(**settings, over_sampling_batch_size=64)
    assert "64 groups can never be in flight: max_weight_staleness 1 with a window of 19 allows 46" in said
    assert "set over_sampling_batch_size to 50 or less" in said
    assert refusals(**settings, over_sampling_batch_size=50) == []
    assert refusals(**settings, over_sampling_batch_size=51) != []


def test_more_groups_in_flight_than_the_queue_can_hold_are_refused() -> None:
    said = refusal(**ASYNC, rollout_batch_size=32, over_sampling_batch_size=200, queue_capacity=100)
    assert "queue_capacity 100 allows 100; set over_sampling_batch_size to 100 or less" in said


def test_a_limit_of_zero_is_refused_when_generation_and_training_overlap() -> None:
    assert "use train.py" in refusal(max_weight_staleness=0)
    assert "use train.py" in refusal(**ASYNC, max_weight_staleness=0)
    assert refusals("train.py", **ASYNC, max_weight_staleness=0) == []


def test_engines_that_release_their_memory_cannot_keep_keys() -> None:
    assert "max_kv_staleness 1 has no effect with colocate" in refusal("train.py", max_kv_staleness=1, colocate=True)


def test_keys_of_older_versions_leave_the_staleness_limit_room_for_overlap() -> None:
    assert refusals(max_kv_staleness=1, max_weight_staleness=2) == []
    assert refusals("train.py", max_kv_staleness=2, max_weight_staleness=2) == []
    assert refusals(max_kv_staleness=-1, max_weight_staleness=None) == []
    assert "keeps dropping groups" in refusal(max_kv_staleness=-1, max_weight_staleness=8)
    assert "set max_weight_staleness to 2 or more" in refusal("train.py", max_kv_staleness=2, max_weight_staleness=1)


def test_over_sampling_below_the_batch_is_refused() -> None:
    assert "over_sampling_batch_size 8 is below rollout_batch_size 32" in refusal(over_sampling_batch_size=8)


def test_groups_of_one_sample_are_refused_because_grpo_learns_nothing_from_them() -> None:
    assert "n_samples_per_prompt to 2 or more" in refusal(n_samples_per_prompt=1)
    assert refusals(n_samples_per_prompt=1, debug_rollout_only=True) == [], "such a run does not train"


def test_a_run_has_exactly_one_source_of_prompts_and_the_file_exists(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    files = {"rm_type": "exact", "reasoning_gym_task": None}
    assert "no data is configured" in refusal(**files)
    assert "both set" in refusal(prompt_data=str(rows))
    assert refusal(**files, prompt_data="nowhere.jsonl") == "prompt_data nowhere.jsonl: no such file"
    assert refusals(**files, prompt_data=str(rows)) == []
    assert refusals(**files, datasets={"math": {"prompt_data": str(rows)}}) == []


def test_the_reward_of_a_run_may_be_unset_if_each_data_set_has_one(tmp_path: Path) -> None:
    (rows := tmp_path / "rows.jsonl").touch()
    own, none = {"prompt_data": str(rows), "rm_type": "math"}, {"prompt_data": str(rows)}
    unset = {"rm_type": None, "reasoning_gym_task": None}
    assert refusals(**unset, datasets={"math": own}) == []
    assert "no reward is configured" in refusal(**unset, datasets={"math": own, "code": none})


def test_a_run_has_a_reward_that_fits_the_data(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    assert "no reward is configured" in refusal(rm_type=None)
    assert "rm_type 'exakt' is unknown: set code, dapo, data_source, deepscaler, exact" in refusal(rm_type="exakt")
    assert "set rm_type to exact" in refusal(reasoning_gym_task=None, prompt_data=str(rows))
    assert refusals(rm_type=None, custom_rm_path="mine.reward") == []


def test_a_checkpoint_is_a_folder_with_a_config(tmp_path: Path) -> None:
    assert "no such folder" in refusal(hf_checkpoint="nowhere")
    assert "contains no config.json" in refusal(hf_checkpoint=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert refusals(hf_checkpoint=str(tmp_path)) == []


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"actor_num_gpus_per_node": 4, "context_parallel_size": 3}, "4 learner ranks are not divisible by"),
        ({"sequence_parallel": True}, "set tensor_model_parallel_size above 1"),
        ({"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "rollout_num_gpus 3 is not divisible by"),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "global_batch_size": 8, "rollout_batch_size": 4,
          "n_samples_per_prompt": 2}, "set global_batch_size to 16 or more"),
        ({"tiny_hidden_size": 130}, "tiny_hidden_size 130 is not divisible by tiny_num_attention_heads 4"),
        ({"tiny_num_query_groups": 3}, "tiny_num_attention_heads 4 is not divisible by tiny_num_query_groups 3"),
        ({"rollout_max_response_len": 512}, "leaves no room for a prompt"),
        ({"warm_start_accuracy": [0.5, 0.2]}, "is not a range within [0, 1]"),
        ({"no_progress_abort_seconds": 5}, "stops the run before no_progress_warn_seconds 30 warns"),
        ({"max_kv_staleness": 1, "pause_generation_mode": "in_place"}, "set pause_generation_mode to retract"),
        ({"max_kv_staleness": -1, "pause_generation_mode": "abort"}, "set pause_generation_mode to retract"),
        ({"max_kv_staleness": 2, "max_weight_staleness": 2}, "set max_weight_staleness to 3 or more"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    assert said in refusal(**settings)


def test_all_problems_are_reported_at_once() -> None:
    assert len(refusals(rm_type=None, reasoning_gym_task=None, hf_checkpoint="nowhere")) == 3


def test_batches_that_are_saved_under_the_suffix_of_torch_are_noted() -> None:
    (note,) = notes(config(save_debug_rollout_data="dump/{rollout_id}.pt"), "train_async.py")
    assert note.startswith("save_debug_rollout_data writes safetensors files, which torch.load cannot read")
    assert notes(config(save_debug_rollout_data="dump/{rollout_id}.safetensors"), "train_async.py") == []


def test_groups_in_flight_that_make_samples_older_than_was_measured_are_noted() -> None:
    settings = {**ASYNC, "rollout_batch_size": 8, "max_weight_staleness": 16, "off_policy_correction": "tis"}
    (note,) = notes(config(**settings, over_sampling_batch_size=48), "train_async.py")
    assert "48 groups in flight, samples will be about 6 weight versions old" in note
    assert "and 13 cost 0.01 to 0.03" in note
    assert notes(config(**settings, over_sampling_batch_size=24), "train_async.py") == []
    clipped = {**settings, "use_rollout_logprobs": True, "off_policy_correction": "none"}
    (note,) = notes(config(**clipped, over_sampling_batch_size=48), "train_async.py")
    assert "13 cost 0.07 with use_rollout_logprobs" in note


@pytest.mark.parametrize("objective", ["gspo", "gmpo"])
def test_weights_of_tokens_are_noted_where_a_sequence_has_one_ratio_and_samples_are_old(objective: str) -> None:
    settings = {**ASYNC, "rollout_batch_size": 8, "max_weight_staleness": 16, "policy_objective": objective}
    tokens, sequences = {"off_policy_correction": "tis"}, {"off_policy_correction": "sequence"}
    (note,) = notes(config(**settings, **tokens, over_sampling_batch_size=24), "train_async.py")
    assert f"tis hardly corrects for that with policy_objective {objective}" in note
    assert "set off_policy_correction to sequence" in note
    assert notes(config(**settings, **tokens, over_sampling_batch_size=8), "train_async.py") == []
    assert notes(config(**settings, **sequences, over_sampling_batch_size=24), "train_async.py") == []


def test_a_window_without_effect_is_noted() -> None:
    (note,) = notes(config(windowed_fifo_ratio=0.3), "train_async.py")
    assert note.startswith("windowed_fifo_ratio has no effect")
    assert notes(config(windowed_fifo_ratio=0.3, over_sampling_batch_size=64), "train_async.py") == []
    assert notes(config(windowed_fifo_ratio=0.3, dynamic_sampling_filter_path="my.filter"), "train.py") == []
    assert notes(config(**ASYNC, windowed_fifo_ratio=0.3), "train_async.py") == []


def test_a_window_is_noted_and_ignored_with_the_greedy_rollout_function() -> None:
    run = config(
        windowed_fifo_ratio=0.3, over_sampling_batch_size=64, rollout_function_path="sglang_rollout.generate_rollout"
    )
    (note,) = notes(run, "train_async.py")
    assert "collects the groups that finish first" in note
    assert bounds_of(run, "train_async.py").window == 64


@pytest.mark.parametrize(
    "entry, settings, schedule",
    [
        ("train.py", ASYNC, Schedule.SYNCHRONOUS),
        ("train_async.py", ASYNC, Schedule.FULLY_ASYNC),
        ("train_async.py", {}, Schedule.ONE_STEP_OFF),
        ("train_async.py", {"rollout_function_path": "mine.generate"}, Schedule.ONE_STEP_OFF),
        ("train_async.py", {"rollout_function_path": "mine.generate", "schedule": "fully_async"}, Schedule.FULLY_ASYNC),
        ("train_async.py", {**ASYNC, "schedule": "one_step_off"}, Schedule.ONE_STEP_OFF),
        ("train.py", {"schedule": "one_step_off"}, Schedule.ONE_STEP_OFF),
        ("train_async.py", {"schedule": "synchronous"}, Schedule.SYNCHRONOUS),
        ("train_async.py", {**ASYNC, "load_debug_rollout_data": "{rollout_id}"}, Schedule.SYNCHRONOUS),
    ],
)
def test_the_schedule_follows_from_entry_script_and_rollout_function(
    entry: str, settings: dict[str, Any], schedule: Schedule
) -> None:
    assert schedule_of(config(**settings), entry) is schedule


@pytest.mark.parametrize(
    "entry, settings, direct",
    [
        ("train_async.py", ASYNC, True),
        ("train_async.py", {"schedule": "fully_async"}, True),
        ("train_async.py", {"schedule": "fully_async", "rollout_function_path": "mine.generate"}, False),
        ("train_async.py", {**ASYNC, "schedule": "one_step_off"}, False),
        ("train.py", ASYNC, False),
    ],
)
def test_batches_come_from_the_queue_without_a_rollout_function_only_in_fully_async_runs(
    entry: str, settings: dict[str, Any], direct: bool
) -> None:
    assert takes_from_queue(config(**settings), entry) is direct


@pytest.mark.parametrize("path", [Supervised.function, External.function])
def test_a_function_that_makes_batches_itself_cannot_use_the_stream(path: str) -> None:
    complaint = refusal(schedule="fully_async", rollout_function_path=path, loss_type="sft_loss")
    assert f"schedule fully_async has no effect on {path}" in complaint


def test_the_table_lists_window_publish_slots_staleness_and_queue() -> None:
    run = config(**ASYNC, max_weight_staleness=2, windowed_fifo_ratio=0.3)
    rows = {line.split()[0]: line.split()[1] for line in table(run, "train_async.py").splitlines()}
    assert [rows[name] for name in ("N", "W", "P", "B", "staleness", "queue", "batch")] == [
        "32", "9", "32", "88", "2", "88", "256",
    ]  # fmt: skip


def test_the_table_says_when_the_window_was_reduced() -> None:
    run = config(**ASYNC, max_weight_staleness=1, over_sampling_batch_size=64, windowed_fifo_ratio=1)
    assert bounds_of(run, "train_async.py").window == 33
    assert "reduced from 64" in table(run, "train_async.py")


def test_no_correction_in_a_fully_asynchronous_run_is_noted() -> None:
    (note,) = notes(config(**ASYNC, off_policy_correction="none"), "train_async.py")
    assert note.startswith("off_policy_correction none trains tokens of older weights as if they were on-policy")
    assert notes(config(off_policy_correction="none"), "train.py") == []
    assert notes(config(**ASYNC, off_policy_correction="none", policy_objective="dppo"), "train_async.py") == []
    assert notes(config(**ASYNC), "train_async.py") == []


@pytest.mark.parametrize("setting", [{"rollout_top_p": 0.9}, {"rollout_top_k": 20}])
def test_top_p_and_top_k_start_without_a_warning(setting: dict[str, Any]) -> None:
    assert refusals(**setting) == notes(config(**setting), "train_async.py") == []


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"rollout_top_k": 0}, "rollout_top_k 0 is not a number of tokens: set it to 2 or more, or to -1"),
        ({"rollout_top_k": -2}, "rollout_top_k -2 is not a number of tokens"),
        ({"rollout_top_k": 1}, "rollout_top_k 1 leaves one token to sample from"),
        ({"rollout_top_k": 5000}, "rollout_top_k 5000 is more than the 4096 tokens that an engine can return"),
        (
            {"rollout_top_k": 50, "sglang_server_args": {"sampling-mask-max-tokens": 40}},
            "set rollout_top_k to 40 or less, or raise --sglang-sampling-mask-max-tokens",
        ),
        (
            {
                "rollout_top_p": 0.9,
                "sglang_server_args": {"speculative-algorithm": "EAGLE"},
            },
            "SGLang does not return with speculative decoding: unset --sglang-speculative-algorithm",
        ),
    ],
)
def test_sampling_without_a_sampling_mask_is_refused(settings: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(**settings)


def test_greedy_decoding_needs_no_sampling_mask() -> None:
    assert refusals(rollout_temperature=0.0, rollout_top_k=5000, debug_rollout_only=True) == []


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"sequence_length_round_in_train": 63}, "sequence_length_round_in_train 63 is not divisible by"),
        ({"max_tokens_per_microbatch_in_train": 127}, "max_tokens_per_microbatch_in_train to 128 or more"),
    ],
)
def test_padded_rows_that_do_not_fit_the_layout_are_refused(settings: dict[str, Any], complaint: str) -> None:
    limits = {"rollout_max_prompt_len": 30, "rollout_max_response_len": 70, "max_tokens_per_gpu": 100}
    layout = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2, "max_tokens_per_microbatch_in_train": 128}
    settings = limits | layout | settings
    (sentence,) = refusals(**settings, use_dynamic_batching_in_train=True)
    assert complaint in sentence
    assert refusals(**settings) == []


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"ref_sequence_length_round_in_infer": 63}, "ref_sequence_length_round_in_infer 63 is not divisible by"),
        ({"ref_max_tokens_per_microbatch_in_infer": 127}, "set ref_max_tokens_per_microbatch_in_infer to 128 or more"),
    ],
)
def test_padded_rows_of_the_reference_model_are_checked_if_the_run_keeps_one(
    settings: dict[str, Any], complaint: str
) -> None:
    limits = {"rollout_max_prompt_len": 30, "rollout_max_response_len": 70, "max_tokens_per_gpu": 100}
    layout = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2}
    rows = {"ref_use_dynamic_batching_in_infer": True, "ref_max_tokens_per_microbatch_in_infer": 128}
    settings = limits | layout | rows | settings
    (sentence,) = refusals(**settings, use_kl_loss=True)
    assert complaint in sentence
    assert refusals(**settings) == []


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"overlong_buffer_len": 9, "rollout_max_response_len": 8}, "overlong_buffer_len 9 is above"),
        ({"icepop_band": [1.5, 2]}, "does not contain the ratio 1"),
        ({"policy_objective": "dppo", "off_policy_correction": "tis"}, "set off_policy_correction to none"),
        ({"policy_objective": "m2po", "off_policy_correction": "tis"}, "set off_policy_correction to none"),
        ({"policy_objective": "ppo", "advantage_estimator": "gspo"}, "set advantage_estimator to grpo"),
    ],
)
def test_contradictory_loss_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    assert any(complaint in sentence for sentence in refusals(**settings))


def test_one_sample_per_prompt_is_accepted_if_the_estimator_does_not_compare_groups() -> None:
    assert refusals(n_samples_per_prompt=1, advantage_estimator="reinforce_plus_plus") == []
    assert refusals(n_samples_per_prompt=1, advantage_estimator="ppo") == []
    assert "compares the samples of a group" in refusals(n_samples_per_prompt=1)[0]


def test_a_reference_model_must_exist(tmp_path: Path) -> None:
    (sentence,) = refusals(ref_load=str(tmp_path), use_kl_loss=True)
    assert "is not a Hugging Face checkpoint" in sentence
    (tmp_path / "config.json").write_text("{}")
    assert refusals(ref_load=str(tmp_path), kl_coef=0.1) == []
    assert refusals(ref_load=str(tmp_path)) == []
    config = run_config(ref_load=str(tmp_path))
    assert any("ref_load has no effect" in note for note in notes(config, "train.py"))


def test_a_reference_model_in_the_format_of_megatron_is_the_checkpoint_itself(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert refusals(ref_load=str(tmp_path), use_kl_loss=True) == []
    config = run_config(ref_load=str(tmp_path), use_kl_loss=True)
    assert any("has the format of Megatron-LM" in note for note in notes(config, "train.py"))
    assert reference_of(str(tmp_path), "checkpoint") == "checkpoint"


def test_critic_settings_need_an_estimator_with_a_critic(tmp_path: Path) -> None:
    assert refusals(advantage_estimator="ppo", critic_lr=1e-5, num_critic_only_steps=2) == []
    assert refusal(critic_lr=1e-5, value_clip=0.1) == (
        "critic_lr, value_clip: only advantage_estimator ppo trains a critic; set it, or unset these settings"
    )
    assert "is not a Hugging Face checkpoint" in refusal(advantage_estimator="ppo", critic_load=str(tmp_path))
    assert "but loss_type sft_loss does not use it" in refusals(advantage_estimator="ppo", loss_type="sft_loss")[0]


def test_exports_may_overwrite_neither_each_other_nor_the_initial_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refusals(save_hf=str(tmp_path / "out")) == []
    assert "add {rollout_id} to save_hf" in refusal(save_hf=str(tmp_path / "out"), save_interval=5)
    assert refusals(save_hf=str(tmp_path / "{rollout_id}"), save_interval=5) == []
    own = {"hf_checkpoint": str(tmp_path), "save_hf": f"{tmp_path}/../{tmp_path.name}"}
    assert "would overwrite hf_checkpoint" in refusals(**own)[0]


def test_an_export_of_several_adapters_cannot_replace_the_one_that_they_start_from(tmp_path: Path) -> None:
    datasets = {name: {"prompt_data": "a.jsonl", "adapter": name} for name in ("one", "two")}
    several = {"lora_rank": 4, "adapters": {"one": {}, "two": {}}, "datasets": datasets, "save_hf": str(tmp_path)}
    sentence = f"save_hf {tmp_path} would overwrite lora_load: set save_hf to a different folder"
    assert sentence in refusals(**several, lora_load=str(tmp_path / "two"))
    assert sentence not in refusals(**several, lora_load=str(tmp_path / "three"))


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"recompute_granularity": "full"}, "for example to uniform and 1"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "set recompute_granularity to full"),
        ({"recompute_method": "block"}, "set recompute_granularity to full"),
        ({"recompute_modules": ["mlp"]}, "recompute_modules needs recompute_granularity selective"),
        (
            {"precision": "fp32", "transformer_impl": "transformer_engine"},
            "set precision to bf16, or transformer_impl to local",
        ),
    ],
)
def test_recomputation_must_be_configured_completely(settings: dict[str, Any], said: str) -> None:
    assert said in refusal(**settings)


@pytest.mark.parametrize(
    "model, module, lack",
    [
        ("Qwen3-4B", "mla_up_proj", "multi-head latent attention"),
        ("Qwen3-4B", "layernorm", "experts or latent attention"),
        ("Qwen3-4B", "moe_act", "experts"),
        ("Qwen3-30B-A3B", "mlp", "dense feed-forward layers"),
        ("Qwen3-30B-A3B", "shared_experts", "shared experts"),
    ],
)
def test_modules_that_the_model_does_not_have_are_not_recomputed(
    tmp_path: Path, model: str, module: str, lack: str
) -> None:
    given = {"hf_checkpoint": checkpoint(model, tmp_path), "recompute_granularity": "selective"}
    assert f"because this model has no {lack}" in refusal(**given, recompute_modules=["core_attn", module])


def test_the_modules_that_a_model_has_may_be_recomputed(tmp_path: Path) -> None:
    for model, modules in (
        ("Qwen3-4B", ["core_attn", "mlp"]),
        ("Qwen3-30B-A3B", ["moe", "moe_act", "layernorm"]),
        ("DeepSeek-V3", ["mla_up_proj", "mlp", "moe", "shared_experts", "layernorm"]),
    ):
        given = {"hf_checkpoint": checkpoint(model, tmp_path), "recompute_granularity": "selective"}
        assert [one for one in refusals(**given, recompute_modules=modules) if "recompute" in one] == []


def test_some_switches_need_the_layers_of_transformer_engine(tmp_path: Path) -> None:
    given = {"hf_checkpoint": checkpoint("Qwen3-30B-A3B", tmp_path), "moe_router_fusion": True}
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    assert refusals(**given, **recomputed) == []
    for local in ({"transformer_impl": "local"}, {"precision": "fp32"}):
        assert refusal(**given, **recomputed, **local).startswith(
            "only the layers of Transformer Engine have recompute_modules layernorm and moe_router_fusion: unset this"
        )


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_fused_router_computes_in_the_precision_of_the_model_or_in_float32(tmp_path: Path, dtype: str | None) -> None:
    given = {"hf_checkpoint": checkpoint("Qwen3-30B-A3B", tmp_path), "moe_router_fusion": True}
    assert refusals(**given, moe_router_dtype=dtype) == []
    assert "has no kernel for moe_router_dtype fp64" in refusal(**given, moe_router_dtype="fp64")


def test_a_reward_names_the_setting_that_it_needs() -> None:
    assert "rm_type remote_rm needs a reward server: set rm_url" in refusal(rm_type="remote_rm")
    assert "set it to score or acc" in refusal(rm_type="dapo", reward_key="accuracy")
    assert "custom_rm_isolated has no effect without custom_rm_path" in refusal(custom_rm_isolated=True)
    assert "rm_type 'boxed_' is unknown" in refusal(rm_type="boxed_")


@pytest.mark.parametrize(
    "name, needs",
    [
        ("roll_math", "the end of the reasoning"),
        ("deepscaler", "the end of the reasoning"),
        ("dapo", "`Answer:`"),
    ],
)
def test_a_reward_that_needs_the_text_around_a_box_is_refused_with_the_prefix_boxed(name: str, needs: str) -> None:
    assert f"because {name} looks for {needs}, which is outside the box" in refusal(rm_type=f"boxed_{name}")
    assert refusals(rm_type=name) == []


def test_the_reward_dapo_trains_on_its_score_unless_another_key_is_set() -> None:
    assert refusals(rm_type="dapo") == []
    assert config(rm_type="dapo").rollout.reward_key == "score"
    assert config(rm_type="dapo", reward_key="acc").rollout.reward_key == "acc"
    assert config(rm_type="exact").rollout.reward_key is None


def test_an_interval_of_checkpoints_without_a_folder_is_noted() -> None:
    [note] = notes(config(save_interval=10), "train.py")
    assert note == "save_interval has no effect: it needs save or save_hf"
    assert notes(config(save_interval=10, save="checkpoints"), "train.py") == []


def test_evaluation_during_training_needs_a_scheduling_policy_with_priorities() -> None:
    lpm = {"sglang_server_args": {"schedule-policy": "lpm"}}
    assert "schedule_policy lpm does not support: set schedule_policy to fcfs" in refusal(eval_interval=5, **lpm)


def test_a_warm_start_template_needs_a_placeholder_for_the_prompt() -> None:
    assert "has no placeholder: add {prompt}" in refusal(warm_start_template="user: ")


def test_partial_debug_runs_need_consistent_settings() -> None:
    assert "debug_train_only has no batches to train on: set load_debug_rollout_data" in refusal(debug_train_only=True)
    both = {"debug_rollout_only": True, "load_debug_rollout_data": "x"}
    assert "debug_rollout_only excludes load_debug_rollout_data" in refusal(**both)


def test_a_task_and_a_run_without_data_set_exclude_each_other() -> None:
    assert "reasoning_gym_task and disable_rollout_global_dataset are both set" in refusal(
        disable_rollout_global_dataset=True
    )


def test_supervised_examples_need_the_supervised_loss_and_may_form_groups_of_one() -> None:
    supervised = {"rollout_function_path": "miles_async.rollout.sft_rollout.generate_rollout"}
    assert refusal(**supervised).endswith("returns supervised examples without rewards: set loss_type to sft_loss")
    assert refusals(**supervised, loss_type="sft_loss", n_samples_per_prompt=1) == []


def test_arguments_of_the_chat_template_that_the_run_sets_itself_are_refused() -> None:
    assert refusal(apply_chat_template_kwargs={"enable_thinking": False, "tokenize": True}) == (
        "apply_chat_template_kwargs has tokenize, which the run sets itself: remove it"
    )
    assert refusals(apply_chat_template_kwargs={"enable_thinking": False}) == []


def test_a_missing_search_corpus_is_refused() -> None:
    assert refusal(tool_search_corpus="nowhere.jsonl") == "tool_search_corpus nowhere.jsonl: no such file"


def test_an_unknown_sglang_argument_is_refused() -> None:
    sentence = refusal(sglang_server_args={"mem_fraction_statik": 0.8, "attention-backend": "triton"})
    assert sentence == (
        "--sglang-mem-fraction-statik: SGLang's server has no such argument; did you mean mem_fraction_static?"
    )
    assert "set rollout_num_gpus_per_engine" in refusal(sglang_server_args={"tp_size": 2})


def test_an_incomplete_router_address_is_refused() -> None:
    assert "names an existing router without its port: set" in refusal(sglang_router_ip="10.0.0.1")
    assert refusals(sglang_router_port=30000) == []
    assert refusals(sglang_router_ip="10.0.0.1", sglang_router_port=30000) == []


@pytest.mark.parametrize(
    "argument, said",
    [
        ("balance_abs_treshold", "sglang-router has no such argument; did you mean balance_abs_threshold?"),
        ("policy", "--router-policy is set by the run itself: set sglang_router_policy"),
        ("worker-urls", "is set by the run itself: the run adds its engines"),
        ("pd_disaggregation", "does not fit the router that the run starts: start a router of your own"),
    ],
)
def test_a_router_argument_that_cannot_be_passed_on_is_refused(argument: str, said: str) -> None:
    assert said in refusal(sglang_router_args={argument: 1})


def test_arguments_of_an_existing_router_are_refused() -> None:
    existing = {"sglang_router_ip": "10.0.0.1", "sglang_router_port": 30000}
    assert "start that router with these arguments" in refusal(**existing, sglang_router_args={"queue_size": 1})


def test_a_router_policy_that_ignores_the_load_is_noted() -> None:
    several = {"rollout_num_gpus": 2}
    [note] = notes(config(sglang_router_policy="consistent_hashing", **several), "train.py")
    assert "one engine may get most of the requests" in note
    assert notes(config(sglang_router_policy="power_of_two", **several), "train.py") == []
    with pytest.raises(UserError, match="sglang_router_policy: input should be 'cache_aware'"):
        config(sglang_router_policy="nearest")


def test_colocation_needs_train_py_and_no_more_engine_devices_than_learner_devices() -> None:
    assert refusals("train.py", colocate=True) == []
    assert "colocate works only with train.py" in refusal("train_async.py", colocate=True)
    assert "set rollout_num_gpus to 1 or less" in refusal("train.py", colocate=True, rollout_num_gpus=2)


def test_faults_of_other_processes_need_a_ray_that_the_run_starts() -> None:
    fault = {"kind": "kill", "point": "learner.train.before", "process": "learner"}
    sentence = refusal(inject_faults=[fault], ray_address="10.0.0.1:6379")
    assert sentence.startswith(
        "inject_faults sends signals to learner, and a run finds no such process on a Ray cluster that it joins: unset"
    )
    assert refusals(inject_faults=[fault]) == []
    assert refusals(inject_faults=[fault | {"process": "rollout_worker"}], ray_address="10.0.0.1:6379") == []
