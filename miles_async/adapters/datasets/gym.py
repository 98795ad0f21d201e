"""Problems from any of reasoning-gym's tasks, made on demand and never stored.

reasoning-gym seeds problem i with `seed + i`, so datasets whose seeds are close share problems. The three sets below
start far apart, and held-out questions are kept out of the others by their text, which is what settles it: small tasks
repeat themselves (chain_sum with one and two digits has 16,400 questions, 200 of which are half of what it draws).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from zlib import crc32

from miles_async.adapters.datasets.problems import Problem
from miles_async.config.fields import nearest
from miles_async.errors import UserError

HELD_OUT_SEED = 3_000_000_000
WARM_START_SEED = 2_000_000_000
_MOST_DRAWS_PER_HELD_OUT = 200


class GymDataset(Protocol):
    """What is used of a reasoning-gym dataset."""

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def create_gym_dataset(task: str, settings: Mapping[str, Any], *, seed: int, size: int) -> GymDataset:
    """Raises UserError when the task is unknown (naming the nearest) or its settings do not fit it."""
    # Importing reasoning_gym takes seconds: only runs that use it pay.
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
        dataset: GymDataset = reasoning_gym.create_dataset(task, **settings, seed=seed, size=size)
    except (TypeError, ValueError, AssertionError) as error:
        # reasoning-gym checks its settings with assertions.
        raise UserError(f"reasoning_gym_settings {dict(settings)} do not fit {task}: {error}") from error
    return dataset


class GymProblems:
    """The prompt is the template with `{question}`, and `{expression}`: what follows the question's last colon.

    The whole reasoning-gym entry travels in the metadata, because scoring needs it.
    """

    def __init__(self, task: str, settings: Mapping[str, Any], template: str, *, seed: int, size: int) -> None:
        if "{question}" not in template and "{expression}" not in template:
            raise UserError(f"prompt_template {template!r} names neither {{question}} nor {{expression}}")
        self._dataset = create_gym_dataset(task, settings, seed=seed, size=size)
        self._task = task
        self._template = template
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Problem:
        entry = self._dataset[row]
        question = entry["question"]
        expression = question.rpartition(":")[2].strip()
        prompt = self._template.replace("{expression}", expression).replace("{question}", question)
        return Problem(question, prompt, entry["answer"], {"task": self._task, "entry": entry})


def hold_out(task: str, settings: Mapping[str, Any], template: str, size: int) -> list[Problem]:
    """`size` problems with different questions, the same whatever the seed of the run.

    Where the task repeats itself, only a quarter of its questions, chosen by hash, may be held out: the questions of
    its small strata would otherwise all be held out and the training mix would be another one. Raises UserError when
    that leaves too few.
    """
    most_draws = _MOST_DRAWS_PER_HELD_OUT * size
    draws = GymProblems(task, settings, template, seed=HELD_OUT_SEED, size=most_draws)
    first = {problem.question: problem for problem in map(draws.__getitem__, range(size))}
    if len(first) == size:
        return list(first.values())
    held_out: dict[str, Problem] = {}
    for row in range(most_draws):
        problem = draws[row]
        if crc32(problem.question.encode()) % 4 == 0:
            held_out.setdefault(problem.question, problem)
        if len(held_out) == size:
            return list(held_out.values())
    raise UserError(
        f"{task} with these settings has too few different questions to hold out {size}: "
        f"set eval_size to at most {len(held_out)}, or widen reasoning_gym_settings"
    )
