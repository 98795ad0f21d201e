"""No setting is parsed and then ignored.

For most settings this module computes something that acts in a run, such as the plan, an engine's command line, what a
learner rank is handed or the events of a simulated run, under two values of the setting; the two results must differ.
Where only a heavier test can observe a setting, `NAMED` names that test, and `tests/mutate_settings.py` proves that the
named test fails when the setting is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.sglang import launch, router
from miles_async.adapters.sglang.launch import Rendezvous
from miles_async.batching.batch import PackedBatch, rank_batches, repack_for_forward
from miles_async.config.device_plan import demand_of
from miles_async.config.fields import SETTINGS
from miles_async.config.generation import adapter_versions_of, bounds_of
from miles_async.config.learning_rate import critic_learning_rate, learning_rate
from miles_async.config.schema import RunConfig
from miles_async.config.table import table
from miles_async.errors import FatalError
from miles_async.events import RunStarted
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, Sample
from tests.configuration import KEYS, run_config
from tests.sim.engines import EngineModel
from tests.sim.world import World
from tests.unit.gym import CHAIN_SUM
from workers.specs import (
    answer_parsers,
    engine_spec,
    external_router,
    external_router_key,
    greedy_of,
    ray_arguments,
    router_spec,
    sampling_of,
)

TESTS = Path(__file__).parents[2]

Observe = Callable[[RunConfig], object]


# --- what is observed -----------------------------------------------------------------------------------------------


def plan(config: RunConfig) -> object:
    """Returns the values that start-up derives for each entry script, and the devices that it requests."""
    entries = ("train_async.py", "train.py")
    return [(table(config, entry), bounds_of(config, entry)) for entry in entries], demand_of(config)


def engine(config: RunConfig) -> object:
    """An engine's command line, environment, cores and time to start."""
    spec = engine_spec(config, "engine-0", "checkpoint", Path("logs"))
    words = launch.command(spec, 30000, Rendezvous("127.0.0.1", 30001, 30002))
    return words, launch.environment(spec), spec.cpus, spec.start_timeout


def second_turn(config: RunConfig) -> object:
    """The version of the adapter that the second turn of a group names after a publish."""
    adapters, pin = adapter_versions_of(config), PinnedVersion()
    assert adapters is not None
    versions = []
    for version in (1, 2):
        adapters.publish(version)
        versions.append(adapters.begin(pin))
    return versions


def routing(config: RunConfig) -> object:
    """The router that is used, and the arguments of one that is started."""
    arguments = router.arguments(router_spec(config, Path("logs")), 30000, 30001)
    return external_router(config), external_router_key(config), arguments


def requests(config: RunConfig) -> object:
    """The sampling parameters of training samples and of held-out problems."""
    return [sampling.body(sampling.max_new_tokens) for sampling in (sampling_of(config), greedy_of(config))]


def parsers(config: RunConfig) -> object:
    """The parsers of the answers to agents."""
    return answer_parsers(config, "model")


def ray_start(config: RunConfig) -> object:
    return ray_arguments(config)["address"]


def _groups() -> list[Group]:
    """Four groups of four samples of uneven lengths and rewards; no reward is the mean of its group."""
    lengths = [[3 + (5 * group + 3 * position) % 11 for position in range(4)] for group in range(4)]
    return [
        Group(
            Sample(
                index=4 * group + position,
                tokens=list(range(2 + length)),
                response_length=length,
                rollout_log_probs=[-1.0] * length,
                reward=float((group + position) % 3) ** 2,
            )
            for position, length in enumerate(of_group)
        )
        for group, of_group in enumerate(lengths)
    ]


def _columns(batch: PackedBatch) -> object:
    columns = (batch.tokens, batch.lengths, batch.targets, batch.advantages, batch.loss_weights)
    return [column.tolist() for column in columns]


def learner_input(config: RunConfig) -> object:
    """The micro-batches that each of eight learner ranks is handed for a batch of uneven samples."""
    return [
        [([_columns(batch) for batch in step.micro_batches], step.packing) for step in steps]
        for steps in rank_batches(_groups(), config, 8)
    ]


def computed_tokens(config: RunConfig) -> object:
    """The number of tokens that the learner computes in each micro-batch for samples with common prefixes."""
    [steps] = rank_batches(_groups(), config, 1, share_prefixes=True)
    return [batch.computed_tokens for step in steps for batch in step.micro_batches]


def forward_batches(config: RunConfig) -> object:
    """The micro-batches in which the policy and the reference model compute log-probabilities."""
    [steps] = rank_batches(_groups(), run_config(), 1)
    learners = (config.learner, config.learner.reference_batching)
    return [[_columns(part.batch) for part in repack_for_forward(steps[0].micro_batches, own)] for own in learners]


def learning_rates(config: RunConfig) -> object:
    """The learning rates of policy and critic over the steps of the run."""
    rates = (learning_rate(config), critic_learning_rate(config))
    return [[rate.at(step) for rate in rates] for step in range(0, 110, 3)]


def checkpoints(config: RunConfig) -> object:
    """The rollouts after which a checkpoint is written."""
    return [rollout for rollout in range(config.rollout.num_rollout) if config.checkpoint_due(rollout)]


def data(config: RunConfig) -> object:
    """The prompts of two epochs with their labels and metadata, and the problems that are held out."""
    source = open_data(config)
    fed = [[(sample.index, sample.prompt, sample.label) for sample in group] for group in source.get_samples(16)]
    return fed, [group[0].prompt for group in source.eval_problems()]


