"""What `--check-config` reads of the files of a run, by the code that reads them at the start of a run.

What takes longer with a larger file is left to the start (`workers/preflight.py`): checksums, held-out problems, copies
of Parquet files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from miles_async.adapters.datasets.factory import eval_groups, first_epoch, open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.sglang.light_tokenizer import LightTokenizer
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.checkpoints import read_progress
from miles_async.batching.layout import longest_sequence
from miles_async.columns.tokens import too_long
from miles_async.config.fields import with_settings
from miles_async.config.generation import generates, generates_by_user, trains_only
from miles_async.config.model_shape import context_limit, hf_config
from miles_async.config.model_source import has_plugin
from miles_async.config.prompt_files import environment_split, split_slice, with_dataset
from miles_async.config.schema import EvalDataset, RunConfig
from miles_async.config.schema.model import hub_name
from miles_async.config.table import TableRow, parallel_layout
from miles_async.errors import TemplateError, TrajectoryError, UserError, collected, raise_collected
from miles_async.models.lora import tensor_shapes
from miles_async.models.mtp_heads import is_of_heads, layers_of_heads
from miles_async.models.text_part import text_name
from miles_async.modes.shipped import Supervised
from miles_async.rewards.factory import RunRewards
from miles_async.rollout.contract import flat_args
from miles_async.types import Group, Sample, SampleStatus

FIRST_ROWS = 64
"""Rows that are read of each file."""
MEASURED_CHARACTERS = 1 << 20
"""Characters of prompts that are encoded, over all files: a second of a check."""
_ORDER_OF_SETTINGS = ("shuffle", "seed", "n_samples_per_prompt")
"""Entries of a saved data position that can be compared without reading the whole data."""


@dataclass(frozen=True, slots=True)
class _FirstRows:
    """The first rows of the data for training or for an evaluation."""

    title: str
    """The file or the task."""
    config: RunConfig
    """The configuration of a run with only this data."""
    dataset: EvalDataset | None
    """None for training."""
    groups: Sequence[Group]


def check_files(config: RunConfig, *, full: bool) -> list[TableRow]:
    """What the files of a run contain. With `full`, the reward functions score an empty answer to the first rows.

    Raises UserError with a sentence per problem.
    """
    problems: list[str] = []
    tokenizer = None
    with collected(problems):
        tokenizer = _tokenizer(config)
    if tokenizer is None and config.model.hf_checkpoint is not None:
        config = with_settings(config, apply_chat_template=False)
    rows: list[TableRow] = []
    read: list[_FirstRows] = []
    for name, dataset in config.rollout.eval_datasets.items():
        if (later := _downloaded_later(dataset.path)) is not None:
            rows.append(later)
            continue
        with collected(problems):
            groups = eval_groups(config, name, dataset, tokenizer=tokenizer, first=FIRST_ROWS)
            read.append(_FirstRows(dataset.path, config, dataset, groups))
    source = None
    for title, alone, of_set in _training_data(config, full):
        if (later := _downloaded_later(title)) is not None:
            rows.append(later)
            continue
        with collected(problems):
            source = open_data(alone, tokenizer=tokenizer, first=FIRST_ROWS)
            check_prompts(alone, source, tokenizer)
            read.append(_FirstRows(title, of_set, None, list(islice(first_epoch(source), FIRST_ROWS))))
    if config.data.datasets:
        # A saved position is that of all data sets together.
        comparable = config.learner.load is not None and not problems and not rows
        source = open_data(config, tokenizer=tokenizer, first=FIRST_ROWS) if comparable else None
    for one in read:
        with collected(problems):
            rows.append(_data_row(one, tokenizer, MEASURED_CHARACTERS // len(read)))
    with collected(problems):
        _check_mtp_heads(config)
    with collected(problems):
        rows += _load_rows(config, source)
    if full and config.data.environment is None and generates(config):
        with collected(problems):
            rows += asyncio.run(_score_empty_answers(config, read))
    raise_collected(problems)
    return rows


def _training_data(config: RunConfig, full: bool) -> Iterator[tuple[str, RunConfig, RunConfig]]:
    """Yield the file or the task of each data set, and two configurations of a run with only this data set: one that
    names the data set, and one with its settings in place of those of the run."""
    data = config.data
    for name, dataset in data.datasets.items():
        yield dataset.prompt_data, with_settings(config, datasets={name: dataset}), with_dataset(config, dataset)
    if (title := data.prompt_data or (data.reasoning_gym_task if full else None)) is not None:
        yield title, config, config


class _Counted(StrEnum):
    """What of a row has to fit into the context of the model."""

    PROMPT = "prompt"
    FIRST_TURN = "prompt of a first turn"
    """A generate function of the user adds further turns, and chooses the length of each response."""
    EXAMPLE = "example"
    """A supervised example with everything that is trained of it."""


def _counted(config: RunConfig, *, evaluation: bool = False) -> _Counted | None:
    """What counts of each row for training or for evaluation. None if a rollout function of the user may do anything
    with the rows, or nothing is generated."""
    supervised = config.rollout.rollout_function_path == Supervised.function and not trains_only(config)
    if supervised and not evaluation:
        return _Counted.EXAMPLE
    if not generates(config):
        return None
    if not generates_by_user(config):
        return _Counted.PROMPT
    with_own_rollouts = generates_by_user(with_settings(config, custom_generate_function_path=None))
    return None if with_own_rollouts else _Counted.FIRST_TURN


def check_prompts(config: RunConfig, source: BufferedSource, tokenizer: CheckpointTokenizer | None) -> None:
    """Raises UserError if neither engines nor the learner can use the rows that are tried."""
    counted = _counted(config)
    if tokenizer is None or counted is None:
        return
    for name, feed in source.feeds.items():
        of_set = with_dataset(config, config.data.datasets[name]) if name else config
        complaint = feed.complaint(partial(_complaint, of_set, counted, tokenizer))
        if complaint is not None:
            setting = "reasoning_gym_task" if of_set.data.prompt_data is None else "prompt_data"
            raise UserError(f"datasets.{name}: {complaint}" if name else f"{setting}: {complaint}")


def _complaint(config: RunConfig, counted: _Counted, tokenizer: CheckpointTokenizer, sample: Sample) -> str | None:
    """Why neither engines nor the learner could use a sample; None if they can."""
    try:
        length = _length(counted, tokenizer, sample)
    except (TemplateError, UserError) as error:
        return str(error)
    return None if length is None else _length_complaint(config, counted, length)


def _length(counted: _Counted, tokenizer: CheckpointTokenizer, sample: Sample) -> int | None:
    """The tokens that count of a sample; None if a generate function has to say how they are rendered.

    Raises TemplateError or UserError if the sample cannot be used.
    """
    if counted is _Counted.EXAMPLE:
        # Its imports take a tenth of a second.
        from miles_async.rollout.sft_rollout import fill_example

        fill_example(example := replace(sample), tokenizer, version=0)
        return len(example.tokens)
    try:
        return len(tokenizer.encode(sample.prompt, sample.metadata.get("tools")))
    except (TemplateError, UserError):
        if counted is _Counted.FIRST_TURN:
            return None
        raise


def _length_complaint(config: RunConfig, counted: _Counted, length: int) -> str | None:
    response, context = config.rollout.rollout_max_response_len, context_limit(config)
    longest = longest_sequence(config.learner)
    if counted is _Counted.EXAMPLE:
        if length > longest:
            return (
                f"the example has {length} tokens, and a micro-batch of the learner holds at most {longest}: raise "
                "max_tokens_per_gpu, or shorten the examples"
            )
        if context is not None and length > context:
            return f"the example has {length} tokens, more than the {context} tokens of the model's context: shorten it"
        return None
    if not length:
        return "the prompt has no tokens: write a text"
    if (limit := config.rollout.rollout_max_prompt_len) is not None and length > limit:
        return f"the prompt has {length} tokens, more than rollout_max_prompt_len {limit}: raise it"
    if length >= longest:
        return f"the prompt alone has {too_long(length, longest)}"
    if context is None:
        return None
    if counted is _Counted.FIRST_TURN:
        if length >= context:
            return (
                f"the prompt has {length} tokens, and the model's context {context}, so a first turn has no room: "
                "shorten the prompts"
            )
    elif length + response > context:
        return (
            f"the prompt has {length} tokens, and rollout_max_response_len is {response}, more than the {context} "
            "tokens of the model's context together: lower rollout_max_response_len, or shorten the prompts"
        )
    return None


def _tokenizer(config: RunConfig) -> LightTokenizer | None:
    """The tokenizer of the checkpoint; None if the checkpoint is no folder."""
    checkpoint = config.model.hf_checkpoint
    if checkpoint is None or not Path(checkpoint).is_dir():
        return None
    return LightTokenizer.of_run(config.data, checkpoint)


def _downloaded_later(path: str) -> TableRow | None:
    """Say that a data set is not on this machine; None if it is."""
    if environment_split(path) is not None:
        return ("data", 0, f"rows read of {path}, whose tasks the environment makes when the run starts")
    if hub_name(split_slice(path)[0]) is None:
        return None
    return ("data", 0, f"rows read of {path}, which is downloaded when the run starts")


def _data_row(read: _FirstRows, tokenizer: CheckpointTokenizer | None, characters: int) -> TableRow:
    """Say how long the first rows are; those after the first `characters` characters of prompts are not measured.

    Raises UserError if a supervised example would end the run.
    """
    config = read.config
    of = "" if read.dataset is None else ", for evaluation"
    text = f"first rows of {read.title}{of}"
    counted = _counted(config, evaluation=read.dataset is not None)
    if counted is None:
        return ("data", len(read.groups), text)
    if tokenizer is None:
        unread = config.model.hf_checkpoint
        reason = (
            "" if unread is None else f"; their lengths are unknown, because {unread} is not a folder with a tokenizer"
        )
        return ("data", len(read.groups), f"{text}{reason}")
    if read.dataset is not None and read.dataset.max_response_len is not None:
        config = with_settings(config, rollout_max_response_len=read.dataset.max_response_len)
    lengths: list[int] = []
    unusable: list[str] = []
    measured = list(_first_of(read.groups, characters))
    for group in measured:
        try:
            length = _length(counted, tokenizer, group[0])
        except (TemplateError, UserError) as error:
            if counted is _Counted.EXAMPLE and isinstance(error, UserError):
                # It would end the run as soon as the row is used.
                raise UserError(f"prompt_data {read.title}: {error}") from error
            unusable.append(str(error))
        else:
            lengths += [] if length is None else [length]
    unusable += [sentence for length in lengths if (sentence := _length_complaint(config, counted, length)) is not None]
    if lengths:
        which = "" if len(measured) == len(read.groups) else f" of the first {len(measured)}"
        text += f"; the longest {counted}{which} has {_length_text(config, counted, max(lengths))}"
    if unusable:
        text += f"; {len(unusable)} cannot be used: {unusable[0]}"
    return ("data", len(read.groups), text)


def _first_of(groups: Sequence[Group], characters: int) -> Iterator[Group]:
    """Yield the first groups whose prompts have so many characters together, and at least one."""
    for group in groups:
        yield group
        characters -= len(str(group[0].prompt))
        if characters <= 0:
            return


def _length_text(config: RunConfig, counted: _Counted, length: int) -> str:
    limit, context = config.rollout.rollout_max_prompt_len, context_limit(config)
    text = f"{length} tokens"
    if limit is not None and counted is not _Counted.EXAMPLE:
        text += f" (rollout_max_prompt_len {limit})"
    if context is None:
        return text
    if counted is not _Counted.PROMPT:
        return f"{text}, in a context of {context}"
    return f"{text}, {length + config.rollout.rollout_max_response_len} with its response (context {context})"


def _check_mtp_heads(config: RunConfig) -> None:
    """Raises UserError if MTP heads would be trained through Megatron-Bridge, and the checkpoint has none.

    The start of a run says what is wrong with a checkpoint whose tensors cannot be read.
    """
    checkpoint = config.model.hf_checkpoint
    if not config.learner.enable_mtp_training or checkpoint is None:
        return
    if has_plugin(checkpoint) and config.learner.megatron_to_hf_mode != "bridge":
        # The settings are refused, because plug-ins build no heads.
        return
    further = layers_of_heads(hf_config(checkpoint))
    names = [text_name(name) for name in _tensor_names(Path(checkpoint).expanduser())]
    if names and not any(is_of_heads(name, further) for name in names):
        raise UserError(
            f"enable_mtp_training: hf_checkpoint {checkpoint} has no MTP heads: unset it, or use a checkpoint that has "
            "them"
        )


def _tensor_names(folder: Path) -> list[str]:
    """The names of the tensors of a checkpoint; empty if they cannot be read."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return list(json.loads(index.read_bytes())["weight_map"])
        return list(tensor_shapes(folder))
    except (KeyError, OSError, TypeError, UserError, ValueError):
        return []


