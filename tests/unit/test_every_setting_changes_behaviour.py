"""No flag is parsed and ignored: each setting names the test in which changing it changes what happens."""

import ast
from pathlib import Path

from miles_async.config.fields import SETTINGS

TESTS = Path(__file__).parents[1]

BOUNDS = "unit/test_bounds.py"
CHECKS = "unit/test_config_checks.py"
DATA = "unit/test_datasets_source.py"
REWARDS = "unit/test_rewards_and_filters.py"
RUN = "unit/test_observability_run.py"
SERVICE = "sim/test_service.py"
HEAD = "sim/test_head_policy.py"

PROOF = {
    # data
    "prompt_data": f"{DATA}::test_a_broken_line_is_named_by_file_and_number",
    "input_key": f"{DATA}::test_blank_lines_are_skipped_and_other_keys_can_be_named",
    "label_key": f"{DATA}::test_blank_lines_are_skipped_and_other_keys_can_be_named",
    "apply_chat_template": f"{DATA}::test_chats_without_a_tokenizer_say_what_to_set",
    "reasoning_gym_task": f"{DATA}::test_a_task_without_single_answers_cannot_warm_start",
    "reasoning_gym_settings": f"{DATA}::test_a_task_that_cannot_be_had_is_one_sentence",
    "prompt_template": f"{DATA}::test_the_template_takes_the_question_or_the_expression_after_its_last_colon",
    "eval_size": f"{DATA}::test_held_out_rows_are_never_fed_even_where_the_file_repeats_them",
    "rollout_shuffle": f"{DATA}::test_every_epoch_has_its_own_order_and_the_seed_decides_it",
    "rollout_seed": f"{DATA}::test_every_epoch_has_its_own_order_and_the_seed_decides_it",
    # rollout
    "rollout_function_path": f"{CHECKS}::test_the_entry_and_the_rollout_function_decide_who_waits_for_whom",
    "num_rollout": f"{SERVICE}::test_every_batch_is_full_and_every_batch_is_published",
    "rollout_batch_size": f"{SERVICE}::test_every_batch_is_full_and_every_batch_is_published",
    "over_sampling_batch_size": f"{SERVICE}::test_over_sampling_keeps_the_first_and_gives_the_rest_back",
    "windowed_fifo_ratio": f"{BOUNDS}::test_the_window_is_the_ratio_of_what_is_in_flight",
    "max_weight_staleness": f"{SERVICE}::test_fully_async_stays_within_the_bound_it_derives",
    "queue_capacity": f"{BOUNDS}::test_the_queue_never_needs_more_room_than_there_are_slots",
    "max_attempts": f"{SERVICE}::test_failed_groups_are_retried_and_buried_after_their_last_attempt",
    "head_deadline_seconds": f"{SERVICE}::test_a_slow_head_is_recycled_after_its_deadline_and_at_last_buried",
    "head_deadline_action": f"{HEAD}::test_a_salvaged_head_goes_on_from_its_tokens_with_their_first_version",
    "dynamic_sampling_filter_path": f"{CHECKS}::test_a_window_that_cannot_matter_is_noted",
    "n_samples_per_prompt": f"{DATA}::test_a_group_holds_the_samples_of_one_prompt_with_rising_indices",
    "rm_type": f"{REWARDS}::test_exact_compares_the_stripped_response_with_the_label",
    "custom_rm_path": f"{REWARDS}::test_a_custom_reward_is_loaded_by_its_path",
    "reward_timeout_seconds": f"{REWARDS}::test_a_reward_that_never_comes_fails_the_group",
    # weights
    "update_weights_interval": f"{SERVICE}::test_an_update_interval_publishes_every_so_many_batches_and_the_last",
    # engine
    "adaptive_concurrency": f"{HEAD}::test_adaptive_concurrency_keeps_the_engines_full_and_their_lines_short",
    # observability
    "run_dir": f"{RUN}::test_a_run_folder_that_cannot_be_written_is_one_sentence",
    "metrics_port": "unit/test_observability_metrics.py::test_a_port_in_use_is_one_sentence_that_names_it",
    "log_format": f"{RUN}::test_json_log_lines_carry_what_is_bound",
    "progress_bar": f"{RUN}::test_the_bar_is_silent_without_a_terminal_or_when_switched_off",
    "no_progress_warn_seconds": f"{SERVICE}::test_a_stuck_engine_warns_and_then_stops_the_run_with_its_cause",
    "no_progress_abort_seconds": f"{SERVICE}::test_a_stuck_engine_warns_and_then_stops_the_run_with_its_cause",
}


def functions(file):
    if not (TESTS / file).exists():
        return set()
    return {node.name for node in ast.walk(ast.parse((TESTS / file).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip


def test_every_setting_names_its_proof():
    missing = [name for name in SETTINGS if name not in PROOF]
    assert missing == [], "add these to PROOF with the test in which they matter: " + ", ".join(missing)


def test_every_proof_speaks_of_a_setting_that_exists():
    assert [name for name in PROOF if name not in SETTINGS] == []


def test_every_proof_is_a_test_that_exists():
    lost = {node for node in PROOF.values() if node.partition("::")[2] not in functions(node.partition("::")[0])}
    assert lost == set()
