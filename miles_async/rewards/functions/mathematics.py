"""The rewards `math`, `dapo` and `deepscaler`; `rewards/mathematics.py` computes them."""

from __future__ import annotations

from miles_async.rewards.plugin import Reward, RewardFunction, RunsIn


class Math(Reward):
    """1 if the last boxed answer, or else the last number or formula, equals the label, and 0 otherwise."""

    name = "math"
    runs_in = RunsIn.GRADER
    compares = True

    def open(self, settings: object) -> RewardFunction:
        from miles_async.rewards.mathematics import math

        return math


class Dapo(Reward):
    """A dictionary with `score` (1 or -1) and `acc` (1 or 0), from the last `Answer:` line (arXiv 2503.14476)."""

    name = "dapo"
    runs_in = RunsIn.GRADER
    compares = True
    wrong = {"score": -1.0, "acc": 0.0}
    may_be_dictionary = True

    def open(self, settings: object) -> RewardFunction:
        from miles_async.rewards.mathematics import dapo

        return dapo


class Deepscaler(Reward):
    """1 if the boxed answer after the reasoning equals one of the labels, and 0 otherwise."""

    name = "deepscaler"
    runs_in = RunsIn.GRADER
    compares = True

    def open(self, settings: object) -> RewardFunction:
        from miles_async.rewards.mathematics import deepscaler

        return deepscaler