def _load_rows(config: RunConfig, source: BufferedSource | None) -> list[TableRow]:
    """Say what the run resumes from. Raises UserError if it cannot."""
    load = config.learner.load
    if load is None:
        return []
    # Its imports take a fifth of a second.
    from .beginning import newest_checkpoint

    checkpoint = newest_checkpoint(config, checksums=False)
    if checkpoint is None:
        return [("load", 0, f"checkpoints in {load}: the run starts from the beginning")]
    progress = read_progress(checkpoint.folder)
    position = progress["data"]
    if source is not None:
        try:
            source.seek(_comparable(position))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the data position of checkpoint {checkpoint.folder} is not valid ({type(error).__name__}: {error}): "
                "load another checkpoint"
            ) from error
    text = (
        f"of {config.rollout.num_rollout} rollouts are trained in {checkpoint.folder}, prompts to finish: "
        f"{len(progress['owed'])}; checksums are compared at the start"
    )
    layout = parallel_layout(config.learner)
    if (saved := progress["layout"]) != layout:
        text += f"; random numbers start from the seed, because its layout is {saved}"
    return [
        ("load", checkpoint.rollout + 1, text),
        *(("load", "damaged", f"{sentence}; an older checkpoint is loaded") for sentence in checkpoint.damage),
    ]


