"""The data source that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from miles_async.adapters.datasets.gym import WARM_START_SEED, GymProblems, hold_out
from miles_async.adapters.datasets.jsonl import JsonlProblems
from miles_async.adapters.datasets.source import BufferedSource, Problem, Problems, Prompt
from miles_async.config.schema import Data, RunConfig
from miles_async.errors import UserError


def open_data(config: RunConfig, *, checkpoint: str | None = None) -> BufferedSource:
    """`checkpoint` is the folder whose tokenizer renders chats; only `apply_chat_template` needs it.

    Raises UserError for a file that cannot be read, a broken row, an unknown task, settings that do not fit.
    """
    data = config.data
    problems, warm_start, held_out = _jsonl(data.prompt_data, data) if data.prompt_data is not None else _gym(data)
    return BufferedSource(
        problems,
        held_out=held_out,
        warm_start=warm_start,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
        render=_chat_renderer(checkpoint) if data.apply_chat_template else _as_it_is,
    )


def _jsonl(path: str, data: Data) -> tuple[Problems, Problems, list[Problem]]:
    problems = JsonlProblems(path, input_key=data.input_key, label_key=data.label_key, chat=data.apply_chat_template)
    return problems, problems, problems.hold_out(data.eval_size) if data.eval_size else []


def _gym(data: Data) -> tuple[Problems, Problems, list[Problem]]:
    task, settings, template = data.reasoning_gym_task, data.reasoning_gym_settings, data.prompt_template
    if task is None:
        raise UserError("no data: set prompt_data to a JSONL file, or reasoning_gym_task to a task such as chain_sum")
    problems = GymProblems(task, settings, template, seed=data.rollout_seed, size=data.reasoning_gym_size)
    warm_start = GymProblems(task, settings, template, seed=WARM_START_SEED, size=data.reasoning_gym_size)
    return problems, warm_start, hold_out(task, settings, template, data.eval_size) if data.eval_size else []


def _as_it_is(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise UserError("a prompt is a list of messages: set apply_chat_template")
    return prompt


def _chat_renderer(checkpoint: str | None) -> Callable[[Prompt], str]:
    if checkpoint is None:
        raise UserError("apply_chat_template needs a tokenizer: set hf_checkpoint")
    # Importing transformers takes seconds: only runs that render chats pay.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"hf_checkpoint {checkpoint} has no tokenizer that can be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise UserError(f"apply_chat_template is set, but the tokenizer in {checkpoint} has no chat template: unset it")

    def render(prompt: Prompt) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    return render