def simulated(**world: Any) -> Observe:
    """The batches and the events of a simulated run, and the error that it ends with."""

    def observe(config: RunConfig) -> object:
        run = World(config=config, **world)
        error = ""
        try:
            run.run()
        except FatalError as fatal:
            error = str(fatal)
        events = [event for event in run.trace.events if not isinstance(event, RunStarted)]
        return run.trainer.batches, sorted(run.trainer.saved), events, error

    return observe


# --- the settings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Another value of a setting, where its effect shows, and the settings without which it would have none."""

    value: Any
    observe: Observe
    given: Mapping[str, Any]


def change(observe: Observe, value: Any, **given: Any) -> Change:
    return Change(value, observe, given)


SMALL = {"num_rollout": 8, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
STANDS_STILL = EngineModel(stall_every=1.0, stall_seconds=50.0)
STAGES = {"pipeline_model_parallel_size": 4, "max_tokens_per_gpu": 30}
ROWS = {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 8}
FORWARD_ROWS = {"use_dynamic_batching_in_infer": True, "sequence_length_round_in_infer": 8}
REFERENCE_ROWS = {"ref_use_dynamic_batching_in_infer": True, "ref_sequence_length_round_in_infer": 8}
DECAY = {"lr": 1.0, "lr_decay_style": "WSD"}
FILE = {"prompt_data": "rows.jsonl", **KEYS, "eval_size": 0, "n_samples_per_prompt": 1}
SUMS = CHAIN_SUM | {"reasoning_gym_size": 8, "eval_size": 2, "n_samples_per_prompt": 1}

OBSERVED: dict[str, Change] = {
    # data
    "prompt_data": change(data, "rows.jsonl@[2:]", **FILE),
    "input_key": change(data, "other_prompt", **FILE),
    "label_key": change(data, "other_label", **FILE),
    "rollout_shuffle": change(data, True, **FILE),
    "rollout_seed": change(data, 43, **FILE, rollout_shuffle=True),
    "eval_size": change(data, 2, **FILE),
    "n_samples_per_prompt": change(data, 3, **FILE),
    "reasoning_gym_task": change(data, "basic_arithmetic", **SUMS),
    "reasoning_gym_settings": change(data, {"min_terms": 5, "max_terms": 6}, **SUMS),
    "reasoning_gym_size": change(data, 4, **SUMS),
    "prompt_template": change(data, "{expression}", **SUMS),
    # rollout
    "rollout_max_response_len": change(requests, 12),
    "rollout_temperature": change(requests, 0.7),
    "rollout_top_p": change(requests, 0.9),
    "rollout_top_k": change(requests, 20),
    "tool_call_parser": change(parsers, "qwen3_coder"),
    "reasoning_parser": change(parsers, "qwen3"),
    "rollout_stop": change(requests, ["END"]),
    "rollout_stop_token_ids": change(requests, [7]),
    "rollout_skip_special_tokens": change(requests, True),
    "num_rollout": change(simulated(), 5, **SMALL),
    "rollout_batch_size": change(plan, 16),
    "over_sampling_batch_size": change(plan, 64),
    "windowed_fifo_ratio": change(simulated(), 0.3, **SMALL, over_sampling_batch_size=16, max_weight_staleness=4),
    "max_weight_staleness": change(simulated(train_seconds=5.0), 1, **SMALL, over_sampling_batch_size=16),
    "rollout_function_path": change(plan, "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"),
    "schedule": change(plan, "fully_async"),
    "max_attempts": change(simulated(engines=EngineModel(failure_rate=0.4)), 1, **SMALL),
    "head_deadline_seconds": change(simulated(), 1.0, **SMALL, windowed_fifo_ratio=0.5),
    "head_deadline_action": change(simulated(), "wait", **SMALL, windowed_fifo_ratio=0.5, head_deadline_seconds=1.0),
    "partial_rollout": change(
        simulated(schedule=Schedule.SYNCHRONOUS), True, **SMALL, over_sampling_batch_size=8, max_weight_staleness=8
    ),
    "eval_interval": change(simulated(problems=3), 2, **SMALL),
    # algorithm
    "advantage_estimator": change(learner_input, "reinforce_plus_plus"),
    "grpo_std_normalization": change(learner_input, False),
    "rewards_normalization": change(learner_input, False),
    "loss_aggregation": change(learner_input, "token_mean"),
    "overlong_buffer_len": change(learner_input, 8, rollout_max_response_len=12),
    "overlong_penalty": change(learner_input, 2.0, rollout_max_response_len=12, overlong_buffer_len=8),
    "critic_lr": change(learning_rates, 1.0),
    "critic_lr_warmup_steps": change(learning_rates, 20),
    # learner
    "global_batch_size": change(plan, 64),
    "num_steps_per_rollout": change(learner_input, 2),
    "segments_are_samples": change(plan, True),
    "lr": change(learning_rates, 1.0),
    "lr_warmup_steps": change(learning_rates, 20),
    "lr_decay_style": change(learning_rates, "cosine"),
    "lr_decay_steps": change(learning_rates, 50, **DECAY),
    "min_lr": change(learning_rates, 0.1, **DECAY),
    "lr_wsd_decay_steps": change(learning_rates, 50, **DECAY),
    "lr_wsd_decay_style": change(learning_rates, "cosine", **DECAY),
    "max_tokens_per_gpu": change(learner_input, 20, rollout_max_response_len=8),
    "use_dynamic_batch_size": change(learner_input, False),
    "micro_batch_size": change(learner_input, 2, use_dynamic_batch_size=False),
    "balance_data": change(learner_input, False),
    "share_prefixes": change(computed_tokens, False),
    "use_dynamic_batching_in_train": change(learner_input, True),
    "max_tokens_per_microbatch_in_train": change(learner_input, 16, **ROWS),
    "sequence_length_round_in_train": change(learner_input, 32, **ROWS),
    "use_dynamic_batching_in_infer": change(forward_batches, True),
    "max_tokens_per_microbatch_in_infer": change(forward_batches, 64, **FORWARD_ROWS),
    "sequence_length_round_in_infer": change(forward_batches, 32, **FORWARD_ROWS),
    "ref_use_dynamic_batching_in_infer": change(forward_batches, True),
    "ref_max_tokens_per_microbatch_in_infer": change(forward_batches, 64, **REFERENCE_ROWS),
    "ref_sequence_length_round_in_infer": change(forward_batches, 32, **REFERENCE_ROWS),
    "lora_rank": change(plan, 8),
    "lora_alpha": change(plan, 32.0, lora_rank=8),
    "lora_target_modules": change(plan, ["q_proj", "v_proj"], lora_rank=8),
    "lora_exclude_modules": change(plan, ["q_proj"], lora_rank=8),
    "lora_type": change(plan, "rslora", lora_rank=8),
    "enable_mtp_training": change(plan, True),
    "mtp_loss_scaling_factor": change(plan, 0.5, enable_mtp_training=True),
    "tensor_model_parallel_size": change(learner_input, 2),
    "pipeline_model_parallel_size": change(learner_input, 2),
    "virtual_pipeline_model_parallel_size": change(learner_input, 2, **STAGES),
    "context_parallel_size": change(learner_input, 2),
    "expert_model_parallel_size": change(plan, 2),
    "sequence_parallel": change(learner_input, True, tensor_model_parallel_size=2),
    "max_nonfinite_batches": change(simulated(finite=lambda rollout_id: rollout_id % 3 == 0), 2, **SMALL),
    "save": change(checkpoints, "saved"),
    "save_interval": change(checkpoints, 5, save="saved"),
    "async_save": change(simulated(save_seconds=20.0), False, **SMALL, save="saved", save_interval=2),
    "actor_num_nodes": change(plan, 2),
    "actor_num_gpus_per_node": change(plan, 2),
    # weights
    "weight_transfer": change(engine, "disk"),
    "update_weights_interval": change(simulated(), 2, **SMALL),
    "max_kv_staleness": change(engine, 1),
    "lora_newest_each_turn": change(second_turn, True, lora_rank=8, max_weight_staleness=2),
    # engines and cluster
    "rollout_num_gpus": change(plan, 2),
    "rollout_num_gpus_per_engine": change(engine, 2),
    "sglang_server_concurrency": change(engine, 7),
    "sglang_server_args": change(engine, {"schedule_policy": "fcfs"}),
    "engine_env_vars": change(engine, {"NVTE_DEBUG": "1"}),
    "engine_cpus": change(engine, [0]),
    "engine_start_timeout_seconds": change(engine, 9.0),
    "engine_health_timeout_seconds": change(engine, 9.0),
    "sglang_router_policy": change(routing, "round_robin"),
    "sglang_router_args": change(routing, {"balance-abs-threshold": 0}),
    "sglang_router_request_timeout_secs": change(routing, 9.0),
    "sglang_router_ip": change(routing, "10.0.0.1", sglang_router_port=30000),
    "sglang_router_port": change(routing, 30001, sglang_router_ip="10.0.0.1"),
    "sglang_router_api_key": change(routing, "secret"),
    "ray_address": change(ray_start, "10.0.0.1:6379"),
    "colocate": change(plan, True),
    # stalls
    "no_progress_warn_seconds": change(simulated(engines=STANDS_STILL), 10.0, **SMALL),
    "no_progress_abort_seconds": change(simulated(engines=STANDS_STILL), 40.0, **SMALL),
    # observability
    "sample_interval_seconds": change(simulated(), None, **SMALL),
    # debugging
    "debug_rollout_only": change(plan, True),
    "debug_train_only": change(plan, True),
    "load_debug_rollout_data": change(plan, "debug/{rollout_id}.safetensors"),
}

# --- tests elsewhere that observe a setting -------------------------------------------------------------------------

CHECKS = "unit/config/test_config_checks.py"
DATA = "unit/adapters/datasets/test_datasets_source.py"
REWARDS = "unit/rewards/test_rewards_and_filters.py"
BUILTIN = "unit/rewards/test_rewards_builtin.py"
DATASETS = "unit/adapters/datasets/test_several_datasets.py"
FILTERS = "unit/test_filters.py"
GRADERS = "stack/test_graders.py"
PREFLIGHT = "unit/workers/test_preflight.py"
RUN = "unit/observability/test_observability_run.py"
ENVIRONMENTS = "processes/test_environment_process.py"
GENERATORS = "unit/workers/test_generators.py"
GENERATE = "unit/rollout/test_generate_functions.py"
HEAD = "sim/test_head_policy.py"
MILES = "unit/compat/miles/test_agents_and_tools_of_miles.py"
PLACE = "unit/config/test_settings_take_effect.py"
REPAIR = "sim/test_repair.py"
SKIP = "sim/test_skip.py"
SKIP_MANAGER = "unit/compat/verl/test_skip_manager.py"
CRITIC = "stack/test_learner_critic.py"
LOGS = "unit/observability/console/test_logs_and_sinks.py"
LEARNER = "stack/test_learner_settings.py"
LORA = "stack/test_learner_lora.py"
LEARNER_HOOKS = "stack/test_learner_hooks.py"
LOSS_FUNCTIONS = (
    "stack/test_loss_functions.py::"
    "test_functions_of_the_user_compute_the_gradients_of_the_same_built_in_loss[token_mean-tokens-one rank]"
)
FUNCTIONS_OF_PARTS = "stack/test_loss_functions.py::test_another_function_of_a_part_learns_other_weights"
SWITCHES = "stack/test_megatron_switches.py"
LAYOUTS = "unit/batching/test_layouts.py"
STORAGE = "unit/adapters/storage"
PARALLEL = "stack/test_learner_parallel.py"
OPTIMIZER = "stack/test_optimizer_memory.py"

FAULTS = "unit/pipeline/test_fault_points.py"

NAMED: dict[str, str] = {
    # faults
    "inject_faults": f"{FAULTS}::test_another_seed_of_the_faults_lets_them_happen_at_another_call",
    "fault_seed": f"{FAULTS}::test_another_seed_of_the_faults_lets_them_happen_at_another_call",
    # SGLang
    "allow_untested": (
        "unit/config/test_untested_arguments.py::test_an_untested_argument_is_refused_with_the_flag_that_allows_it"
    ),
    # the rollout worker
    "max_restarts": (
        "unit/workers/test_rollout_workers.py::"
        "test_a_run_ends_when_it_loses_two_rollout_workers_without_a_batch_between_them"
    ),
    "resume": "stack/test_chaos.py::test_a_run_that_is_started_again_continues_in_its_folder",
    "off_lineage": "sim/test_lost_workers.py::test_learner_and_rollout_worker_may_be_lost_together",
    "store_dir": "run/test_run_with_faults.py::test_the_groups_that_a_drained_run_keeps_are_in_its_store",
    "drain_seconds": "sim/test_drain.py::test_groups_that_take_longer_than_the_drain_are_interrupted",
    # model and warm start
    "hf_checkpoint": "unit/workers/test_preflight.py::test_a_checkpoint_whose_weights_are_missing_or_cut_off_is_named",
    "megatron_model_flags": (
        "unit/compat/test_guest_flags.py::test_a_flag_that_describes_another_model_is_refused_with_both_values"
    ),
    "passes_per_rollout": (
        "stack/test_learner_megatron.py::test_a_second_pass_takes_the_same_optimizer_steps_again[1]"
    ),
    "tiny_num_layers": f"{LEARNER}::test_the_tiny_model_has_the_configured_shape",
    "tiny_hidden_size": f"{LEARNER}::test_the_tiny_model_has_the_configured_shape",
    "tiny_ffn_hidden_size": f"{LEARNER}::test_the_tiny_model_has_the_configured_shape",
    "tiny_num_attention_heads": f"{LEARNER}::test_the_tiny_model_has_the_configured_shape",
    "tiny_num_query_groups": f"{LEARNER}::test_the_tiny_model_has_the_configured_shape",
    "tiny_max_position_embeddings": f"{LEARNER}::test_the_tiny_model_has_the_configured_shape",
    "tiny_init_std": f"{LEARNER}::test_the_tiny_model_has_the_configured_shape",
    "warm_start_max_steps": f"{LEARNER}::test_a_warm_start_is_checked_at_its_interval_and_after_its_last_step",
    "warm_start_accuracy": f"{LEARNER}::test_a_warm_start_is_checked_at_its_interval_and_after_its_last_step",
    "warm_start_lr": f"{LEARNER}::test_another_seed_of_the_warm_start_gives_another_model",
    "warm_start_batch_size": f"{LEARNER}::test_another_seed_of_the_warm_start_gives_another_model",
    "warm_start_check_every": f"{LEARNER}::test_a_warm_start_is_checked_at_its_interval_and_after_its_last_step",
    "warm_start_examples_path": f"{PREFLIGHT}::test_a_function_makes_several_examples_of_a_problem",
    "warm_start_template": f"{PREFLIGHT}::test_a_warm_start_formats_prompts_with_its_template",
    "cache_dir": f"{LEARNER}::test_another_seed_of_the_warm_start_gives_another_model",
    # data
    "apply_chat_template": f"{DATA}::test_chats_without_a_tokenizer_are_refused_with_the_setting_to_change",
    "metadata_key": f"{DATA}::test_metadata_and_tools_are_read_from_the_configured_keys",
    "tool_key": f"{DATA}::test_metadata_and_tools_are_read_from_the_configured_keys",
    "apply_chat_template_kwargs": "stack/test_chat_tokens.py::test_template_arguments_reach_every_chat",
    "disable_rollout_global_dataset": f"{DATA}::test_without_data_blank_samples_are_fed_with_rising_indices",
    "data_source_path": (
        "unit/adapters/datasets/test_function_source.py::test_the_prompts_are_those_of_the_users_class"
    ),
    "buffer_filter_path": f"{DATA}::test_a_buffer_filter_of_slime_that_removes_no_group_returns_each_group_once",
    # rollout
    "rollout_max_prompt_len": f"{PLACE}::test_a_prompt_that_is_too_long_is_refused_before_it_reaches_an_engine",
    "custom_rm_isolated": f"{GRADERS}::test_an_isolated_reward_that_ends_its_process_fails_its_sample",
    "group_rm": f"{BUILTIN}::test_a_group_reward_scores_all_samples_in_one_call",
    "reward_key": f"{BUILTIN}::test_a_dictionary_reward_is_kept_completely_and_one_entry_is_trained_on",
    "rm_url": f"{BUILTIN}::test_a_remote_reward_receives_prompt_response_and_label_and_a_5xx_is_retried",
    "remote_rm_concurrency": f"{BUILTIN}::test_the_number_of_concurrent_remote_reward_requests_is_limited",
    "remote_rm_retries": f"{BUILTIN}::test_a_remote_reward_fails_after_the_configured_retries",
    "reward_processes": f"{GRADERS}::test_each_grader_process_scores_one_group_at_a_time",
    "allow_unconfined_rewards": "stack/test_confined_graders.py::test_without_a_seccomp_filter_no_text_is_evaluated",
    "reward_memory_gb": "stack/test_confined_graders.py::test_a_response_that_needs_too_much_memory_counts_as_wrong",
    "over_sampling_filter_path": f"{FILTERS}::test_the_over_sampling_filter_is_loaded_by_its_path_and_given_the_groups",
    "rollout_sample_filter_path": f"{FILTERS}::test_a_sample_filter_takes_samples_out_of_the_loss_but_not_the_batch",
    "custom_reward_post_process_path": (
        "unit/workers/test_reward_post_process.py::test_the_rewards_that_the_function_returns_are_the_advantages"
    ),
    "custom_convert_samples_to_train_data_path": (
        "unit/workers/test_reward_post_process.py::test_masks_and_rewards_of_slimes_training_data_are_trained"
    ),
    "rollout_all_samples_process_path": (
        "sim/test_all_samples_of_a_batch.py::test_the_function_gets_the_groups_that_filters_reject_too"
    ),
    "custom_rollout_log_function_path": (
        "unit/workers/test_rollout_logs.py::test_a_batch_is_logged_with_the_metrics_of_the_rollout_function"
    ),
    "custom_eval_rollout_log_function_path": (
        "unit/workers/test_rollout_logs.py::test_an_evaluation_is_logged_with_the_metrics_of_its_function"
    ),
    "rollout_sample_hook_path": f"{GENERATORS}::test_hooks_change_and_replace_each_finished_sample_in_turn",
    "save_debug_rollout_data": f"{FILTERS}::test_every_batch_is_saved_at_the_configured_path_and_in_the_dump_folder",
    "dump_details": f"{FILTERS}::test_every_batch_is_saved_at_the_configured_path_and_in_the_dump_folder",
    "shuffle_rewards": f"{PLACE}::test_the_control_experiment_gives_samples_the_rewards_of_others",
    "queue_capacity": f"{GENERATORS}::test_posted_trajectories_wait_up_to_the_capacity_of_the_queue",
    "dynamic_sampling_filter_path": f"{CHECKS}::test_a_window_without_effect_is_noted",
    "adapters": "sim/test_several_adapters.py::test_shares_follow_the_weights_if_the_learner_is_the_bottleneck",
    "datasets": f"{DATASETS}::test_data_sets_take_turns_in_proportion_to_their_weights",
    "dataset_sampling": f"{DATASETS}::test_a_function_chooses_the_data_set_by_what_was_earned",
    "difficulty_band": f"{DATASETS}::test_the_band_can_be_set",
    "eval_datasets": f"{PLACE}::test_each_evaluation_data_set_may_set_its_sampling",
    "eval_function_path": f"{GENERATORS}::test_a_user_defined_evaluation_is_loaded_by_its_path",
    "slime_imports": (
        "unit/config/test_check_config_functions.py::test_slime_imports_lets_a_module_import_the_names_of_slime_and_miles"
    ),
    "min_samples_per_group": (
        "sim/test_failing_samples.py::test_a_group_is_trained_without_samples_that_fail_in_every_attempt"
    ),
    "custom_generate_function_path": f"{GENERATORS}::test_a_user_defined_generate_function_has_the_configured_timeout",
    "environment": f"{ENVIRONMENTS}::test_the_tasks_of_an_environment_are_the_data_of_the_run",
    "environment_settings": f"{ENVIRONMENTS}::test_a_task_gets_the_address_of_the_model_and_returns_its_reward",
    "environment_size": f"{ENVIRONMENTS}::test_no_more_tasks_are_read_than_the_run_asks_for",
    "environment_python": f"{ENVIRONMENTS}::test_a_missing_interpreter_is_reported_with_the_command_that_creates_it",
    "agent_port": f"{GENERATORS}::test_agents_are_served_at_the_configured_port",
    "generate_timeout_seconds": f"{GENERATORS}::test_a_user_defined_generate_function_has_the_configured_timeout",
    "tool_max_turns": f"{GENERATE}::test_a_response_ends_after_the_maximum_number_of_tool_calls",
    "tool_search_corpus": f"{GENERATE}::test_a_search_answers_from_the_corpus",
    "rm_type": f"{REWARDS}::test_exact_compares_the_stripped_response_with_the_label",
    "async_data_buffer_capacity_factor": (
        "unit/compat/test_guest_flags.py::test_the_buffer_of_miles_counts_finished_groups"
    ),
    "custom_agent_function_path": f"{MILES}::test_an_agent_of_miles_needs_no_key_and_its_result_is_in_the_metadata",
    "generate_tool_specs_path": f"{MILES}::test_tools_of_miles_are_executed_and_their_results_are_not_trained",
    "generate_execute_tool_function_path": f"{MILES}::test_a_tool_that_returns_no_text_fails_its_sample",
    "generate_max_turns": f"{MILES}::test_a_sample_ends_after_the_maximum_number_of_answers",
    "max_seq_len": (
        f"{MILES}::test_each_answer_of_several_turns_may_have_the_response_limit_within_the_length_of_the_sample"
    ),
    "max_answer_len": (
        f"{MILES}::test_each_answer_of_several_turns_may_have_the_response_limit_within_the_length_of_the_sample"
    ),
    "num_epoch": "unit/config/test_resolved_settings.py::test_epochs_become_a_number_of_batches",
    "custom_args": "unit/rollout/test_contract_of_rollout_functions.py::test_args_has_the_attributes_that_users_add",
    "custom_rm_path": f"{REWARDS}::test_a_custom_reward_is_loaded_by_its_path",
    "reward_timeout_seconds": f"{REWARDS}::test_a_reward_that_times_out_fails_its_sample",
    # algorithm
    "eps_clip": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[eps_clip]",
    "eps_clip_high": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[eps_clip_high]",
    **{
        name: f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[{name}]"
        for name in (
            *("eps_clip_c", "tis_clip_low", "rejection_level", "rejection_band", "rejection_veto"),
            *("use_opsm", "opsm_delta", "topr_positive_weight", "topr_negative_weight", "kimi15_tau"),
        )
    },
    "count_removed_samples": (
        "unit/batching/test_train_batch.py::"
        "test_a_removed_sample_counts_in_the_mean_over_samples_unless_a_setting_says_otherwise"
    ),
    "get_mismatch_metrics": f"{LEARNER}::test_a_step_reports_the_mismatch_of_engine_and_learner",
    "off_policy_correction": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[off_policy_correction]",
    "policy_objective": f"{LEARNER}::test_another_estimator_or_correction_learns_other_weights[gmpo]",
    "sapo_temperatures": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[sapo_temperatures]",
    "dppo_threshold": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[dppo_threshold]",
    "m2po_budget": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[m2po_budget]",
    "icepop_band": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[icepop_band]",
    "custom_loss_function_path": LOSS_FUNCTIONS,
    "custom_advantage_function_path": f"{FUNCTIONS_OF_PARTS}[custom_advantage_function_path]",
    "rollout_data_postprocess_path": (
        "stack/test_loss_functions.py::test_advantages_that_a_function_changes_afterwards_are_those_of_the_loss[none]"
    ),
    "custom_tis_function_path": f"{FUNCTIONS_OF_PARTS}[custom_tis_function_path]",
    "custom_megatron_init_path": f"{LEARNER_HOOKS}::test_the_hook_of_the_start_is_called_before_the_model_is_built",
    "custom_megatron_before_log_prob_hook_path": (
        f"{LEARNER_HOOKS}::test_a_hook_is_called_before_log_probabilities_are_computed"
    ),
    "custom_megatron_before_train_step_hook_path": f"{LEARNER_HOOKS}::test_a_hook_is_called_before_each_optimizer_step",
    "custom_pg_loss_reducer_function_path": f"{FUNCTIONS_OF_PARTS}[custom_pg_loss_reducer_function_path]",
    "tis_clip": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[tis_clip]",
    "entropy_coef": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[entropy_coef]",
    "use_kl_loss": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[use_kl_loss]",
    "kl_loss_coef": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[kl_loss_coef]",
    "use_rollout_logprobs": (f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[use_rollout_logprobs]"),
    "lr_warmup_fraction": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[lr_warmup_fraction]",
    "kl_loss_type": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[kl_loss_type]",
    "kl_coef": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[kl_coef]",
    "ref_load": f"{LEARNER}::test_the_reference_model_may_be_another_checkpoint",
    # learner
    "loss_type": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[loss_type]",
    "weight_decay": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[weight_decay]",
    "adam_beta1": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[adam_beta1]",
    "adam_beta2": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[adam_beta2]",
    "clip_grad": f"{LEARNER}::test_another_value_of_a_setting_learns_other_weights[clip_grad]",
    "save_hf": "stack/test_run_resume.py::test_a_resumed_run_trains_the_remaining_rollouts_and_prompts",
    "train_env_vars": f"{PLACE}::test_the_learners_processes_get_their_environment",
    "ref_env_vars": f"{LEARNER}::test_each_role_is_built_and_computes_under_its_own_environment",
    "critic_env_vars": f"{LEARNER}::test_each_role_is_built_and_computes_under_its_own_environment",
    "deterministic_mode": f"{PLACE}::test_the_learners_processes_get_their_environment",
    "use_pytorch_profiler": f"{LEARNER}::test_the_configured_steps_are_profiled",
    "profile_step_start": f"{LEARNER}::test_the_configured_steps_are_profiled",
    "profile_step_end": f"{LEARNER}::test_the_configured_steps_are_profiled",
    "profile_dir": f"{LEARNER}::test_the_configured_steps_are_profiled",
    "gamma": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights[gamma]",
    "lambd": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights[lambd]",
    "normalize_advantages": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights[normalize_advantages]",
    "value_clip": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights[value_clip]",
    "critic_load": f"{CRITIC}::test_another_setting_of_the_critic_learns_other_weights[critic_load]",
    "num_critic_only_steps": f"{CRITIC}::test_the_policy_is_frozen_while_only_the_critic_learns",
    "attention_backend": f"{SWITCHES}::test_only_the_chosen_attention_kernels_are_allowed",
    "megatron_args": f"{SWITCHES}::test_fields_that_users_set_reach_the_model_the_gradients_and_the_optimizer",
    "rope_fusion": f"{SWITCHES}::test_a_switch_reaches_megatron_under_its_own_name[rope_fusion]",
    "bias_swiglu_fusion": f"{SWITCHES}::test_a_switch_reaches_megatron_under_its_own_name[bias_swiglu_fusion]",
    "gradient_accumulation_fusion": f"{SWITCHES}::"
    "test_a_switch_reaches_megatron_under_its_own_name[gradient_accumulation_fusion]",
    "moe_permute_fusion": f"{SWITCHES}::test_a_switch_reaches_megatron_under_its_own_name[moe_permute_fusion]",
    "moe_router_fusion": f"{SWITCHES}::test_a_switch_reaches_megatron_under_its_own_name[moe_router_fusion]",
    "moe_router_dtype": f"{SWITCHES}::test_a_switch_reaches_megatron_under_its_own_name[moe_router_dtype]",
    "moe_token_dispatcher_type": f"{SWITCHES}::"
    "test_a_switch_reaches_megatron_under_its_own_name[moe_token_dispatcher_type]",
    "overlap_grad_reduce": f"{PARALLEL}::"
    "test_parallel_ranks_compute_the_gradients_and_weights_of_one_rank[data parallel]",
    "overlap_param_gather": f"{PARALLEL}::test_weights_are_gathered_beside_the_forward_pass_if_that_is_asked_for",
    "optimizer_cpu_offload": f"{OPTIMIZER}::test_a_part_of_the_state_is_offloaded",
    "optimizer_offload_fraction": f"{OPTIMIZER}::test_a_part_of_the_state_is_offloaded",
    "overlap_cpu_optimizer_d2h_h2d": f"{OPTIMIZER}::test_each_parameter_has_an_optimizer_of_its_own_beside_copies",
    "use_precision_aware_optimizer": f"{OPTIMIZER}::test_the_optimizer_holds_what_the_settings_say",
    "main_grads_dtype": f"{OPTIMIZER}::test_the_optimizer_holds_what_the_settings_say",
    "main_params_dtype": f"{OPTIMIZER}::test_the_optimizer_holds_what_the_settings_say",
    "exp_avg_dtype": f"{OPTIMIZER}::test_the_optimizer_holds_what_the_settings_say",
    "exp_avg_sq_dtype": f"{OPTIMIZER}::test_the_optimizer_holds_what_the_settings_say",
    "recompute_modules": f"{LEARNER}::test_recomputed_activations_are_equal_and_not_stored[feed-forward layers]",
    "decoder_first_pipeline_num_layers": f"{LAYOUTS}::test_uneven_pipelines_that_do_not_divide_are_refused",
    "decoder_last_pipeline_num_layers": f"{LAYOUTS}::test_uneven_pipelines_that_do_not_divide_are_refused",
    "distrib_optim_fully_reshardable_mem_efficient": f"{PARALLEL}::"
    "test_one_rank_holds_the_optimizer_state_of_a_checkpoint_if_it_is_asked_for",
    "recompute_granularity": f"{LEARNER}::test_recomputed_activations_are_equal_and_not_stored",
    "recompute_method": f"{LEARNER}::test_recomputed_activations_are_equal_and_not_stored",
    "recompute_num_layers": f"{LEARNER}::test_recomputed_activations_are_equal_and_not_stored",
    "save_keep": "stack/test_run_resume.py::test_a_resumed_run_trains_the_remaining_rollouts_and_prompts",
    "checkpoint_checksums": f"{STORAGE}/test_checkpoint_folder.py::test_without_checksums_only_sizes_are_compared",
    "load": f"{STORAGE}/test_checkpoints.py::test_a_run_that_cannot_be_resumed_is_refused_before_anything_starts",
    "precision": "stack/test_learner_bf16.py::test_bfloat16_learns_what_float32_does",
    "transformer_impl": f"{LEARNER}::test_transformer_engine_is_refused_where_it_cannot_run",
    "megatron_to_hf_mode": "unit/config/test_model_source.py::"
    "test_the_check_of_the_configuration_names_what_the_bridge_lacks",
    "expert_tensor_parallel_size": f"{LAYOUTS}::test_experts_that_do_not_divide_are_refused",
    "use_distributed_optimizer": f"{PARALLEL}::test_the_distributed_optimizer_shards_its_moments_over_the_ranks",
    "learner_cpus": f"{LEARNER}::test_a_learner_rank_stays_on_its_cores_and_takes_its_threads",
    "learner_threads": f"{LEARNER}::test_a_learner_rank_stays_on_its_cores_and_takes_its_threads",
    "seed": f"{LEARNER}::test_another_seed_of_the_warm_start_gives_another_model",
    "lora_dropout": f"{LORA}::test_dropout_acts_on_gradients_only",
    "experts_shared_outer_loras": f"{LORA}::test_adapters_get_the_gradients_of_lora_in_plain_pytorch",
    "lora_load": f"{LORA}::test_adapters_get_the_gradients_of_lora_in_plain_pytorch",
    "lora_merge": f"{LORA}::test_merged_weights_after_a_step_are_those_of_plain_pytorch",
    # weights
    "gpu_memory_gib": "unit/config/test_memory.py::test_a_job_that_does_not_fit_is_refused_with_settings_that_do",
    "host_memory_gib": "unit/config/test_memory.py::test_copies_that_exceed_the_host_memory_are_refused",
    "update_weight_buffer_size": f"{LEARNER}::test_weights_take_their_buffers_checks_and_timeout",
    "check_weight_update_equal": f"{LEARNER}::test_weights_take_their_buffers_checks_and_timeout",
    "update_weight_timeout_seconds": f"{LEARNER}::test_weights_take_their_buffers_checks_and_timeout",
    "pause_generation_mode": f"{PLACE}::test_engines_are_paused_in_the_configured_mode",
    # engine
    "engine_health_interval_seconds": f"{REPAIR}::test_a_killed_engine_is_noticed_at_the_next_health_check",
    "adaptive_concurrency": f"{HEAD}::test_adaptive_concurrency_keeps_the_engines_full_and_their_lines_short",
    # skip
    "skip_rollout": f"{SKIP_MANAGER}::test_the_legacy_switch_alone_skips_every_step",
    "skip_rollout_enable": f"{SKIP}::test_batch_functions_replay_whole_batches_by_trainer_step",
    "skip_rollout_dump_dir": f"{SKIP_MANAGER}::test_recordings_are_kept_in_the_folders_that_verl_uses",
    "skip_rollout_steps": f"{SKIP}::test_batch_functions_replay_whole_batches_by_trainer_step",
    "skip_rollout_action": f"{SKIP}::test_repeat_generates_the_first_step_and_replays_it_for_all_others",
    "skip_async_rollout_enable": f"{SKIP}::test_the_second_run_generates_nothing_and_trains_on_equal_tokens",
    "skip_async_rollout_dump_dir": f"{SKIP_MANAGER}::test_recordings_are_kept_in_the_folders_that_verl_uses",
    "skip_async_rollout_steps": f"{SKIP}::test_only_the_steps_asked_for_are_recorded_and_replayed",
    "skip_async_rollout_action": f"{SKIP}::test_repeat_replays_the_recorded_groups_for_all_others_of_the_stream",
    "skip_roles": f"{SKIP_MANAGER}::test_a_configured_step_runs_once_and_is_replayed_afterwards",
    "skip_replay_timing": f"{SKIP}::test_an_untimed_replay_takes_no_time",
    "skip_drain_seconds": f"{SKIP}::test_a_recording_run_waits_a_limited_time_for_groups_in_flight_when_it_ends",
    "skip_mismatch": f"{SKIP}::test_a_recording_that_does_not_match_may_be_ignored_with_one_warning",
    "skip_max_bytes": f"{SKIP}::test_a_full_folder_ends_recording_with_one_warning_and_the_run_continues",
    # observability
    "project_name": f"{SKIP_MANAGER}::test_recordings_are_kept_in_the_folders_that_verl_uses",
    "experiment_name": f"{SKIP_MANAGER}::test_recordings_are_kept_in_the_folders_that_verl_uses",
    "run_name": f"{RUN}::test_a_run_folder_has_the_name_that_is_set",
    "run_dir": f"{RUN}::test_a_run_folder_that_cannot_be_created_is_a_user_error",
    "metrics_port": f"{RUN}::test_metrics_are_served_at_the_configured_port",
    "trace": f"{RUN}::test_subscribers_write_trace_and_summary_and_serve_metrics_and_page",
    "trace_max_bytes": f"{RUN}::test_the_trace_of_a_run_stays_within_its_configured_size",
    "event_log_rotate_bytes": f"{RUN}::test_the_event_log_of_a_run_is_split_at_the_configured_size",
    "event_log_max_bytes": f"{RUN}::test_the_event_log_of_a_run_stays_within_its_configured_size",
    "log_rotate_bytes": f"{RUN}::test_the_logs_of_a_run_are_rotated_at_the_configured_size",
    "log_format": f"{RUN}::test_the_driver_logs_in_the_configured_format",
    "plain_lines": ("unit/observability/console/test_terminal.py::test_a_terminal_shows_the_plain_lines_on_request"),
    "progress_bar": f"{RUN}::test_the_bar_of_a_run_is_shown_if_it_is_enabled",
    "use_tensorboard": "stack/test_sinks.py::test_tensorboard_shows_the_curves_of_the_run",
    "use_wandb": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_key": "unit/observability/console/test_logs_and_sinks.py::test_weights_and_biases_gets_server_team_and_key",
    "wandb_host": "unit/observability/console/test_logs_and_sinks.py::test_weights_and_biases_gets_server_team_and_key",
    "wandb_team": "unit/observability/console/test_logs_and_sinks.py::test_weights_and_biases_gets_server_team_and_key",
    "wandb_mode": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_project": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_group": "stack/test_sinks.py::test_weights_and_biases_keeps_the_run_offline",
    "wandb_always_use_train_step": f"{LOGS}::test_the_trackers_of_a_run_plot_over_optimizer_steps_if_configured",
}
"""The test that observes the setting, below `tests/`."""


# --- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def rows_and_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of prompts in the working directory, and the command lines of a GPU machine."""
    rows = [{"prompt": f"q{i}", "label": f"a{i}", "other_prompt": f"r{i}", "other_label": f"b{i}"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "has_cuda", lambda: True)


@pytest.mark.parametrize("name", OBSERVED)
def test_another_value_of_a_setting_makes_a_difference(name: str) -> None:
    case = OBSERVED[name]
    usual = run_config(**case.given)
    changed = run_config(**{**case.given, name: case.value})
    assert case.observe(usual) == case.observe(usual), "what is observed must depend on nothing but the settings"
    assert case.observe(changed) != case.observe(usual)


def test_every_setting_is_observed_here_or_names_the_test_that_observes_it() -> None:
    missing = [name for name in SETTINGS if name not in OBSERVED and name not in NAMED]
    assert missing == [], "add these to OBSERVED, or to NAMED with the test that observes them: " + ", ".join(missing)
    assert [name for name in (*OBSERVED, *NAMED) if name not in SETTINGS] == []
    assert OBSERVED.keys() & NAMED.keys() == set()


def test_every_named_test_exists() -> None:
    missing = []
    for test in NAMED.values():
        file, _, function = test.partition("::")
        if function.partition("[")[0] not in _functions(file):
            missing.append(test)
    assert missing == []


@cache
def _functions(file: str) -> set[str]:
    path = TESTS / file
    return set(re.findall(r"^(?:async )?def (\w+)", path.read_text(), re.MULTILINE)) if path.exists() else set()
