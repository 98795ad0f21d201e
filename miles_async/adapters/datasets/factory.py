"""The data source that the configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_async.adapters.datasets.buffer import Buffer, pop_first
from miles_async.adapters.datasets.gym import WARM_START_SEED, GymProblems, hold_out
from miles_async.adapters.datasets.problems import BlankProblems, FileProblems, Keys, Problem, Problems
from miles_async.adapters.datasets.rows import open_rows
from miles_async.adapters.datasets.source import BufferedSource, Render, Report
from miles_async.config.derived import trains_only
from miles_async.config.schema import Data, RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import DataRowError, UserError

SFT_FUNCTION = "miles_async.rollout.sft_rollout.generate_rollout"
"""Takes conversations as they are, and renders them itself."""


def _unheard(reason: str, sentence: str) -> None:
    """Where nobody listens yet: before the run."""


def open_data(
    config: RunConfig, *, checkpoint: str | None = None, args: Any = None, report: Report = _unheard
) -> BufferedSource:
    """`checkpoint` is the folder whose tokenizer renders chats; only `apply_chat_template` needs it.

    `args` is what a buffer filter is called with, `report` is told of what is passed over. Raises UserError for a file
    that cannot be read, a broken row among the first, an unknown task, settings that do not fit.
    """
    data = config.data
    problems, warm_start, held_out = _problems(config)
    choose = pop_first
    if data.buffer_filter_path is not None:
        choose = load_function(data.buffer_filter_path, setting="buffer_filter_path", plain=True)
    return BufferedSource(
        problems,
        held_out=held_out,
        warm_start=warm_start,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        shuffle=data.rollout_shuffle and not isinstance(problems, BlankProblems),
        seed=data.rollout_seed,
        render=_chat_renderer(checkpoint, data.apply_chat_template_kwargs) if data.apply_chat_template else _as_it_is,
        buffer=Buffer(choose, args, report),
        report=report,
    )


def _problems(config: RunConfig) -> tuple[Problems, Problems, list[Problem]]:
    """To train on, to warm-start on, and held out."""
    data = config.data
    if data.prompt_data is None:
        # A run that only trains brings its batches along, so it may do without.
        blank = data.reasoning_gym_task is None and (data.disable_rollout_global_dataset or trains_only(config))
        return (BlankProblems(), BlankProblems(), []) if blank else _gym(data)
    rows = open_rows(data.prompt_data, cache_dir=config.warm_start.cache_dir)
    keys = Keys(prompt=data.input_key, label=data.label_key, metadata=data.metadata_key, tools=data.tool_key)
    chats = data.apply_chat_template or config.rollout.rollout_function_path == SFT_FUNCTION
    problems = FileProblems(rows, keys, chats=chats)
    return problems, problems, problems.hold_out(data.eval_size) if data.eval_size else []


def _gym(data: Data) -> tuple[Problems, Problems, list[Problem]]:
    task, settings, template = data.reasoning_gym_task, data.reasoning_gym_settings, data.prompt_template
    if task is None:
        raise UserError(
            "no data: set prompt_data to a JSONL or Parquet file, reasoning_gym_task to a task such as chain_sum, or "
            "disable_rollout_global_dataset"
        )
    problems = GymProblems(task, settings, template, seed=data.rollout_seed, size=data.reasoning_gym_size)
    warm_start = GymProblems(task, settings, template, seed=WARM_START_SEED, size=data.reasoning_gym_size)
    return problems, warm_start, hold_out(task, settings, template, data.eval_size) if data.eval_size else []


def _as_it_is(problem: Problem) -> Any:
    return problem.prompt


def chat_tokenizer(checkpoint: str) -> Any:
    """The checkpoint's tokenizer with a chat template. Raises UserError when it has none."""
    # Importing transformers takes seconds: only runs that render chats pay.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"hf_checkpoint {checkpoint} has no tokenizer that can be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise UserError(f"apply_chat_template is set, but the tokenizer in {checkpoint} has no chat template: unset it")
    return tokenizer


def _chat_renderer(checkpoint: str | None, kwargs: dict[str, Any]) -> Render:
    if checkpoint is None:
        raise UserError("apply_chat_template needs a tokenizer: set hf_checkpoint")
    tokenizer = chat_tokenizer(checkpoint)

    def render(problem: Problem) -> str:
        prompt = problem.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=problem.tools, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except Exception as error:
            # A template is a program of the checkpoint's: it may raise anything over a row it does not understand.
            raise DataRowError(f"the chat template cannot render {problem.question[:200]!r}: {error}") from error
        return str(text)

    return render


def save_tokenizer(checkpoint: str, folder: str) -> None:
    """Copy the checkpoint's tokenizer files, so that dumped tokens can be read wherever the dump goes."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(checkpoint, local_files_only=True).save_pretrained(
        Path(folder).expanduser() / "tokenizer"
    )
