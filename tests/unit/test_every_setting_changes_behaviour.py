"""No flag is parsed and ignored: each setting names the test in which changing it changes what happens."""

import ast
from functools import cache
from pathlib import Path

from miles_async.config.fields import SETTINGS

TESTS = Path(__file__).parents[1]

BOUNDS = "unit/test_bounds.py"
CHECKS = "unit/test_config_checks.py"
DATA = "unit/test_datasets_source.py"
GYM = "unit/test_datasets_gym.py"
REWARDS = "unit/test_rewards_and_filters.py"
BUILTIN = "unit/test_rewards_builtin.py"
FILTERS = "unit/test_filters.py"
GRADERS = "stack/test_graders.py"
DEBUG = "stack/test_debug_runs.py"
PREFLIGHT = "unit/test_preflight.py"
RUN = "unit/test_observability_run.py"
SERVICE = "sim/test_service.py"
GENERATE = "unit/test_generate_functions.py"
HEAD = "sim/test_head_policy.py"
PLACE = "unit/test_settings_reach_their_place.py"
RATES = "unit/test_learning_rate.py"
REPAIR = "sim/test_repair.py"
FLEET = "unit/test_sglang_fleet.py"
RESUME = "sim/test_resume.py"
SKIP = "sim/test_skip.py"
SKIP_MANAGER = "unit/test_skip_manager.py"
CRITIC = "stack/test_learner_critic.py"
LOGS = "unit/test_logs_and_sinks.py"
LEARNER = "stack/test_learner_settings.py"
LAYOUTS = "unit/test_layouts.py"
PARALLEL = "stack/test_learner_parallel.py"

