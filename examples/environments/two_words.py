"""An environment of `openenv`: write two words backwards, one after the other. Each right answer is half a point.

    python train_async.py --config configs/openenv-cpu.yaml

`app` is the server of the environment. If it is deployed elsewhere, `environment: openenv:http://host:port` trains in
it.
"""

from __future__ import annotations

import random
import string
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

SIZES = {"train": 20_000}
"""Number of tasks by split."""
LETTERS = 4


class Answer(Action):
    text: str


class Question(Observation):
    word: str


class TwoWords(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._words: list[str] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> Question:
        self._state = State(episode_id=episode_id, step_count=0)
        self._words = _words(task["index"])
        return Question(word=self._words[0])

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Question:
        right = action.text.strip() == self._words[self._state.step_count][::-1]
        self._state.step_count += 1
        done = self._state.step_count == len(self._words)
        word = "" if done else self._words[self._state.step_count]
        return Question(word=word, reward=right / len(self._words), done=done)

    @property
    def state(self) -> State:
        return self._state

    def list_splits(self) -> list[str]:
        return list(SIZES)

    def num_tasks(self, split: str) -> int:
        return SIZES[split]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """The first word of each task and both answers. `examples/two_words.py` reads them for the warm start."""
        tasks = [_words(index) for index in range(SIZES[split])[start:stop]]
        return [{"prompt": words[0], "answer": " ".join(word[::-1] for word in words)} for words in tasks]


def _words(index: int) -> list[str]:
    draw = random.Random(index)
    return ["".join(draw.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(2)]


app = create_fastapi_app(TwoWords, Answer, Question, max_concurrent_envs=512)
