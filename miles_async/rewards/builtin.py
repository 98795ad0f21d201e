"""The built-in rewards that `rm_type` names: pure text in, score out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.errors import UserError
from miles_async.types import Sample


def exact(args: Any, sample: Sample) -> float:
    """1 where the stripped response is the label, else 0."""
    return float(sample.response.strip() == str(sample.label).strip())


class ReasoningGymReward:
    """reasoning-gym's own scorer of one task, on the stripped response; 1 is right, many tasks give partial credit.

    Needs the entry that the data source left in `sample.metadata["entry"]`.
    """

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        """Raises UserError when the task is unknown or the settings do not fit it."""
        # Importing reasoning_gym takes seconds: only runs that use it pay.
        import reasoning_gym

        try:
            self._score = reasoning_gym.create_dataset(task, **settings).score_answer
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"rm_type reasoning_gym cannot score {task!r} with {dict(settings)}: {error}") from error

    def __call__(self, args: Any, sample: Sample) -> float:
        return float(self._score(sample.response.strip(), sample.metadata["entry"]))