PROOF = {
    # model and warm start
    "hf_checkpoint": "unit/test_preflight.py::test_a_checkpoint_whose_weights_are_missing_or_cut_off_is_named",
    "num_layers": f"{LEARNER}::test_the_tiny_model_has_the_shape_asked_for",
    "hidden_size": f"{LEARNER}::test_the_tiny_model_has_the_shape_asked_for",
    "ffn_hidden_size": f"{LEARNER}::test_the_tiny_model_has_the_shape_asked_for",
    "num_attention_heads": f"{LEARNER}::test_the_tiny_model_has_the_shape_asked_for",
    "num_query_groups": f"{LEARNER}::test_the_tiny_model_has_the_shape_asked_for",
    "max_position_embeddings": f"{LEARNER}::test_the_tiny_model_has_the_shape_asked_for",
    "init_std": f"{LEARNER}::test_the_tiny_model_has_the_shape_asked_for",
    "warm_start_max_steps": f"{LEARNER}::test_a_warm_start_looks_as_often_as_asked_and_ends_at_its_last_step",
    "warm_start_accuracy": f"{LEARNER}::test_a_warm_start_looks_as_often_as_asked_and_ends_at_its_last_step",
    "warm_start_lr": f"{LEARNER}::test_another_warm_start_teaches_another_model",
    "warm_start_batch_size": f"{LEARNER}::test_another_warm_start_teaches_another_model",
    "warm_start_check_every": f"{LEARNER}::test_a_warm_start_looks_as_often_as_asked_and_ends_at_its_last_step",
    "warm_start_template": f"{PREFLIGHT}::test_a_warm_start_teaches_prompts_in_the_form_that_training_gives_them",
    "cache_dir": f"{LEARNER}::test_another_warm_start_teaches_another_model",
    # data
    "prompt_data": f"{DATA}::test_a_broken_line_is_named_by_file_and_number",
    "input_key": f"{DATA}::test_blank_lines_are_skipped_and_other_keys_can_be_named",
    "label_key": f"{DATA}::test_blank_lines_are_skipped_and_other_keys_can_be_named",
    "apply_chat_template": f"{DATA}::test_chats_without_a_tokenizer_say_what_to_set",
    "metadata_key": f"{DATA}::test_metadata_and_tools_are_found_under_the_keys_that_are_named",
    "tool_key": f"{DATA}::test_metadata_and_tools_are_found_under_the_keys_that_are_named",
    "apply_chat_template_kwargs": f"{DATA}::test_chats_are_rendered_with_their_tools_and_the_templates_own_arguments",
    "disable_rollout_global_dataset": f"{DATA}::test_without_data_blank_samples_are_fed_with_rising_indices",
    "buffer_filter_path": f"{DATA}::test_the_seeds_buffer_filter_hands_out_each_group_once_though_it_removes_none",
    "reasoning_gym_task": f"{GYM}::test_a_task_without_single_answers_cannot_warm_start",
    "reasoning_gym_settings": f"{GYM}::test_a_task_that_cannot_be_had_is_one_sentence",
    "reasoning_gym_size": f"{GYM}::test_an_epoch_has_as_many_problems_as_asked_for",
    "prompt_template": f"{GYM}::test_the_template_takes_the_question_or_the_expression_after_its_last_colon",
    "eval_size": f"{DATA}::test_held_out_rows_are_never_fed_even_where_the_file_repeats_them",
    "rollout_shuffle": f"{DATA}::test_every_epoch_has_its_own_order_and_the_seed_decides_it",
    "rollout_seed": f"{DATA}::test_every_epoch_has_its_own_order_and_the_seed_decides_it",
    # rollout
    "rollout_max_prompt_len": f"{PLACE}::test_a_prompt_that_is_too_long_is_refused_before_it_reaches_an_engine",
    "rollout_max_response_len": f"{PLACE}::test_samples_are_drawn_as_configured_and_held_out_ones_greedily",
    "rollout_temperature": f"{PLACE}::test_samples_are_drawn_as_configured_and_held_out_ones_greedily",
    "rollout_top_p": f"{PLACE}::test_samples_are_drawn_as_configured_and_held_out_ones_greedily",
    "rollout_top_k": f"{PLACE}::test_samples_are_drawn_as_configured_and_held_out_ones_greedily",
    "rollout_stop": f"{PLACE}::test_samples_are_drawn_as_configured_and_held_out_ones_greedily",
    "rollout_stop_token_ids": f"{PLACE}::test_samples_are_drawn_as_configured_and_held_out_ones_greedily",
    "rollout_skip_special_tokens": f"{PLACE}::test_samples_are_drawn_as_configured_and_held_out_ones_greedily",
    "custom_rm_isolated": f"{GRADERS}::test_an_isolated_reward_that_ends_its_process_fails_its_sample",
    "group_rm": f"{BUILTIN}::test_a_group_reward_scores_all_samples_in_one_call",
    "reward_key": f"{BUILTIN}::test_a_dictionary_reward_is_kept_whole_and_one_entry_of_it_counts",
    "rm_url": f"{BUILTIN}::test_a_remote_reward_is_asked_with_prompt_response_and_label_and_again_after_a_5xx",
    "remote_rm_concurrency": f"{BUILTIN}::test_at_most_so_many_requests_are_at_the_reward_server_at_once",
    "remote_rm_retries": f"{BUILTIN}::test_a_remote_reward_gives_up_after_its_tries",
    "reward_processes": f"{GRADERS}::test_as_many_groups_are_graded_at_once_as_there_are_processes",
    "reward_memory_gb": "stack/test_confined_graders.py::test_a_response_that_needs_too_much_memory_fails_its_group",
    "over_sampling_filter_path": f"{SERVICE}::test_an_over_sampling_filter_chooses_among_all_that_were_generated",
    "rollout_sample_filter_path": f"{FILTERS}::test_a_sample_filter_takes_samples_out_of_the_loss_but_not_the_batch",
    "save_debug_rollout_data": f"{FILTERS}::test_every_batch_is_saved_where_it_is_asked_for_and_under_the_dump_folder",
    "dump_details": f"{FILTERS}::test_every_batch_is_saved_where_it_is_asked_for_and_under_the_dump_folder",
    "load_debug_rollout_data": f"{FILTERS}::test_a_run_that_only_trains_takes_its_batches_from_disk",
    "debug_train_only": f"{FILTERS}::test_a_run_that_only_trains_takes_its_batches_from_disk",
    "debug_rollout_only": f"{DEBUG}::test_a_run_that_only_generates_saves_its_batches",
    "shuffle_rewards": f"{PLACE}::test_the_control_experiment_gives_samples_the_rewards_of_others",
    "rollout_function_path": f"{CHECKS}::test_the_entry_and_the_rollout_function_decide_who_waits_for_whom",
    "schedule": f"{CHECKS}::test_the_entry_and_the_rollout_function_decide_who_waits_for_whom",
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
    "partial_rollout": f"{SERVICE}::test_partial_rollout_goes_on_from_the_tokens_of_aborted_groups",
    "eval_interval": f"{SERVICE}::test_an_evaluation_every_so_many_rollouts_does_not_stop_training",
    "eval_datasets": f"{PLACE}::test_each_evaluation_data_set_has_its_own_sampling",
    "eval_function_path": f"{SERVICE}::test_a_users_evaluation_reports_under_its_own_names",
    "custom_generate_function_path": f"{GENERATE}::test_each_sample_goes_through_the_function",
    "agent_port": "unit/test_openai_endpoint.py::test_the_endpoint_listens_where_it_is_told_to",
    "generate_timeout_seconds": f"{GENERATE}::test_a_function_that_hangs_fails_its_group",
    "tool_max_turns": f"{GENERATE}::test_a_model_that_only_calls_tools_is_cut_after_so_many",
    "tool_search_corpus": f"{GENERATE}::test_a_search_answers_from_the_corpus",
    "n_samples_per_prompt": f"{DATA}::test_a_group_holds_the_samples_of_one_prompt_with_rising_indices",
    "rm_type": f"{REWARDS}::test_exact_compares_the_stripped_response_with_the_label",
    "custom_rm_path": f"{REWARDS}::test_a_custom_reward_is_loaded_by_its_path",
    "reward_timeout_seconds": f"{REWARDS}::test_a_reward_that_never_comes_fails_the_group",
    # algorithm
    "advantage_estimator": f"{PLACE}::test_reinforce_plus_plus_compares_with_the_tokens_of_the_whole_batch",
    "grpo_std_normalization": f"{PLACE}::test_advantages_are_divided_by_the_spread_of_their_group_or_not",
    "eps_clip": f"{LEARNER}::test_another_setting_learns_other_weights",
    "eps_clip_high": f"{LEARNER}::test_another_setting_learns_other_weights",
    "off_policy_correction": f"{LEARNER}::test_another_setting_learns_other_weights",
    "icepop_band": f"{LEARNER}::test_another_setting_learns_other_weights",
    "loss_aggregation": f"{PLACE}::test_the_aggregation_decides_what_a_token_of_a_long_answer_counts",
    "overlong_buffer_len": f"{PLACE}::test_an_answer_close_to_the_limit_loses_reward",
    "overlong_penalty": f"{PLACE}::test_an_answer_close_to_the_limit_loses_reward",
    "tis_clip": f"{LEARNER}::test_another_setting_learns_other_weights",
    "entropy_coef": f"{LEARNER}::test_another_setting_learns_other_weights",
    "use_kl_loss": f"{LEARNER}::test_another_setting_learns_other_weights",
    "kl_loss_coef": f"{LEARNER}::test_another_setting_learns_other_weights",
    "kl_loss_type": f"{LEARNER}::test_another_setting_learns_other_weights",
    "kl_coef": f"{LEARNER}::test_another_setting_learns_other_weights",
    "ref_load": f"{LEARNER}::test_the_reference_model_is_another_checkpoint_where_one_is_named",
    # learner
    "loss_type": f"{LEARNER}::test_another_setting_learns_other_weights",
    "global_batch_size": f"{CHECKS}::test_batch_sizes_that_do_not_agree_are_refused_with_the_nearest_that_do",
    "num_steps_per_rollout": f"{PLACE}::test_a_batch_is_cut_into_the_steps_asked_for",
    "lr": f"{LEARNER}::test_another_setting_learns_other_weights",
    "lr_warmup_steps": f"{LEARNER}::test_another_setting_learns_other_weights",
    "lr_decay_steps": f"{RATES}::test_the_schedule_is_the_configurations",
    "min_lr": f"{RATES}::test_the_schedule_is_the_configurations",
    "lr_wsd_decay_steps": f"{RATES}::test_the_schedule_is_the_configurations",
    "lr_wsd_decay_style": f"{RATES}::test_the_schedule_is_the_configurations",
    "lr_decay_style": f"{LEARNER}::test_another_setting_learns_other_weights",
    "weight_decay": f"{LEARNER}::test_another_setting_learns_other_weights",
    "adam_beta1": f"{LEARNER}::test_another_setting_learns_other_weights",
    "adam_beta2": f"{LEARNER}::test_another_setting_learns_other_weights",
    "clip_grad": f"{LEARNER}::test_another_setting_learns_other_weights",
    "max_tokens_per_gpu": f"{PLACE}::test_a_micro_batch_never_holds_more_tokens_than_allowed",
    "use_dynamic_batch_size": f"{PLACE}::test_a_micro_batch_of_fixed_size_holds_so_many_samples_of_any_length",
    "micro_batch_size": f"{PLACE}::test_a_micro_batch_of_fixed_size_holds_so_many_samples_of_any_length",
    "balance_data": f"{PLACE}::test_ranks_get_the_same_work_unless_data_is_dealt_in_turn",
    "use_dynamic_batching_in_train": f"{PLACE}::test_rows_of_dynamic_batching_are_as_long_and_as_many_as_allowed",
    "max_tokens_per_microbatch_in_train": f"{PLACE}::test_rows_of_dynamic_batching_are_as_long_and_as_many_as_allowed",
    "sequence_length_round_in_train": f"{PLACE}::test_rows_of_dynamic_batching_are_as_long_and_as_many_as_allowed",
    "use_dynamic_batching_in_infer": f"{PLACE}::test_work_without_gradients_has_rows_and_limits_of_its_own",
    "max_tokens_per_microbatch_in_infer": f"{PLACE}::test_work_without_gradients_has_rows_and_limits_of_its_own",
    "sequence_length_round_in_infer": f"{PLACE}::test_work_without_gradients_has_rows_and_limits_of_its_own",
    "max_nonfinite_batches": f"{SERVICE}::test_batches_that_are_never_finite_stop_the_run_with_their_groups_kept",
    "save": f"{RESUME}::test_checkpoints_are_written_as_often_as_asked_and_at_the_end",
    "save_interval": f"{RESUME}::test_checkpoints_are_written_as_often_as_asked_and_at_the_end",
    "async_save": f"{RESUME}::test_training_goes_on_while_a_checkpoint_is_written",
    "save_hf": "stack/test_run_resume.py::test_a_resumed_run_trains_the_rollouts_and_the_prompts_that_were_left",
    "train_env_vars": f"{PLACE}::test_the_learners_processes_get_their_environment",
    "ref_env_vars": f"{LEARNER}::test_each_role_is_built_and_computes_under_its_own_environment",
    "critic_env_vars": f"{LEARNER}::test_each_role_is_built_and_computes_under_its_own_environment",
    "engine_env_vars": f"{PLACE}::test_an_engine_gets_its_own_environment_and_it_wins",
    "deterministic_mode": f"{PLACE}::test_the_learners_processes_get_their_environment",
    "ref_use_dynamic_batching_in_infer": f"{PLACE}::test_the_reference_model_is_batched_in_its_own_way",
    "ref_max_tokens_per_microbatch_in_infer": (f"{PLACE}::test_the_reference_model_is_batched_in_its_own_way"),
    "ref_sequence_length_round_in_infer": f"{PLACE}::test_the_reference_model_is_batched_in_its_own_way",
    "use_pytorch_profiler": f"{LEARNER}::test_the_steps_asked_for_are_profiled",
    "profile_step_start": f"{LEARNER}::test_the_steps_asked_for_are_profiled",
    "profile_step_end": f"{LEARNER}::test_the_steps_asked_for_are_profiled",
    "profile_dir": f"{LEARNER}::test_the_steps_asked_for_are_profiled",
    "gamma": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights",
    "lambd": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights",
    "normalize_advantages": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights",
    "value_clip": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights",
    "critic_lr": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights",
    "critic_lr_warmup_steps": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights",
    "critic_load": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights",
    "num_critic_only_steps": f"{CRITIC}::test_the_policy_stands_still_while_the_critic_learns_alone",
    "recompute_granularity": f"{LEARNER}::test_recomputed_activations_are_the_same_and_are_not_kept",
    "recompute_method": f"{LEARNER}::test_recomputed_activations_are_the_same_and_are_not_kept",
    "recompute_num_layers": f"{LEARNER}::test_recomputed_activations_are_the_same_and_are_not_kept",
    "save_keep": "stack/test_run_resume.py::test_a_resumed_run_trains_the_rollouts_and_the_prompts_that_were_left",
    "load": "unit/test_checkpoints.py::test_what_cannot_be_resumed_is_said_before_anything_starts",
    "precision": "stack/test_learner_bf16.py::test_bfloat16_learns_what_float32_does",
    "tensor_model_parallel_size": f"{PLACE}::test_ranks_that_share_layers_are_handed_the_same_samples",
    "pipeline_model_parallel_size": f"{PLACE}::test_ranks_that_share_layers_are_handed_the_same_samples",
    "virtual_pipeline_model_parallel_size": f"{PLACE}::test_virtual_stages_take_micro_batches_in_groups",
    "context_parallel_size": f"{PLACE}::test_ranks_that_share_sequences_take_more_tokens_in_whole_pieces",
    "expert_model_parallel_size": f"{LAYOUTS}::test_experts_that_do_not_divide_are_refused",
    "expert_tensor_parallel_size": f"{LAYOUTS}::test_experts_that_do_not_divide_are_refused",
    "sequence_parallel": f"{PLACE}::test_sequence_parallel_ranks_cut_a_micro_batch_evenly",
    "use_distributed_optimizer": f"{PARALLEL}::test_the_distributed_optimizer_keeps_a_part_of_the_moments_on_each_rank",
    "actor_num_nodes": f"{PLACE}::test_the_number_of_engines_and_of_learner_ranks_follows_from_the_devices",
    "actor_num_gpus_per_node": f"{PLACE}::test_the_number_of_engines_and_of_learner_ranks_follows_from_the_devices",
    "learner_cpus": f"{LEARNER}::test_a_learner_rank_stays_on_its_cores_and_takes_its_threads",
    "learner_threads": f"{LEARNER}::test_a_learner_rank_stays_on_its_cores_and_takes_its_threads",
    "seed": f"{LEARNER}::test_another_warm_start_teaches_another_model",
    # weights
    "weight_transfer": f"{PLACE}::test_an_engine_setting_is_a_word_of_the_servers_command_line",
    "update_weight_buffer_size": f"{LEARNER}::test_weights_take_their_buffers_checks_and_timeout",
    "check_weight_update_equal": f"{LEARNER}::test_weights_take_their_buffers_checks_and_timeout",
    "update_weight_timeout_seconds": f"{LEARNER}::test_weights_take_their_buffers_checks_and_timeout",
    "pause_generation_mode": f"{PLACE}::test_engines_are_paused_in_the_mode_asked_for",
    "update_weights_interval": f"{SERVICE}::test_an_update_interval_publishes_every_so_many_batches_and_the_last",
    # engine
    "rollout_num_gpus": f"{PLACE}::test_the_number_of_engines_and_of_learner_ranks_follows_from_the_devices",
    "rollout_num_gpus_per_engine": f"{PLACE}::test_an_engine_setting_is_a_word_of_the_servers_command_line",
    "sglang_server_concurrency": f"{PLACE}::test_an_engine_setting_is_a_word_of_the_servers_command_line",
    "sglang_server_args": f"{PLACE}::test_an_engine_setting_is_a_word_of_the_servers_command_line",
    "sglang_router_policy": f"{PLACE}::test_the_router_gets_its_policy_and_its_patience",
    "sglang_router_request_timeout_secs": f"{PLACE}::test_the_router_gets_its_policy_and_its_patience",
    "engine_cpus": f"{PLACE}::test_engines_are_pinned_to_their_cores",
    "engine_start_timeout_seconds": f"{PLACE}::test_a_server_that_is_late_is_ended_with_a_sentence",
    "engine_health_interval_seconds": f"{REPAIR}::test_a_kill_is_noticed_at_the_next_look",
    "engine_health_timeout_seconds": f"{FLEET}::test_an_engine_that_draws_no_token_in_time_is_lost_unless_it_is_paused",
    "sglang_router_ip": f"{PLACE}::test_a_router_of_the_users_own_is_used_and_must_answer",
    "sglang_router_port": f"{PLACE}::test_a_router_of_the_users_own_is_used_and_must_answer",
    "colocate": "sim/test_colocated.py::test_engines_and_learner_take_turns_on_the_devices",
    "ray_address": f"{PLACE}::test_a_named_ray_cluster_is_joined_and_otherwise_one_is_started_here",
    "adaptive_concurrency": f"{HEAD}::test_adaptive_concurrency_keeps_the_engines_full_and_their_lines_short",
    # skip
    "skip_rollout": f"{SKIP_MANAGER}::test_the_legacy_switch_alone_skips_every_step",
    "skip_rollout_enable": f"{SKIP}::test_batch_functions_replay_whole_batches_by_trainer_step",
    "skip_rollout_dump_dir": f"{SKIP_MANAGER}::test_recordings_lie_where_the_seed_puts_them",
    "skip_rollout_steps": f"{SKIP_MANAGER}::test_steps_are_integers_and_ranges_with_both_ends",
    "skip_rollout_action": f"{SKIP}::test_repeat_generates_the_first_step_and_replays_it_for_all_others",
    "skip_async_rollout_enable": f"{SKIP}::test_the_second_run_generates_nothing_and_trains_on_equal_tokens",
    "skip_async_rollout_dump_dir": f"{SKIP_MANAGER}::test_recordings_lie_where_the_seed_puts_them",
    "skip_async_rollout_steps": f"{SKIP}::test_only_the_steps_asked_for_are_recorded_and_replayed",
    "skip_async_rollout_action": f"{SKIP_MANAGER}::test_the_seeds_overrides_and_the_flags_say_the_same",
    "skip_roles": f"{SKIP_MANAGER}::test_a_configured_step_runs_once_and_is_replayed_afterwards",
    "skip_replay_timing": f"{SKIP}::test_an_untimed_replay_takes_no_time",
    "skip_drain_seconds": f"{SKIP}::test_what_is_under_way_when_a_recording_run_ends_is_finished_for_so_long",
    "skip_mismatch": f"{SKIP}::test_it_may_be_left_alone_instead_with_one_warning",
    "skip_max_bytes": f"{SKIP}::test_a_full_folder_ends_recording_with_one_warning_and_the_run_goes_on",
    # observability
    "project_name": f"{SKIP_MANAGER}::test_recordings_lie_where_the_seed_puts_them",
    "experiment_name": f"{SKIP_MANAGER}::test_recordings_lie_where_the_seed_puts_them",
    "run_dir": f"{RUN}::test_a_run_folder_that_cannot_be_written_is_one_sentence",
    "metrics_port": "unit/test_observability_metrics.py::test_a_port_in_use_is_one_sentence_that_names_it",
    "sample_interval_seconds": "unit/test_page.py::test_a_sample_is_told_of_once_in_an_interval",
    "trace": f"{RUN}::test_onlookers_leave_trace_and_summary_and_serve_metrics_and_page",
    "trace_max_bytes": "unit/test_perfetto.py::test_the_file_stays_within_its_size_and_steps_outlive_groups",
    "log_format": f"{RUN}::test_json_log_lines_carry_what_is_bound",
    "progress_bar": f"{RUN}::test_the_bar_is_silent_without_a_terminal_or_when_switched_off",
    "use_tensorboard": "stack/test_sinks.py::test_tensorboard_shows_the_curves_of_the_run",
    "use_wandb": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_mode": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_project": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_group": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_always_use_train_step": f"{LOGS}::test_everything_is_plotted_over_optimizer_steps_if_asked_for",
    "no_progress_warn_seconds": f"{SERVICE}::test_a_stuck_engine_warns_and_then_stops_the_run_with_its_cause",
    "no_progress_abort_seconds": f"{SERVICE}::test_a_stuck_engine_warns_and_then_stops_the_run_with_its_cause",
}


@cache
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