def _comparable(position: Mapping[str, Any]) -> dict[str, Any]:
    """A data position without what only the whole data can be compared with."""
    order = {name: value for name, value in position["order"].items() if name in _ORDER_OF_SETTINGS}
    datasets = {name: _comparable(of_set) for name, of_set in position.get("datasets", {}).items()}
    return {**position, "order": order, **({"datasets": datasets} if datasets else {})}


async def _score_empty_answers(config: RunConfig, read: Sequence[_FirstRows]) -> list[TableRow]:
    """Call each reward as a run calls it. Raises UserError with a sentence for each that fails."""
    rewards, problems = RunRewards(config, flat_args(config)), list[str]()
    rows: list[TableRow] = []
    try:
        for one in read:
            with collected(problems):
                rows.append(await _score_empty_answer(config, rewards, one))
    finally:
        await rewards.close()
    raise_collected(problems)
    return rows


async def _score_empty_answer(config: RunConfig, rewards: RunRewards, read: _FirstRows) -> TableRow:
    rewarder = None if read.dataset is None else rewards.of(read.dataset)
    group = read.groups[0]
    for sample in group:
        sample.status = SampleStatus.COMPLETED
    try:
        await (rewarder or rewards).score(group)
    except TrajectoryError as error:
        if config.rollout.custom_generate_function_path is not None or generates_by_user(config):
            # The function of the user may add to its samples what the reward reads.
            return ("reward", "none", f"for an empty answer to the first row of {read.title}: {error}")
        custom = read.config.rollout.custom_rm_path if read.dataset is None else read.dataset.custom_rm_path
        setting = "rm_type" if custom is None else "custom_rm_path"
        raise UserError(
            f"{setting}: an empty answer to the first row of {read.title} has no reward ({error}): change the reward "
            "or the row"
        ) from error
    return ("reward", f"{group[0].scalar_reward:g}", f"of an empty answer to the first row of {read.title}")
