"""Sizes, schedule, length, data, rewards, evaluation and checkpoints of a run of verl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from miles_async.compat.verl.rules import OVERLONG
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.prompt_files import count_rows, split_slice

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_FULLY_ASYNC = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
_FURTHER_TURNS = ("tool_config_path", "function_tool_path", "interaction_config_path")
_PROMPT_KEY, _LABEL_KEY = "prompt", "reward_model.ground_truth"


def async_keys(keys: CombinedKeys) -> Sequence[str]:
    """The keys of the section that makes a run fully asynchronous."""
    return [key for key in keys.values if key.startswith("async_training.")]


def is_async(keys: CombinedKeys) -> bool:
    """Whether verl's fully asynchronous trainer runs."""
    return bool(async_keys(keys))


def batches_per_publish(keys: CombinedKeys) -> int:
    """Batches between two publishes. verl's fully asynchronous trainer counts in them."""
    return (keys.whole_number("async_training.trigger_parameter_sync_step") or 4) if is_async(keys) else 1


def optimizer_steps(keys: CombinedKeys) -> int:
    """Optimizer steps per batch. verl does not change the learning rate between them."""
    prompts = keys.size("rollout.rollout_batch_size")
    return max(1, prompts // (keys.whole_number(f"{_ACTOR}.ppo_mini_batch_size") or prompts))


def batch_sizes(keys: CombinedKeys) -> None:
    """Prompts per batch and samples per optimizer step. verl's sizes count prompts."""
    mini_key, n_key, batch_key = f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n", "data.train_batch_size"
    mini = (keys.whole_number(mini_key) or 1) if mini_key in keys.values else None
    generated_key = "data.gen_batch_size"
    if is_async(keys):
        keys.note("has no effect with async_training: a batch has require_batches mini-batches", batch_key)
        keys.note("has no effect with async_training: prompts are fed one by one", generated_key)
        if mini is None:
            keys.refuse(f"async_training counts batches of {mini_key}: set it, too")
            return
        prompts = mini * (keys.whole_number("async_training.require_batches") or 1)
        keys.set("rollout.rollout_batch_size", prompts, mini_key, "async_training.require_batches")
    elif batch_key in keys.values:
        prompts = keys.whole_number(batch_key) or 1
        keys.set("rollout.rollout_batch_size", prompts, batch_key)
    if generated_key in keys.values and not is_async(keys):
        keys.set("rollout.over_sampling_batch_size", keys.whole_number(generated_key) or 1, generated_key)
    if mini is not None and n_key in keys.values:
        keys.set("learner.global_batch_size", mini * (keys.whole_number(n_key) or 1), mini_key, n_key)
    elif mini is not None:
        keys.refuse(f"{mini_key} counts prompts: set {n_key}, the samples per prompt, too")


def lengths(keys: CombinedKeys) -> None:
    """How long the run is."""
    steps_key, epochs_key = "trainer.total_training_steps", "trainer.total_epochs"
    prompts_key = "rollout.total_rollout_steps"
    if prompts_key in keys.values:
        batches = (keys.whole_number(prompts_key) or 1) // keys.size("rollout.rollout_batch_size")
        sizes = f"{_ACTOR}.ppo_mini_batch_size", "async_training.require_batches"
        keys.set("rollout.num_rollout", max(1, batches), prompts_key, *sizes)
        keys.note(f"has no effect beside {prompts_key}, even if it is reached earlier", epochs_key, steps_key)
    elif steps_key in keys.values:
        steps, files = (keys.whole_number(steps_key) or 1), _train_files(keys)
        counts_rows = epochs_key in keys.values and files and all(map(_is_file, files))
        whole = _batches_of_all_epochs(keys) if counts_rows else None
        if whole is not None and whole < steps:
            keys.set("rollout.num_rollout", whole, epochs_key, "data.train_files", "data.train_batch_size")
            keys.note(f"has no effect: {epochs_key} ends the run earlier", steps_key)
        else:
            keys.set("rollout.num_rollout", steps, steps_key)
            keys.note(f"has no effect beside {steps_key}", epochs_key)
    elif epochs_key in keys.values:
        _epochs(keys, epochs_key, "data.train_files")


def _epochs(keys: CombinedKeys, key: str, files_key: str) -> None:
    """Passes over the data. Those over several files are a number of batches."""
    batches = _batches_of_all_epochs(keys)
    if len(_train_files(keys)) > 1 and batches is not None:
        keys.set("rollout.num_rollout", batches, key, files_key, "data.train_batch_size")
    else:
        keys.set("rollout.num_epoch", keys.whole_number(key) or 1, key)


def _batches_of_all_epochs(keys: CombinedKeys) -> int | None:
    """The number of batches in all epochs; None if the size of a batch is not known."""
    prompts = keys.translator.translation.get("rollout.rollout_batch_size")
    if prompts is None:
        return None
    # verl leaves out the rows of a pass that do not fill a batch.
    batches: int = sum(map(_rows, _train_files(keys))) // prompts.value
    return max(1, batches * (keys.whole_number("trainer.total_epochs") or 1))


def _train_files(keys: CombinedKeys) -> Sequence[Any]:
    """The files of the data; none if the key has another value, which is reported elsewhere."""
    files = keys.values.get("data.train_files")
    return files if isinstance(files, list) else [files] if isinstance(files, str) else []


def schedule(keys: CombinedKeys) -> None:
    """The fully asynchronous schedule, which a section of verl's configuration selects."""
    if not is_async(keys):
        return
    keys.set("rollout.rollout_function_path", _FULLY_ASYNC, *async_keys(keys))
    trigger, staleness = "async_training.trigger_parameter_sync_step", "async_training.staleness_threshold"
    keys.set("weights.update_weights_interval", batches_per_publish(keys), trigger)
    prompts = keys.translator.translation.get("rollout.rollout_batch_size")
    share = keys.values.get(staleness, 0.1)
    if not isinstance(share, int | float) or isinstance(share, bool) or share < 0:
        keys.refuse(f"{staleness} {share!r} is not a number of 0 or more: write a share, such as 0.5")
    elif prompts is not None:
        capacity = int(prompts.value * (1 + share) * batches_per_publish(keys))
        mini_keys = keys.given(f"{_ACTOR}.ppo_mini_batch_size", "async_training.require_batches")
        keys.set("rollout.queue_capacity", capacity, staleness, trigger, *mini_keys)


def turns(keys: CombinedKeys) -> None:
    """verl takes a second turn only for tools or an interaction, and for rows whose `agent_name` asks for one."""
    key = f"{_ROLLOUT}.multi_turn.enable"
    configured = keys.given(*(f"{_ROLLOUT}.multi_turn.{name}" for name in _FURTHER_TURNS))
    if keys.switch(key) and configured:
        keys.refuse(
            f"{key} is true, and {configured[0]} makes responses of several turns: set "
            "custom_generate_function_path to a function that runs the agent"
        )
    elif key in keys.values:
        keys.note(
            "has no effect: without tools and an interaction, each response is one turn of the model, also for "
            "rows whose agent_name asks for tools",
            key,
        )


def data_and_rewards(keys: CombinedKeys) -> None:
    """Data of verl: the answer, and the name of the data set, which chooses the reward of a row."""
    files_key, manager_keys = "data.train_files", ("reward.reward_manager.name", "reward_model.reward_manager")
    match keys.values.get(files_key):
        case None:
            keys.note(f"has no effect without {files_key}: rm_type chooses the reward", *manager_keys)
            return
        case str(file) | [str(file)]:
            keys.set("data.prompt_data", file, files_key)
        case [*files] if all(isinstance(file, str) for file in files):
            # verl shuffles the rows of all files together.
            datasets = {name: {"prompt_data": file, "weight": _rows(file)} for name, file in _named(files).items()}
            keys.set("data.datasets", datasets, files_key)
        case other:
            keys.refuse(f"{files_key} {other!r} is not a list of files: write [one.parquet, other.parquet]")
    if "data.prompt_key" not in keys.values:
        keys.set("data.input_key", _PROMPT_KEY, files_key)
    keys.set("data.label_key", _LABEL_KEY, files_key)
    keys.set("data.metadata_key", "extra_info", files_key)
    if "reward.custom_reward_function.path" not in keys.values:
        keys.set("rollout.rm_type", "data_source", *manager_keys, files_key)
    _overlong(keys)


def _overlong(keys: CombinedKeys) -> None:
    """The penalty on long responses."""
    for section in OVERLONG:
        enable, length, factor = (f"{section}.{name}" for name in ("enable", "len", "penalty_factor"))
        if keys.values.get(enable) is not True:
            keys.note(f"has no effect without {enable}", enable, length, factor)
            continue
        keys.set("algorithm.overlong_buffer_len", keys.whole_number(length) or 4096, enable, length)
        keys.set("algorithm.overlong_penalty", keys.values.get(factor, 1.0), enable, factor)
    longest = keys.values.get("data.max_response_length")
    for key in keys.given("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len"):
        if longest is not None and keys.values[key] != longest:
            keys.refuse(
                f"{key} {keys.values[key]!r} differs from data.max_response_length {longest!r}, from which the "
                "penalty is counted: set both to the same value"
            )
        else:
            keys.note("has no effect: the penalty is counted from data.max_response_length", key)


def evaluation(keys: CombinedKeys) -> None:
    """The data sets of an evaluation, and how its responses are sampled: greedily, unless that is set."""
    files_key, frequency_key, before_key = "data.val_files", "trainer.test_freq", "trainer.val_before_train"
    sampling = {name: f"{_ROLLOUT}.val_kwargs.{name}" for name in ("n", "temperature", "top_p", "top_k")}
    all_keys = tuple(sampling.values())
    frequency = keys.values.get(frequency_key, -1)
    if isinstance(frequency, int) and frequency > 0:
        keys.set("rollout.eval_interval", frequency * batches_per_publish(keys), frequency_key)
    else:
        keys.note("has no effect: no evaluation comes between the first and the last", frequency_key)
    keys.note("has no effect: a run that evaluates does so before the first batch, too", before_key)
    if files_key not in keys.values:
        keys.note(f"has no effect without {files_key}", *all_keys)
        return
    if frequency == -1 and keys.values.get(before_key, True) is False:
        keys.note(f"has no effect, because {frequency_key} and {before_key} turn evaluations off", files_key)
        keys.note("has no effect without evaluations", *all_keys)
        return
    files = keys.values[files_key]
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        keys.refuse(f"{files_key} {files!r} is not a list of files: write [one.parquet, other.parquet]")
        return
    fields = {
        "label_key": _LABEL_KEY,
        "input_key": keys.values.get("data.prompt_key", _PROMPT_KEY),
        "n_samples": keys.values.get(sampling["n"], 1),
        "temperature": keys.values.get(sampling["temperature"], 0.0),
        "top_p": keys.values.get(sampling["top_p"], 1.0),
        "top_k": keys.values.get(sampling["top_k"], -1),
    }
    datasets = {name: {"path": path, **fields} for name, path in _named(files).items()}
    keys.set("rollout.eval_datasets", datasets, files_key, *all_keys)


def checkpoints(keys: CombinedKeys) -> None:
    folder_key, frequency_key, mode_key = "trainer.default_local_dir", "trainer.save_freq", "trainer.resume_mode"
    kept_key, path_key = "trainer.max_actor_ckpt_to_keep", "trainer.resume_from_path"
    frequency, mode = keys.values.get(frequency_key), keys.values.get(mode_key, "auto")
    saves = isinstance(frequency, int) and frequency > 0
    if mode not in ("auto", "disable", "resume_path"):
        keys.refuse(f"{mode_key} {mode!r} has no counterpart: set it to auto, disable or resume_path")
    if mode == "resume_path" and path_key in keys.values:
        keys.set("learner.load", keys.values[path_key], mode_key, path_key)
    else:
        keys.note(f"has no effect: {mode_key} is {mode}", path_key)
    if frequency_key in keys.values and not saves:
        keys.note("has no effect: nothing is saved", frequency_key, folder_key, kept_key, mode_key)
        return
    folder = keys.values.get(folder_key)
    if saves and not folder:
        project, name = (keys.values.get(f"trainer.{one}_name", "default") for one in ("project", "experiment"))
        folder = f"checkpoints/{project}/{name}"
    if folder:
        keys.set("learner.save", folder, *keys.given(folder_key, frequency_key)[:1])
    if saves and frequency is not None:
        keys.set("learner.save_interval", frequency * batches_per_publish(keys), frequency_key)
    if kept_key in keys.values:
        keys.set("learner.save_keep", keys.whole_number(kept_key) or 1, kept_key)
    if mode == "auto" and saves:
        # A colocated run is continued from its checkpoints alone.
        colocated = keys.translator.translation.get("cluster.colocate")
        setting, value = ("load", folder) if colocated is not None and colocated.value else ("resume", "auto")
        keys.set(f"learner.{setting}", value, mode_key, frequency_key)
    elif mode != "resume_path":
        keys.note("has no effect: the run starts from hf_checkpoint", mode_key)


def tracking(keys: CombinedKeys) -> None:
    key = "trainer.logger"
    names = keys.values.get(key, [])
    for name in [names] if isinstance(names, str) else names:
        if name in ("wandb", "tensorboard"):
            keys.set(f"observability.use_{name}", True, key)
        elif name != "console":
            keys.refuse(f"{key} {name!r} has no counterpart: use console, wandb or tensorboard")
    if names in ("console", ["console"]):
        keys.note("has no effect: every run writes to the console", key)


def _rows(file: Any) -> int:
    """The number of rows of a file; 1 if there is no such file, which is reported elsewhere."""
    return max(1, count_rows(str(file))) if _is_file(file) else 1


def _is_file(file: Any) -> bool:
    path, _ = split_slice(str(file))
    return Path(path).expanduser().is_file()


def _named(files: Iterable[str]) -> Mapping[str, str]:
    """Data sets by a name that tells them apart: that of the file, or also that of its folder."""
    files = list(files)
    paths = [PurePath(file) for file in files]
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems):
        stems = [f"{path.parent.name}_{path.stem}" for path in paths]
    return dict(zip(stems, files, strict=True))
