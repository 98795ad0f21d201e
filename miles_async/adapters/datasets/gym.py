"""Problems of the reasoning-gym tasks, generated on demand and never stored.

reasoning-gym generates problem i from the seed `seed + i`, so data sets with similar seeds share problems. Training,
warm start and evaluation therefore use seeds that are far apart. In addition, held-out questions are excluded from
training by their text, because small tasks repeat questions: chain_sum with one and two digits has 16,400 different
questions, and 200 of them make up half of the questions it draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from miles_async.adapters.datasets.problems import Problem
from miles_async.config.fields import nearest
from miles_async.config.schema import Data
from miles_async.errors import UserError

HELD_OUT_SEED = 3_000_000_000
WARM_START_SEED = 2_000_000_000
_MAX_DRAWS_PER_HELD_OUT = 200
"""How many problems are drawn at most for each problem that is held out."""


def _dataset(task: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """A data set of reasoning-gym."""
    # Importing reasoning_gym takes seconds, so only runs that use it import it.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        hint = nearest(task, DATASETS) or f"; it is none of {', '.join(sorted(DATASETS))}"
        raise UserError(f"reasoning_gym_task {task!r} is unknown{hint}")
    if reserved := {"seed", "size"} & settings.keys():
        raise UserError(
            f"reasoning_gym_settings has {' and '.join(sorted(reserved))}: "
            "set rollout_seed, reasoning_gym_size and eval_size instead"
        )
    try:
        return reasoning_gym.create_dataset(task, **settings, seed=seed, size=size)
    except (TypeError, ValueError, AssertionError) as error:
        # reasoning-gym checks its settings with assertions.
        raise UserError(
            f"reasoning_gym_settings {dict(settings)} do not fit {task} ({error}): change or remove them"
        ) from error


class GymProblems:
    """Problems of the task of `data`. In the prompt template, `{question}` is replaced by the question, and
    `{expression}` by the text after the last colon of the question.

    The metadata holds the complete reasoning-gym entry, because scoring a response needs it.
    """

    def __init__(self, data: Data, *, seed: int, size: int) -> None:
        """Raises UserError if the task is unknown or does not accept the settings."""
        self._task = str(data.reasoning_gym_task)
        self._template = data.prompt_template
        self._size = size
        self._dataset = _dataset(self._task, data.reasoning_gym_settings, seed=seed, size=size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Problem:
        entry = self._dataset[row]
        question = entry["question"]
        expression = question.rpartition(":")[2].strip()
        prompt = self._template.replace("{expression}", expression).replace("{question}", question)
        return Problem(question, prompt, entry["answer"], {"task": self._task, "entry": entry})


def hold_out(data: Data) -> list[Problem]:
    """Return `eval_size` problems with different questions; they do not depend on the seed of the run.

    Raises UserError if the task has too few different questions.
    """
    size = data.eval_size
    max_draws = _MAX_DRAWS_PER_HELD_OUT * size
    draws = GymProblems(data, seed=HELD_OUT_SEED, size=max_draws)
    first = {problem.question: problem for problem in map(draws.__getitem__, range(size))}
    if len(first) == size:
        return list(first.values())
    # The task repeats questions, so the held-out set may take a large fraction of all questions. It takes at most a
    # quarter of them, chosen by hash: otherwise all questions of the rarer kinds (for example sums of one-digit
    # numbers) would be held out, and training would see another mix of questions.
    held_out: dict[str, Problem] = {}
    for row in range(max_draws):
        problem = draws[row]
        if crc32(problem.question.encode()) % 4 == 0:
            held_out.setdefault(problem.question, problem)
        if len(held_out) == size:
            return list(held_out.values())
    raise UserError(
        f"{data.reasoning_gym_task} with these settings has too few different questions to hold out {size}: "
        f"set eval_size to at most {len(held_out)}, or widen reasoning_gym_settings"
    )
