"""Checks of generation: data, rewards, tools, sampling, evaluation, supervised examples and saved batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_async.config.fields import nearest
from miles_async.config.generation import generates, generates_by_user, rollout_mode, trains_only
from miles_async.config.model_shape import shape_of
from miles_async.config.prompt_files import environment_split
from miles_async.config.schema import Dataset, Rollout, RunConfig
from miles_async.config.schema.data import CHAT_PARAMETERS
from miles_async.config.schema.model import hub_name
from miles_async.config.server_args import known_parsers
from miles_async.environments import ENVIRONMENTS
from miles_async.modes.mode import MODES
from miles_async.rewards.plugin import complaints, usable_reward


def _mode(config: RunConfig) -> Iterator[str]:
    """Raises UserError if the mode of an installed package cannot be used."""
    mode, path = rollout_mode(config), config.rollout.rollout_function_path
    if mode.loss_type not in ("", config.learner.loss_type):
        yield f"{path} {mode.summary} without rewards: set loss_type to {mode.loss_type}"
    if "." not in path and MODES.has(path):
        # The configuration has the path of the function of any mode that can be used.
        MODES.find(path)


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    sources = [
        name
        for name, is_set in (
            ("prompt_data", data.prompt_data is not None),
            ("datasets", bool(data.datasets)),
            ("reasoning_gym_task", data.reasoning_gym_task is not None),
            ("environment", data.environment is not None and data.prompt_data is None and not data.datasets),
            ("disable_rollout_global_dataset", data.disable_rollout_global_dataset),
        )
        if is_set
    ]
    if not sources and not trains_only(config):
        yield (
            "no data is configured: set prompt_data to a JSONL or Parquet file, datasets, reasoning_gym_task to a task "
            "such as chain_sum, environment, or disable_rollout_global_dataset"
        )
    if len(sources) > 1:
        yield f"{' and '.join(sources)} are {'both' if len(sources) == 2 else 'all'} set: unset all but one of them"
    if taken := CHAT_PARAMETERS & data.apply_chat_template_kwargs.keys():
        yield f"apply_chat_template_kwargs has {' and '.join(sorted(taken))}, which the run sets itself: remove it"
    yield from _missing_file("prompt_data", data.prompt_data or "")
    low, high = data.difficulty_band
    if low >= high:
        yield f"difficulty_band {low:g} {high:g} is empty: set the lowest mean reward first, such as 0.2 0.8"


def _missing_file(setting: str, prompt_data: str) -> Iterator[str]:
    # `path@[a:b]` selects rows of the file.
    path = prompt_data.partition("@[")[0]
    if (
        path
        and environment_split(prompt_data) is None
        and hub_name(path) is None
        and not Path(path).expanduser().is_file()
    ):
        yield f"{setting} {path}: no such file"


def _datasets(config: RunConfig) -> Iterator[str]:
    data, rollout = config.data, config.rollout
    if data.sampling_function is not None and not data.datasets:
        yield f"dataset_sampling {data.dataset_sampling} chooses among datasets: set datasets, or unset it"
    for name, dataset in data.datasets.items():
        setting = f"datasets.{name}"
        yield from _missing_file(f"{setting}.prompt_data", dataset.prompt_data)
        # The memory of engines and learner is planned for the limits of the run.
        for limit, value, longest in (
            ("max_prompt_len", dataset.max_prompt_len, rollout.rollout_max_prompt_len),
            ("max_response_len", dataset.max_response_len, rollout.rollout_max_response_len),
        ):
            if value is not None and longest is not None and value > longest:
                above = f"{setting}.{limit} {value} is above rollout_{limit} {longest}"
                yield f"{above}: lower the first or raise the second"
        template = dataset.apply_chat_template_kwargs or {}
        if template and not data.apply_chat_template:
            yield f"{setting}.apply_chat_template_kwargs has no effect: set apply_chat_template, or unset it"
        if taken := CHAT_PARAMETERS & template.keys():
            taken_names = " and ".join(sorted(taken))
            yield f"{setting}.apply_chat_template_kwargs has {taken_names}, which the run sets itself: remove it"
        if name in rollout.eval_datasets and (data.eval_size if dataset.eval_size is None else dataset.eval_size):
            yield (
                f"{setting} and eval_datasets.{name} would be evaluated under one name: rename one, or set "
                f"{setting}.eval_size to 0"
            )


def _environment(config: RunConfig) -> Iterator[str]:
    name, rollout = config.data.environment, config.rollout
    sources = {"prompt_data": config.data.prompt_data or ""}
    sources |= {f"datasets.{each}.prompt_data": dataset.prompt_data for each, dataset in config.data.datasets.items()}
    sources |= {f"eval_datasets.{each}.path": dataset.path for each, dataset in rollout.eval_datasets.items()}
    splits = [f"{setting} {source}" for setting, source in sources.items() if environment_split(source) is not None]
    if name is None:
        yield from (f"{split}: the run has no environment: set environment" for split in splits)
        return
    library, _, rest = name.partition(":")
    if not ENVIRONMENTS.has(library) or not rest:
        yield f"environment {name!r} is unknown: write {':NAME or '.join(ENVIRONMENTS.names)}:NAME"
    # Raises UserError if the library of an installed package cannot be used.
    elif not ENVIRONMENTS.find(library).splits:
        yield from (f"{split}: {library} has one set of tasks: unset it, or name a file" for split in splits)
    if rollout.custom_generate_function_path is None:
        yield (
            "environment has no effect without a generate function that uses it: set custom_generate_function_path to "
            "miles_async.rollout.environment.generate"
        )
    if config.data.apply_chat_template:
        yield "environment sends chat messages, which the endpoint for agents renders: unset apply_chat_template"


def _tools(config: RunConfig) -> Iterator[str]:
    corpus = config.rollout.tool_search_corpus
    if corpus is not None and not Path(corpus).expanduser().is_file():
        yield f"tool_search_corpus {corpus}: no such file"


def _parsers(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    for setting, name in (
        ("tool_call_parser", rollout.tool_call_parser),
        ("reasoning_parser", rollout.reasoning_parser),
    ):
        known = frozenset() if name in ("auto", "none") else known_parsers(setting)
        if known and name not in known:
            similar = nearest(name, known)
            yield f"{setting} {name!r} is unknown: set it to auto, none or one of {', '.join(sorted(known))}{similar}"


def _reward(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    environment = config.data.environment is not None
    sets = config.data.datasets
    settings: list[Rollout | Dataset] = [rollout, *sets.values()]
    if environment and any(each.rm_type is not None or each.custom_rm_path is not None for each in settings):
        yield "environment computes the rewards: unset rm_type and custom_rm_path"
    by_user = generates_by_user(config)  # the function may set the reward of its samples
    has_none = rollout.rm_type is None and rollout.custom_rm_path is None
    has_none &= not sets or any(each.rm_type is None and each.custom_rm_path is None for each in sets.values())
    if has_none and not environment and not by_user and generates(config):
        yield "no reward is configured: set rm_type, for example to exact, or custom_rm_path to module.function"
    reward = usable_reward(rollout.rm_type)
    if reward is not None and reward.keys and rollout.reward_key not in reward.keys:
        keys = " or ".join(reward.keys)
        yield f"rm_type {rollout.rm_type} has no reward_key {rollout.reward_key!r}: set it to {keys}"
    choices: dict[str, Rollout | Dataset] = {"": rollout}
    choices |= {f"datasets.{name}: ": dataset for name, dataset in sets.items()}
    choices |= {f"eval_datasets.{name}: ": dataset for name, dataset in rollout.eval_datasets.items()}
    for prefix, chosen in choices.items():
        for complaint in () if chosen.rm_type is None else complaints(chosen.rm_type, config):
            yield f"{prefix}{complaint}"
    if rollout.custom_rm_isolated and rollout.custom_rm_path is None:
        yield "custom_rm_isolated has no effect without custom_rm_path: set custom_rm_path, or unset custom_rm_isolated"


def _evaluation(config: RunConfig) -> Iterator[str]:
    for name, dataset in config.rollout.eval_datasets.items():
        if dataset.top_k is not None and (dataset.top_k == 0 or dataset.top_k < -1):
            yield f"eval_datasets.{name}.top_k {dataset.top_k} is not a number of tokens: set it to 1 or more, or to -1"
        if "rm_type" in dataset.metadata_overrides:
            yield f"eval_datasets.{name}.metadata_overrides has rm_type: set eval_datasets.{name}.rm_type"
    arguments = config.engine.sglang_server_args
    policy = arguments.get("schedule_policy", "fcfs")
    if config.evaluation_concurrency and policy not in ("fcfs", "lof"):
        yield (
            f"eval_interval needs request priorities, which SGLang's schedule_policy {policy} does not support: set "
            "schedule_policy to fcfs, or unset eval_interval"
        )


def _debug(config: RunConfig) -> Iterator[str]:
    debug = config.debug
    if debug.debug_train_only and debug.load_debug_rollout_data is None:
        yield "debug_train_only has no batches to train on: set load_debug_rollout_data to the batches that a run saved"
    if debug.debug_rollout_only and trains_only(config):
        yield "debug_rollout_only excludes load_debug_rollout_data and debug_train_only: unset one of them"


def _stop(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if "" in rollout.rollout_stop:
        yield "rollout_stop has an empty text, with which every response ends after one token: remove it"
    shape = shape_of(config.model)
    size = 0 if shape is None else shape.vocabulary
    for token in rollout.rollout_stop_token_ids:
        if token < 0 or 0 < size <= token:
            valid = f"0 to {size - 1}" if size else "0 on"
            yield f"rollout_stop_token_ids has {token}, not a token of the model: set ids from {valid}"


def _greedy(config: RunConfig) -> Iterator[str]:
    """A user's function may choose another temperature, and a run without a learner needs no signal."""
    rollout = config.rollout
    trains = config.learner.loss_type != "sft_loss" and not config.debug.debug_rollout_only
    if generates_by_user(config) or trains_only(config) or not trains:
        return
    if rollout.rollout_temperature == 0 and rollout.n_samples_per_prompt > 1:
        yield (
            f"rollout_temperature 0 makes the {rollout.n_samples_per_prompt} samples of a prompt equal, so there is "
            "nothing to learn from: set it to 1, for example (evaluation has its own eval_temperature)"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    top_k = config.rollout.rollout_top_k
    if top_k == 0 or top_k < -1:
        yield f"rollout_top_k {top_k} is not a number of tokens: set it to 2 or more, or to -1 for no limit"
        return
    if not config.trains_on_sampling_masks:
        return
    asked = config.engine.sglang_server_args.get("sampling_mask_max_tokens")
    if asked is not None and not isinstance(asked, int):
        yield f"--sglang-sampling-mask-max-tokens {asked!r:.80} is not a number of tokens: set it to a whole number"
        return
    limit = config.engine.sampling_mask_limit
    if top_k == 1:
        yield (
            "rollout_top_k 1 leaves one token to sample from, whose log-probability is always 0, so nothing is "
            "learned: set rollout_top_k to 2 or more, or to -1 for no limit"
        )
    if top_k > limit or limit < 2:
        yield (
            f"rollout_top_k {config.sampling_top_k} is more than the {limit} tokens that an engine can return in a "
            f"sampling mask: set rollout_top_k to {limit} or less, or raise --sglang-sampling-mask-max-tokens"
        )
    if "speculative_algorithm" in config.engine.sglang_server_args:
        yield (
            "rollout_top_p and rollout_top_k need sampling masks, which SGLang does not return with speculative "
            "decoding: unset --sglang-speculative-algorithm, or unset rollout_top_p and rollout_top_k"
        )


CHECKS = (
    _mode,
    _data,
    _datasets,
    _environment,
    _tools,
    _parsers,
    _reward,
    _evaluation,
    _debug,
    _stop,
    _greedy,
    _sampling,
)
