"""Settings that contradict each other, or name what is not there: one sentence each, which says what to set.

Only what can be told at once and without importing anything heavy; what needs the data, the model or a user's module
is checked by whoever opens it, at start-up and in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from miles_async.config.derived import (
    GREEDY_FUNCTION,
    SFT_FUNCTION,
    bounds_of,
    checkpoint_due,
    data_parallel_ranks,
    engines,
    evaluation_places,
    generates,
    hf_export,
    keeps_reference,
    learner_ranks,
    least_tokens_per_gpu,
    micro_batch_tokens,
    reference_batching,
    samples_per_rollout,
    samples_per_step,
    schedule_of,
    trains_only,
)
from miles_async.config.layouts import layout_problems
from miles_async.config.schema import RunConfig
from miles_async.config.server_args import misfits
from miles_async.core.bounds import Bounds, Schedule

BUILT_IN_REWARDS = ("reasoning_gym", "exact", "math", "dapo", "deepscaler", "f1", "gpqa", "ifeval", "remote_rm")
"""What `rm_type` may name, with or without `boxed_` before it (`rewards/builtin.py`)."""

Check = Callable[[RunConfig], Iterator[str]]


def problems(config: RunConfig, entry: str) -> list[str]:
    """Why a run of `entry` would be refused; empty where it may start."""
    schedule = schedule_of(config, entry)
    found = [sentence for check in _CHECKS for sentence in check(config)]
    if config.cluster.colocate and schedule is not Schedule.TURNS:
        found.append("colocate is for train.py: what generates while it trains needs devices of its own; unset it")
    if schedule is not Schedule.TURNS and config.rollout.max_weight_staleness == 0:
        found.append(
            "max_weight_staleness 0 allows no overlap of generation and training: use train.py, which takes turns, "
            "or set it to 1 or more"
        )
    elif schedule is Schedule.FULLY_ASYNC:
        found += _flow(config, bounds_of(config, entry))
    return found


def notes(config: RunConfig, entry: str) -> list[str]:
    """Settings that will do nothing in this run, or something else than one may think: worth a warning."""
    return [sentence for note in _NOTES for sentence in note(config, entry)]


def _policy_notes(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    if config.algorithm.off_policy_correction == "none" and schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        yield (
            "off_policy_correction none trains tokens of older weights as if they were new, and the policy ratio, "
            "measured from the trainer's own log-probabilities, hides it; set it to tis"
        )
    if rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0:
        yield (
            "rollout_top_p and rollout_top_k cut the distribution that is sampled from, but the trainer's "
            "log-probabilities are of the whole one: ratios are off by what was cut; leave both unset, or watch ess"
        )


def _idle_over_sampling_filter(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    if rollout.over_sampling_filter_path is None:
        return
    if schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        yield "over_sampling_filter_path has no effect: it chooses within a batch, and a stream has none; use train.py"
    elif rollout.over_sampling_batch_size in (None, rollout.rollout_batch_size):
        yield "over_sampling_filter_path has no choice: set over_sampling_batch_size above rollout_batch_size"


def _idle_window(config: RunConfig, entry: str) -> Iterator[str]:
    rollout = config.rollout
    if rollout.windowed_fifo_ratio is None:
        return
    if rollout.rollout_function_path == GREEDY_FUNCTION:
        yield (
            f"windowed_fifo_ratio has no effect: {GREEDY_FUNCTION} collects what finishes first; "
            "unset rollout_function_path, or name windowed_fifo_rollout.generate_rollout"
        )
        return
    surplus = rollout.over_sampling_batch_size not in (None, rollout.rollout_batch_size)
    filtered = rollout.dynamic_sampling_filter_path is not None
    if schedule_of(config, entry) is not Schedule.FULLY_ASYNC and not surplus and not filtered:
        yield (
            "windowed_fifo_ratio has no effect: every generated group is trained; "
            "set over_sampling_batch_size above rollout_batch_size, or a dynamic_sampling_filter_path"
        )


def _idle_skip(config: RunConfig, entry: str) -> list[str]:
    used, idle = ("rollout", "async_rollout")
    if schedule_of(config, entry) is Schedule.FULLY_ASYNC:
        used, idle = idle, used
    roles = {"rollout": config.skip.rollout, "async_rollout": config.skip.async_rollout}
    found = []
    # The deprecated switch enables both, for whichever fits.
    if roles[idle].enable and not roles[used].enable:
        found.append(f"skip.{idle} has no effect: this run generates in the way of skip.{used}; enable that one")
    if roles[used].enable and not roles[used].steps:
        found.append(f'skip.{used} skips nothing: set skip.{used}.steps, such as "[1-128]"')
    return found


def _router_notes(config: RunConfig, entry: str) -> Iterator[str]:
    policy = config.engine.sglang_router_policy
    if policy in ("consistent_hashing", "prefix_hash") and engines(config) > 1:
        yield (
            f"sglang_router_policy {policy} ties requests to engines by a hash, however full these are: one engine may "
            "get most of them and thrash its cache while others idle; cache_aware or power_of_two look at the load"
        )


def _batch_sizes(config: RunConfig) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    samples, steps = samples_per_rollout(config), learner.num_steps_per_rollout
    made = f"rollout_batch_size {rollout.rollout_batch_size} * n_samples_per_prompt {rollout.n_samples_per_prompt}"
    if learner.global_batch_size is None:
        if samples % steps:
            fitting = _nearest_divisor(samples, steps)
            yield (
                f"{made} = {samples} samples cannot be split into num_steps_per_rollout {steps} equal steps; "
                f"set num_steps_per_rollout to {fitting}"
            )
    elif samples != learner.global_batch_size * steps:
        yield (
            f"{made} = {samples} samples, but global_batch_size {learner.global_batch_size} * num_steps_per_rollout "
            f"{steps} = {learner.global_batch_size * steps}; set {_fitting_sizes(config)}"
        )
    if samples_per_step(config) < (ranks := _data_parallel(config)):
        yield (
            f"a step of {samples_per_step(config)} samples leaves some of the {ranks} data-parallel learner ranks "
            f"without any; set global_batch_size to {ranks} or more"
        )


def _fitting_sizes(config: RunConfig) -> str:
    """The smallest changes after which the sizes agree."""
    asked, steps = config.learner.global_batch_size or 1, config.learner.num_steps_per_rollout
    samples, per_prompt = samples_per_rollout(config), config.rollout.n_samples_per_prompt
    fits = []
    if samples % steps == 0:
        fits.append(f"global_batch_size to {samples // steps}")
    if samples % asked == 0:
        fits.append(f"num_steps_per_rollout to {samples // asked}")
    if asked * steps % per_prompt == 0:
        fits.append(f"rollout_batch_size to {asked * steps // per_prompt}")
    if not fits:
        size = _nearest_divisor(samples, asked)
        fits.append(f"global_batch_size to {size} and num_steps_per_rollout to {samples // size}")
    return ", or ".join(fits)


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda divisor: abs(divisor - wanted))


def _data_parallel(config: RunConfig) -> int:
    return data_parallel_ranks(config.learner, learner_ranks(config))


def _over_sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.over_sampling_batch_size is not None and rollout.over_sampling_batch_size < rollout.rollout_batch_size:
        yield (
            f"over_sampling_batch_size {rollout.over_sampling_batch_size} is below rollout_batch_size "
            f"{rollout.rollout_batch_size}; set it to {rollout.rollout_batch_size} or more, or leave it unset"
        )
    policy = config.learner.loss_type == "policy_loss"
    estimator = config.algorithm.advantage_estimator
    if rollout.n_samples_per_prompt == 1 and estimator not in ("reinforce_plus_plus", "ppo") and policy:
        yield (
            f"n_samples_per_prompt 1 teaches nothing: advantage_estimator {estimator} compares the samples of a group; "
            "set n_samples_per_prompt to 2 or more, or advantage_estimator to reinforce_plus_plus or ppo"
        )


def _supervised(config: RunConfig) -> Iterator[str]:
    lessons = config.rollout.rollout_function_path == SFT_FUNCTION
    if lessons and config.learner.loss_type != "sft_loss":
        yield f"{SFT_FUNCTION} brings lessons and no rewards: set loss_type to sft_loss"


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    named = [
        name
        for name, given in (
            ("prompt_data", data.prompt_data is not None),
            ("reasoning_gym_task", data.reasoning_gym_task is not None),
            ("disable_rollout_global_dataset", data.disable_rollout_global_dataset),
        )
        if given
    ]
    if not named and not trains_only(config):
        yield (
            "there is no data: set prompt_data to a JSONL or Parquet file, reasoning_gym_task to a task such as "
            "chain_sum, or disable_rollout_global_dataset"
        )
    if len(named) > 1:
        yield f"{' and '.join(named)} are {'both' if len(named) == 2 else 'all'} set: unset all but one of them"
    # `path@[a:b]` is a part of the file.
    path = (data.prompt_data or "").partition("@[")[0]
    if path and not Path(path).expanduser().is_file():
        yield f"prompt_data {path}: no such file"


def _tools(config: RunConfig) -> Iterator[str]:
    corpus = config.rollout.tool_search_corpus
    if corpus is not None and not Path(corpus).expanduser().is_file():
        yield f"tool_search_corpus {corpus}: no such file"


def _reward(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    kind = rollout.rm_type.removeprefix("boxed_") if rollout.rm_type is not None else None
    if kind is None and rollout.custom_rm_path is None and generates(config):
        yield "there is no reward: set rm_type to reasoning_gym or exact, or custom_rm_path to module.function"
    if kind not in (None, *BUILT_IN_REWARDS):
        known = ", ".join(BUILT_IN_REWARDS[:-1])
        yield (
            f"rm_type {rollout.rm_type!r} is unknown: set {known} or {BUILT_IN_REWARDS[-1]}, or your own by "
            "custom_rm_path"
        )
    if kind is not None and rollout.custom_rm_path is not None:
        yield "rm_type and custom_rm_path are both set: unset one of them"
    if kind == "reasoning_gym" and config.data.reasoning_gym_task is None:
        yield "rm_type reasoning_gym needs the problems of a reasoning_gym_task; for prompt_data set rm_type to exact"
    if kind == "remote_rm" and rollout.rm_url is None:
        yield "rm_type remote_rm asks a server for rewards: set rm_url to its address"
    if kind == "dapo" and rollout.reward_key is None:
        yield "rm_type dapo returns a dictionary: set reward_key to score (1 or -1) or acc (1 or 0)"
    if rollout.custom_rm_isolated and rollout.custom_rm_path is None:
        yield "custom_rm_isolated speaks of custom_rm_path, which is unset: set it, or unset custom_rm_isolated"


def _evaluation(config: RunConfig) -> Iterator[str]:
    arguments = {name.replace("-", "_"): value for name, value in config.engine.sglang_server_args.items()}
    policy = arguments.get("schedule_policy", "fcfs")
    if evaluation_places(config) and policy not in ("fcfs", "lof"):
        yield (
            f"eval_interval lets evaluations run below training, and SGLang's schedule_policy {policy} knows no "
            "priorities: set it to fcfs, or unset eval_interval"
        )


def _debug(config: RunConfig) -> Iterator[str]:
    debug = config.debug
    if debug.debug_train_only and debug.load_debug_rollout_data is None:
        yield "debug_train_only has nothing to train on: set load_debug_rollout_data to what a run saved"
    if debug.debug_rollout_only and trains_only(config):
        yield "debug_rollout_only and load_debug_rollout_data (or debug_train_only) leave nothing to run: unset one"


def _checkpoint(config: RunConfig) -> Iterator[str]:
    checkpoint = config.model.hf_checkpoint
    if checkpoint is None:
        yield from _tiny_model(config)
    elif not Path(checkpoint).expanduser().is_dir():
        yield f"hf_checkpoint {checkpoint}: no such folder; set it to a Hugging Face checkpoint on this machine"
    elif not (Path(checkpoint).expanduser() / "config.json").is_file():
        yield f"hf_checkpoint {checkpoint} holds no config.json: it is not a Hugging Face checkpoint"


def _reference(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.ref_load is None:
        return
    if not (Path(algorithm.ref_load).expanduser() / "config.json").is_file():
        yield f"ref_load {algorithm.ref_load} is no Hugging Face checkpoint: it holds no config.json"
    if not keeps_reference(config):
        yield "ref_load names a reference model that nothing uses: set use_kl_loss or kl_coef, or unset it"


def _critic(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.critic_load is not None and not (Path(algorithm.critic_load).expanduser() / "config.json").is_file():
        yield f"critic_load {algorithm.critic_load} is no Hugging Face checkpoint: it holds no config.json"
    if algorithm.advantage_estimator == "ppo":
        if config.learner.loss_type == "sft_loss":
            yield "advantage_estimator ppo trains a critic, which loss_type sft_loss has no use for: unset one"
        return
    named = algorithm.model_dump(exclude_defaults=True).keys() & _OF_THE_CRITIC
    if named:
        yield f"{', '.join(sorted(named))}: only advantage_estimator ppo has a critic; set it, or unset these"


_OF_THE_CRITIC = {"value_clip", "num_critic_only_steps", "critic_load", "critic_lr", "critic_lr_warmup_steps"}


def _exports(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if learner.save_hf is None:
        return
    if learner.save_interval is not None and "{rollout_id}" not in learner.save_hf:
        yield f"save_hf {learner.save_hf} would be written again and again: put {{rollout_id}} into its name"
    rollouts = (rollout for rollout in range(config.rollout.num_rollout) if checkpoint_due(config, rollout))
    due = {hf_export(learner.save_hf, rollout).resolve() for rollout in rollouts}
    for setting, path in (("hf_checkpoint", config.model.hf_checkpoint), ("ref_load", config.algorithm.ref_load)):
        if path is not None and Path(path).expanduser().resolve() in due:
            yield f"save_hf {learner.save_hf} would overwrite {setting}: name another folder"


def _tiny_model(config: RunConfig) -> Iterator[str]:
    model, response = config.model.tiny_model, config.rollout.rollout_max_response_len
    if model.hidden_size % model.num_attention_heads:
        yield f"hidden_size {model.hidden_size} is not divisible by num_attention_heads {model.num_attention_heads}"
    if model.num_attention_heads % model.num_query_groups:
        yield (
            f"num_attention_heads {model.num_attention_heads} is not divisible by num_query_groups "
            f"{model.num_query_groups}"
        )
    if response >= model.max_position_embeddings:
        yield (
            f"rollout_max_response_len {response} leaves no room for a prompt in the tiny model's "
            f"max_position_embeddings {model.max_position_embeddings}; set the one lower or the other higher"
        )


def _engines(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.rollout_num_gpus % engine.rollout_num_gpus_per_engine:
        yield (
            f"rollout_num_gpus {engine.rollout_num_gpus} is not divisible by rollout_num_gpus_per_engine "
            f"{engine.rollout_num_gpus_per_engine}; set it to a multiple"
        )


def _recomputation(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    given = learner.recompute_method is not None, learner.recompute_num_layers is not None
    if learner.recompute_granularity == "full" and not all(given):
        yield "recompute_granularity full needs recompute_method and recompute_num_layers: set uniform and 1"
    if learner.recompute_granularity != "full" and any(given):
        yield "recompute_method and recompute_num_layers speak of whole layers: set recompute_granularity to full"


def _servers(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    yield from misfits(engine.sglang_server_args)
    if (engine.sglang_router_ip is None) is not (engine.sglang_router_port is None):
        yield (
            "sglang_router_ip and sglang_router_port name a router of yours together: set both, or neither to have one "
            "started"
        )


def _colocated(config: RunConfig) -> Iterator[str]:
    devices, ranks = config.engine.rollout_num_gpus, learner_ranks(config)
    if config.cluster.colocate and devices > ranks:
        yield (
            f"colocate gives the engines the learner's {ranks} devices, but rollout_num_gpus is {devices}; set it to "
            f"{ranks} or less"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    longest = (rollout.rollout_max_prompt_len or 1) + rollout.rollout_max_response_len
    if longest > (room := micro_batch_tokens(learner)):
        ranks = learner.context_parallel_size
        shared = f" * context_parallel_size {ranks}" if ranks > 1 else ""
        yield (
            f"a sample may have {longest} tokens (rollout_max_prompt_len + rollout_max_response_len), more than the "
            f"{room} that max_tokens_per_gpu {learner.max_tokens_per_gpu}{shared} lets into a micro-batch; set "
            f"max_tokens_per_gpu to {least_tokens_per_gpu(learner, longest)} or more"
        )


def _dynamic_batching(config: RunConfig) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    longest = (rollout.rollout_max_prompt_len or 1) + rollout.rollout_max_response_len
    shards = learner.tensor_model_parallel_size * learner.context_parallel_size
    train = learner.max_tokens_per_microbatch_in_train or micro_batch_tokens(learner)
    rows = [("", "train", learner.use_dynamic_batching_in_train, train, learner.sequence_length_round_in_train)]
    roles = {"": learner}
    if keeps_reference(config) and reference_batching(learner) != learner:
        roles["ref_"] = reference_batching(learner)
    for role, own in roles.items():
        limit = own.max_tokens_per_microbatch_in_infer or micro_batch_tokens(own)
        rows.append((role, "infer", own.use_dynamic_batching_in_infer, limit, own.sequence_length_round_in_infer))
    for role, where, used, limit, round_to in rows:
        if not used:
            continue
        if round_to % shards:
            yield (
                f"{role}sequence_length_round_in_{where} {round_to} is not divisible by tensor_model_parallel_size * "
                f"context_parallel_size = {shards}; set it to a multiple"
            )
        if (padded := longest + -longest % round_to) > limit:
            yield (
                f"a sample may have {padded} tokens, rounded up to a multiple of {round_to}, more than the {limit} of "
                f"a micro-batch; set {role}max_tokens_per_microbatch_in_{where} to {padded} or more"
            )


def _loss(config: RunConfig) -> Iterator[str]:
    algorithm, longest = config.algorithm, config.rollout.rollout_max_response_len
    if algorithm.overlong_buffer_len is not None and algorithm.overlong_buffer_len > longest:
        yield (
            f"overlong_buffer_len {algorithm.overlong_buffer_len} is above rollout_max_response_len {longest}; "
            "set it lower"
        )
    low, high = algorithm.icepop_band
    if not 0 <= low < 1 < high:
        yield f"icepop_band [{low:g}, {high:g}] does not hold the ratio 1; set it to [0.5, 5], for example"


def _ranges(config: RunConfig) -> Iterator[str]:
    low, high = config.warm_start.warm_start_accuracy
    if not 0 <= low < high <= 1:
        yield f"warm_start_accuracy [{low:g}, {high:g}] is no range of accuracies; set it to [0.15, 0.35], for example"
    if "{prompt}" not in config.warm_start.warm_start_template:
        yield f"warm_start_template {config.warm_start.warm_start_template!r} has no place for the {{prompt}}"
    warn, abort = config.observability.no_progress_warn_seconds, config.observability.no_progress_abort_seconds
    if abort <= warn:
        yield (
            f"no_progress_abort_seconds {abort:g} stops the run before no_progress_warn_seconds {warn:g} warns; "
            "set it higher"
        )


def _flow(config: RunConfig, bounds: Bounds) -> Iterator[str]:
    """A queue and slots through which batches can flow at all."""
    rollout = config.rollout
    if rollout.queue_capacity < rollout.rollout_batch_size:
        yield (
            f"queue_capacity {rollout.queue_capacity} never holds a batch of rollout_batch_size "
            f"{rollout.rollout_batch_size} groups; set it to {rollout.rollout_batch_size} or more"
        )
    elif bounds.generation_batch > bounds.room:
        limit = (
            f"queue_capacity {rollout.queue_capacity} reserves room for"
            if bounds.room == rollout.queue_capacity
            else f"max_weight_staleness {rollout.max_weight_staleness} with a window of {bounds.window} allows"
        )
        yield (
            f"{bounds.generation_batch} groups can never be in flight: {limit} {bounds.room}; set "
            f"over_sampling_batch_size to {_largest_feed(config)} or less, or raise that limit"
        )


def _largest_feed(config: RunConfig) -> int:
    """The largest N that the room it leaves itself can hold; a smaller N has a smaller window and so more slots."""
    rollout = config.rollout
    for size in range(rollout.over_sampling_batch_size or 0, rollout.rollout_batch_size, -1):
        smaller = config.model_copy(update={"rollout": rollout.model_copy(update={"over_sampling_batch_size": size})})
        if size <= bounds_of(smaller, "train_async.py").room:
            return size
    return rollout.rollout_batch_size


_CHECKS: tuple[Check, ...] = (
    _batch_sizes,
    _over_sampling,
    _supervised,
    _data,
    _tools,
    _reward,
    _evaluation,
    _debug,
    _checkpoint,
    _reference,
    _critic,
    _exports,
    _recomputation,
    layout_problems,
    _engines,
    _servers,
    _colocated,
    _lengths,
    _dynamic_batching,
    _loss,
    _ranges,
)

_NOTES = (_idle_window, _idle_over_sampling_filter, _idle_skip, _policy_notes, _router_notes)
