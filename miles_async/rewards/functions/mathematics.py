"""The rewards `math`, `roll_math`, `dapo` and `deepscaler`; `rewards/mathematics.py` computes them."""

from __future__ import annotations

from miles_async.rewards.plugin import Reward, RewardFunction, RunsIn


class _Mathematics(Reward):
    runs_in = RunsIn.GRADER
    compares = True

    def open(self, settings: object) -> RewardFunction:
        """Return the function named like the reward. Only grader processes import the module."""
        from miles_async.rewards import mathematics

        return vars(mathematics)[self.name]  # type: ignore[no-any-return]


class Math(_Mathematics):
    """1 if the last boxed answer, or else the last number or formula, equals the label, and 0 otherwise."""

    name = "math"
    reads_box = True


class RollMath(_Mathematics):
    """As `math`, but only the text after `</think>` counts, or else after the last empty line.

    A response with neither is wrong, and so is one with several `</think>` or with a `<think>` after its beginning.
    """

    name = "roll_math"
    reads_around_box = "the end of the reasoning"


class Dapo(_Mathematics):
    """A dictionary with `score` (1 or -1) and `acc` (1 or 0), from the last `Answer:` line (arXiv 2503.14476)."""

    name = "dapo"
    wrong = {"score": -1.0, "acc": 0.0}
    may_be_dictionary = True
    reads_around_box = "`Answer:`"


class Deepscaler(_Mathematics):
    """1 if the boxed answer after the reasoning equals one of the labels, and 0 otherwise."""

    name = "deepscaler"
    reads_around_box = "the end of the reasoning"
