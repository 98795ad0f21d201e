"""An environment of `openenv`: two sums in a row, in one conversation. Each right answer is worth half a point.

    python train_async.py --config configs/openenv-cpu.yaml

`app` is the server of the environment. Deployed elsewhere, `environment: openenv:http://host:port` trains in it.
"""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

SIZES = {"train": 20_000}
"""Number of tasks by split."""


class Answer(Action):
    text: str


class Question(Observation):
    prompt: str


class TwoSums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._sums: list[list[int]] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> Question:
        self._state = State(episode_id=episode_id, step_count=0)
        self._sums = _sums(task["index"])
        return Question(prompt=_text(self._sums[0]))

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Question:
        right = action.text.strip() == str(sum(self._sums[self._state.step_count]))
        self._state.step_count += 1
        done = self._state.step_count == len(self._sums)
        prompt = "" if done else _text(self._sums[self._state.step_count])
        return Question(prompt=prompt, reward=right / len(self._sums), done=done)

    @property
    def state(self) -> State:
        return self._state

    def list_splits(self) -> list[str]:
        return list(SIZES)

    def num_tasks(self, split: str) -> int:
        return SIZES[split]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """The first sum of each task, with its answer, for the warm start."""
        rows = range(SIZES[split])[start:stop]
        return [{"prompt": _text(_sums(row)[0]), "answer": str(sum(_sums(row)[0]))} for row in rows]


def _sums(index: int) -> list[list[int]]:
    numbers = random.Random(index)
    return [[numbers.randint(0, 9) for _ in range(3)] for _ in range(2)]


def _text(numbers: list[int]) -> str:
    return " + ".join(map(str, numbers))


app = create_fastapi_app(TwoSums, Answer, Question, max_concurrent_envs=512)
