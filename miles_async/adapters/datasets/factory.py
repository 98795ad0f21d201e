"""Builds the data source and the evaluation data sets that the configuration selects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from miles_async.adapters.datasets.buffer import Buffer, Report, pop_first
from miles_async.adapters.datasets.feed import Feed, FeedSettings, Render
from miles_async.adapters.datasets.function_source import FunctionSource
from miles_async.adapters.datasets.gym import WARM_START_SEED, GymProblems, hold_out
from miles_async.adapters.datasets.problems import BlankProblems, FileProblems, Problem, Problems
from miles_async.adapters.datasets.rows import open_rows
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.checksum import checksum, sampled_chunks
from miles_async.config.fields import with_settings
from miles_async.config.generation import generates, generates_by_user, rollout_mode, trains_only
from miles_async.config.prompt_files import slice_text, split_slice, with_dataset
from miles_async.config.schema import Data, EvalDataset, RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import DataRowError, TemplateError, UserError
from miles_async.rewards.plugin import complaints, row_reward, usable_reward
from miles_async.types import Group, Prompt, as_messages


def _ignore(*said: str) -> None:
    """Discard reports and warnings: before the run starts, there are no events to report to."""


def open_data(
    config: RunConfig,
    *,
    tokenizer: CheckpointTokenizer | None = None,
    args: Any = None,
    report: Report = _ignore,
    warn: Callable[[str], None] = _ignore,
    rows_choose_reward: bool = True,
    first: int | None = None,
    create: Callable[[], Any] | None = None,
) -> BufferedSource:
    """Open the training data.

    Args:
        config: the configuration of the run.
        tokenizer: renders prompts; required only with `apply_chat_template`.
        args: the flat configuration that functions of users receive.
        report: is called for each row or group that is skipped.
        warn: is called with a sentence when a data set is exhausted or teaches nothing.
        rows_choose_reward: whether a row may name a built-in reward in its metadata, which is then checked.
        first: read only so many rows of a file, for a check. Such a source has no position that could be saved.
        create: returns the user's data source, from which the prompts for training then come.

    Raises UserError if a file cannot be read, one of the first rows is invalid, the task is unknown, or settings do not
    fit together.
    """
    data = config.data
    configs = {name: with_dataset(config, dataset) for name, dataset in data.datasets.items()} or {"": config}

    def feed(name: str, config: RunConfig) -> Feed:
        """Open the data set of a run that has only this one."""
        problems, warm_start, held_out = _problems(config, rows_choose_reward, first)
        low, high = config.data.difficulty_band
        settings = FeedSettings(
            shuffle=config.data.rollout_shuffle and not isinstance(problems, BlankProblems),
            seed=config.data.rollout_seed,
            content=_content(config) if first is None else "",
            part=slice_text(config.data.prompt_data or ""),
            weight=data.datasets[name].weight if name else 1.0,
            adapter=data.datasets[name].adapter or "" if name else "",
            band=(low, high) if config.data.dataset_sampling == "difficulty" else None,
        )
        return Feed(
            name,
            problems,
            held_out=held_out,
            warm_start=warm_start,
            settings=settings,
            render=_renderer(config, tokenizer, chats=isinstance(problems, FileProblems) and problems.has_chats),
            report=report,
            warn=warn,
        )

    feeds = []
    for name, of_set in configs.items():
        try:
            feeds.append(feed(name, of_set))
        except UserError as error:
            raise UserError(f"datasets.{name}: {error}" if name else str(error)) from error
    path = data.buffer_filter_path
    function = data.sampling_function
    size = config.rollout.n_samples_per_prompt
    buffer = Buffer(pop_first if path is None else load_function(path, setting="buffer_filter_path"), args, report)
    if create is not None:
        return FunctionSource(create, feeds, n_samples_per_prompt=size, buffer=buffer)
    return BufferedSource(
        feeds,
        n_samples_per_prompt=size,
        buffer=buffer,
        choose=None if function is None else load_function(function, setting="dataset_sampling"),
        args=args,
    )


def eval_groups(
    config: RunConfig,
    name: str,
    dataset: EvalDataset,
    *,
    tokenizer: CheckpointTokenizer | None = None,
    warn: Callable[[str], None] = _ignore,
    first: int | None = None,
) -> list[Group]:
    """Return the first `size` valid rows of a data set, in file order, with `n_samples` samples each.

    Feed indices start with `name`. `tokenizer` renders prompts. `warn` is called once if rows are invalid. `first`
    reads only so many rows. Raises UserError as `open_data` does.
    """
    # The beginning of the file may be read twice, so each row is counted by its sentence.
    invalid: dict[str, None] = {}
    config = with_settings(
        with_dataset(config, dataset),
        prompt_data=dataset.path,
        reasoning_gym_task=None,
        dataset_sampling="weights",
        rollout_shuffle=False,
        eval_size=0,
        n_samples_per_prompt=dataset.n_samples,
    )
    try:
        source = open_data(
            config,
            tokenizer=tokenizer,
            report=lambda reason, sentence: invalid.setdefault(sentence),
            rows_choose_reward=dataset.rm_type is None,
            first=first,
        )
    except UserError as error:
        raise UserError(f"eval_datasets.{name}: {error}") from error
    groups = list(islice(first_epoch(source), dataset.size))
    for group in groups:
        group.feed_index = f"{name}_{group.feed_index}"
        chosen = {} if dataset.rm_type is None else {"rm_type": dataset.rm_type}
        for sample in group:
            sample.metadata |= {**chosen, **dataset.metadata_overrides}
    if invalid:
        warn(
            f"{name}: {len(invalid)} rows are invalid and are left out, so {len(groups)} problems are evaluated; the "
            f"first invalid row: {next(iter(invalid))}"
        )
    return groups


def first_epoch(source: BufferedSource) -> Iterator[Group]:
    """Yield a group for each row of a new source that can be used."""
    # The source feeds forever: the first group of the second epoch marks the end of the data.
    fed = (source.get_samples(1)[0] for _ in itertools.count())
    return takewhile(lambda group: group.feed_index.startswith("sample_0_"), fed)


def _problems(
    config: RunConfig, rows_choose_reward: bool, first: int | None
) -> tuple[Problems, Problems, list[Problem]]:
    """Return the problems for training, those for the warm start, and the held-out problems."""
    data = config.data
    if data.prompt_data is None:
        # A run that trains saved batches, or whose rollout function provides its own data, needs no problems.
        blank = data.reasoning_gym_task is None and (data.disable_rollout_global_dataset or trains_only(config))
        return (BlankProblems(), BlankProblems(), []) if blank else _gym(data)
    rows = open_rows(data.prompt_data, cache_dir=config.warm_start.cache_dir, first=first)
    complaint = _reward_complaint(config, rows_choose_reward)
    problems = FileProblems(rows, data, complaint=complaint, indices=generates_by_user(config))
    # The first rows of a file alone may be too few to hold problems out.
    holds_out = data.eval_size and (first is None or len(rows) < first)
    return problems, problems, problems.hold_out(data.eval_size) if holds_out else []


def _reward_complaint(config: RunConfig, rows_choose: bool) -> Callable[[Mapping[str, Any], Any], str | None]:
    """Return a function that says why the metadata and label of a row do not fit its reward; None if they do.

    Rows choose their reward only in a run with built-in rewards, as in slime.
    """
    built_in = config.rollout.custom_rm_path is None and config.data.environment is None and generates(config)

    # Otherwise a user's function or an external generator may set the rewards.
    scores = not generates_by_user(config) and rollout_mode(config).scores

    def complaint(metadata: Mapping[str, Any], label: Any) -> str | None:
        if not built_in:
            return None
        try:
            name = row_reward(metadata, config.rollout.rm_type) if rows_choose else None
        except UserError as error:
            return str(error)
        if name is not None and (unusable := next(complaints(name, config, of_row=True), None)) is not None:
            return f"{config.data.metadata_key!r}: {unusable}"
        name = name or config.rollout.rm_type
        reward = usable_reward(name)
        if not scores or reward is None or not reward.compares or label is not None:
            return None
        needs = f"but rm_type {name} needs the right answer"
        if config.data.label_key is None:
            return f"label_key is unset, {needs}: set it to the key of the answer"
        return f"{config.data.label_key!r} is null, {needs}"

    return complaint


def _content(config: RunConfig) -> str:
    """A checksum of the data: of the file (of samples, if it is large), or of the settings of the task."""
    data = config.data
    if data.prompt_data is None:
        return checksum([repr((data.reasoning_gym_task, data.reasoning_gym_settings, data.prompt_template)).encode()])
    path, _ = split_slice(data.prompt_data)
    return checksum(sampled_chunks(Path(path).expanduser()))


def _gym(data: Data) -> tuple[Problems, Problems, list[Problem]]:
    if data.reasoning_gym_task is None:
        raise UserError(
            "no data: set prompt_data to a JSONL or Parquet file, reasoning_gym_task to a task such as chain_sum, or "
            "disable_rollout_global_dataset if the rollout function provides its own data"
        )
    problems = GymProblems(data, seed=data.rollout_seed, size=data.reasoning_gym_size)
    warm_start = GymProblems(data, seed=WARM_START_SEED, size=data.reasoning_gym_size)
    return problems, warm_start, hold_out(data) if data.eval_size else []


def _renderer(config: RunConfig, tokenizer: CheckpointTokenizer | None, *, chats: bool) -> Render:
    """Return the function that makes the prompt of samples from a problem.

    With `chats`, prompts may be lists of messages. Raises UserError if prompts have to be rendered but the tokenizer
    has no chat template.
    """
    applies, renders_chats = config.data.apply_chat_template, rollout_mode(config).renders_chats
    if applies and tokenizer is None:
        raise UserError("apply_chat_template needs a tokenizer: set hf_checkpoint")
    # Users' own functions may render messages in another way.
    renders = applies or (chats and not generates_by_user(config))
    if tokenizer is not None and renders and not tokenizer.has_template:
        cause = "apply_chat_template is set" if applies else "the prompts of the data are lists of messages"
        raise UserError(
            f"{cause}, but the tokenizer of hf_checkpoint {tokenizer.folder} has no chat template: set its "
            "chat_template"
        )
    if tokenizer is None or not applies:
        return lambda problem: problem.prompt

    def render(problem: Problem) -> Prompt:
        if not renders_chats and not isinstance(problem.prompt, str):
            # A supervised example is a whole conversation, which the rollout function renders with its loss mask.
            return problem.prompt
        try:
            template = config.data.apply_chat_template_kwargs
            return tokenizer.render(as_messages(problem.prompt), problem.tools, template_kwargs=template)
        except TemplateError as error:
            raise DataRowError(f"the prompt {problem.question[:200]!r} cannot be used: {error}") from error

    return render


def save_tokenizer(checkpoint: str, folder: str) -> None:
    """Copy the tokenizer of a checkpoint to `folder`/tokenizer, so that dumped tokens can be decoded anywhere."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(checkpoint, local_files_only=True).save_pretrained(
        Path(folder).expanduser() / "tokenizer"
    )
