"""Announces an approaching collapse of the policy, before the reward falls.

In asynchronous training, a collapse of the effective sample size (ESS) of the importance weights and spikes of the
gradient norm precede the collapse of the policy: the staler the tokens, the more unequal their weights, until a few
tokens determine the whole update (VCPO, arXiv 2602.17616). The learner reports both metrics for every batch, with
every loss and correction: ESS is computed from the ratios before a correction bounds them.

The risk of a collapse is high in either of two cases:

- The median ESS of the last `RECENT` batches is less than `LOW_ESS` times its usual value.
- It is less than `REDUCED_ESS` times its usual value, and at least two of the last `RECENT` gradient norms exceed
  `SPIKE` times the median of the last `REMEMBERED_NORMS`.

A single unusual batch changes nothing. Neither does a staleness that rises and falls again within some batches, because
many groups were admitted at once: half of these batches are fresh enough.

The usual value is the highest such median so far. It is close to 1 if the engines compute the same probabilities as the
learner. It is lower from the first batch on if they do not: because of quantization, different routing of experts, or
top-p and top-k. The signs are gone when the median is back at `REDUCED_ESS` times its usual value. They are also gone
when a learner continues from a checkpoint, until batches of its weights show them again.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from miles_async.events import CollapseRiskChanged, Event, LearnerRestored, RunStarted, StepEnded

RECENT = 8
"""Number of the last trained batches that are judged together."""
FIRST_JUDGED = 5
"""Number of trained batches before the first judgement."""
LOW_ESS = 0.5
"""Fraction of the usual ESS. Particle filters resample below half for the same reason (Doucet and Johansen 2009)."""
REDUCED_ESS = 0.8
"""Fraction of the usual ESS."""
SPIKE = 4.0
"""Multiple of the median gradient norm."""
REMEMBERED_NORMS = 64

KNOB = (
    "lower --max-weight-staleness or --lr, or bound the importance weights (--off-policy-correction tis); "
    "resume from a checkpoint that was written before the fall"
)
"""What to change."""


class CollapseDetector:
    """Pass every event to `observe`, which returns each change of the risk.

    That includes the events of earlier drivers of the run, so that a restart changes neither the usual value nor the
    risk that was announced.
    """

    def __init__(self) -> None:
        self._ess: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=REMEMBERED_NORMS)
        self._usual_ess = 0.0
        self._high = False
        self._configuration = ""
        """Identifies the settings for which the usual ESS was measured (`RunStarted.configuration`)."""
        self._rollout = -1
        """The last trained rollout."""

    def observe(self, event: Event) -> CollapseRiskChanged | None:
        match event:
            case RunStarted():
                if event.configuration != self._configuration:
                    self._configuration, self._usual_ess = event.configuration, 0.0
                return self._start_over(event)
            case LearnerRestored():
                self._rollout = event.rollout
                return self._start_over(event)
            case CollapseRiskChanged():
                self._high = event.high
            # Batches without these metrics, such as those that train only a critic, do not show the state of the
            # policy.
            case StepEnded() if "ess" in event.metrics and "grad_norm" in event.metrics:
                self._rollout = event.rollout
                self._ess.append(event.metrics["ess"])
                self._norms.append(event.metrics["grad_norm"])
                if len(self._ess) >= FIRST_JUDGED:
                    return self._judge(event)
        return None

    def _start_over(self, event: Event) -> CollapseRiskChanged | None:
        """Forget the last batches: the learner continues with other weights than those that they trained."""
        self._ess.clear()
        self._norms.clear()
        if not self._high:
            return None
        self._high = False
        why = "the learner continues from a checkpoint, and the next batches show whether the signs return"
        return CollapseRiskChanged(time=event.time, rollout=self._rollout, high=False, why=why, knob="")

    def _judge(self, event: StepEnded) -> CollapseRiskChanged | None:
        ess = median(self._ess)
        self._usual_ess = max(self._usual_ess, ess)
        relative_ess = ess / self._usual_ess if self._usual_ess > 0 else 1.0
        usual_norm = median(self._norms)
        spike = sorted(list(self._norms)[-RECENT:])[-2] / usual_norm if usual_norm > 0 else 1.0
        if self._high:
            high = relative_ess < REDUCED_ESS
        else:
            high = relative_ess < LOW_ESS or (relative_ess < REDUCED_ESS and spike > SPIKE)
        if high == self._high:
            return None
        self._high = high
        why = f"the effective sample size is {ess:.2f} (usual {self._usual_ess:.2f})"
        if high and spike > SPIKE:
            why += f", and the gradient norm rose to {spike:.1f} times its median"
        knob = KNOB if high else ""
        return CollapseRiskChanged(time=event.time, rollout=event.rollout, high=high, why=why, knob=knob)
