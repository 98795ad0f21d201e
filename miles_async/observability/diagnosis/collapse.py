"""Announces an approaching collapse of the policy, before most of the reward is lost.

In asynchronous training, a collapse of the effective sample size (ESS) of the importance weights precedes the collapse
of the policy: the staler the tokens, the more unequal their weights, until a few tokens determine the whole update
(VCPO, arXiv 2602.17616). The learner reports ESS for every batch, with every loss and correction: it is computed from
the ratios before a correction bounds them.

The risk of a collapse is high in either of two cases:

- The median ESS of the last `RECENT` batches is less than `LOW_ESS` times its usual value.
- It is less than `REDUCED_ESS` times its usual value, and the reward has fallen: the mean reward of these batches is
  below the highest such mean by more than `REWARD_FALL` times the usual change of the reward from a batch to the next.

The first case announces a fast collapse, and the second one a slow collapse, in which ESS stays higher. The change from
a batch to the next makes up for the scale of the rewards, and for the noise of batches of few samples.

A single unusual batch changes nothing. Neither does a staleness that rises and falls again within some batches, because
many groups were admitted at once: half of these batches are fresh enough.

The usual value is the highest such median so far. It is close to 1 if the engines compute the same probabilities as the
learner. It is lower from the first batch on if they do not: because of quantization, different routing of experts, or
top-p and top-k. The signs are gone when the median is back at `REDUCED_ESS` times its usual value, and the reward is
back too. They are also gone when a learner continues from a checkpoint, until batches of its weights show them again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from statistics import fmean, mean, median

from miles_async.events import CollapseRiskChanged, Event, LearnerRestored, RunStarted, StepEnded, StepStarted

RECENT = 8
"""Number of the last trained batches that are judged together."""
FIRST_JUDGED = 5
"""Number of trained batches before the first judgement."""
LOW_ESS = 0.5
"""Fraction of the usual ESS. Particle filters resample below half for the same reason (Doucet and Johansen 2009)."""
REDUCED_ESS = 0.8
"""Fraction of the usual ESS."""
REWARD_FALL = 3.0
"""Multiple of the mean change of the reward from a batch to the next."""
REMEMBERED_REWARDS = 64

KNOB = (
    "lower --max-weight-staleness or --lr, or bound the importance weights (--off-policy-correction tis); "
    "resume from a checkpoint that was written before the fall"
)
"""What to change."""


class _Signs:
    """What the last batches of an adapter show, or those of a run that does not train several."""

    def __init__(self) -> None:
        self._usual_ess = 0.0
        self.start_over()

    def start_over(self) -> None:
        """Forget the last batches, and the rewards of the weights that they trained."""
        self._ess: deque[float] = deque(maxlen=RECENT)
        self._rewards: deque[float] = deque(maxlen=REMEMBERED_REWARDS)
        self._highest_reward = -inf
        self.high = False

    def judge(self, ess: float, reward: float) -> str:
        """Judge the risk after another batch. Returns the figures in words; nothing before there are enough batches."""
        self._ess.append(ess)
        self._rewards.append(reward)
        if len(self._ess) < FIRST_JUDGED:
            return ""
        ess = median(self._ess)
        self._usual_ess = max(self._usual_ess, ess)
        reduced = ess < REDUCED_ESS * self._usual_ess
        rewards = list(self._rewards)
        reward = mean(rewards[-RECENT:])  # exact, so that equal rewards have equal means
        self._highest_reward = max(self._highest_reward, reward)
        change = fmean(abs(after - before) for before, after in pairwise(rewards))
        fell = self._highest_reward - reward > REWARD_FALL * change
        self.high = (reduced or fell) if self.high else ess < LOW_ESS * self._usual_ess or (reduced and fell)
        figures = f"is {ess:.2f} (usual {self._usual_ess:.2f})"
        if fell:
            figures += f", and the mean reward of {RECENT} batches is {reward:.3g} (highest {self._highest_reward:.3g})"
        return figures


class CollapseDetector:
    """Pass every event to `observe`, which returns each change of the risk.

    That includes the events of earlier drivers of the run, so that a restart changes neither the usual value nor the
    risk that was announced. If the run trains several adapters, each is judged alone, and the risk is that of any.
    """

    def __init__(self) -> None:
        self._signs: defaultdict[str, _Signs] = defaultdict(_Signs)
        """By adapter."""
        self._adapter = ""
        """The adapter of the step that began last."""
        self._high = False
        """What was announced last."""
        self._configuration = ""
        """Identifies the settings for which the usual ESS was measured (`RunStarted.configuration`)."""
        self._rollout = -1
        """The last trained rollout."""

    def observe(self, event: Event) -> CollapseRiskChanged | None:
        match event:
            case RunStarted():
                if event.configuration != self._configuration:
                    self._configuration = event.configuration
                    self._signs.clear()
                return self._start_over(event, list(self._signs))
            case LearnerRestored():
                self._rollout = event.rollout
                return self._start_over(event, [event.adapter])
            case CollapseRiskChanged():
                self._high = event.high
            case StepStarted():
                self._adapter = event.adapter
            # Batches without this metric, such as those that train only a critic, do not show the state of the policy.
            case StepEnded() if "ess" in event.metrics:
                self._rollout = event.rollout
                figures = self._signs[self._adapter].judge(event.metrics["ess"], event.reward)
                of = f" of adapter {self._adapter}" if self._adapter else ""
                return self._changed(event, f"the effective sample size{of} {figures}") if figures else None
        return None

    def _start_over(self, event: Event, adapters: Sequence[str]) -> CollapseRiskChanged | None:
        """Forget the last batches: the learner continues with other weights than those that they trained."""
        for adapter in adapters:
            self._signs[adapter].start_over()
        why = "the learner continues from a checkpoint, and the next batches show whether the signs return"
        return self._changed(event, why)

    def _changed(self, event: Event, why: str) -> CollapseRiskChanged | None:
        """What to announce after `event`, if anything."""
        high = any(signs.high for signs in self._signs.values())
        if high == self._high:
            return None
        self._high = high
        knob = KNOB if high else ""
        return CollapseRiskChanged(time=event.time, rollout=self._rollout, high=high, why=why, knob=knob)
