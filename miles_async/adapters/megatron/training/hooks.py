"""Functions of users that the learner calls between its own steps. Settings and arguments are those of slime.

docs/how-to/write-a-loss.md documents the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_async.adapters.megatron.model.factory import MegatronModel, TrainedModel
from miles_async.config.schema import RunConfig
from miles_async.losses.functions import LossFunction


@dataclass(frozen=True, slots=True)
class LearnerHooks:
    """The hooks of a run, and the settings that they get as `args`. A hook that raises ends the run with UserError."""

    args: Any = None
    init: LossFunction | None = None
    log_prob: LossFunction | None = None
    train_step: LossFunction | None = None

    @classmethod
    def load(cls, config: RunConfig, args: Any) -> LearnerHooks:
        """Import the functions that the configuration names. Raises UserError if one cannot be used."""
        learner = config.learner
        named = {
            "custom_megatron_init_path": learner.custom_megatron_init_path,
            "custom_megatron_before_log_prob_hook_path": learner.custom_megatron_before_log_prob_hook_path,
            "custom_megatron_before_train_step_hook_path": learner.custom_megatron_before_train_step_hook_path,
        }
        return cls(args, *(None if path is None else LossFunction(setting, path) for setting, path in named.items()))

    def initialize(self) -> None:
        """Call the hook of the start. The process groups must exist."""
        if self.init is not None:
            self.init(self.args)

    def before_log_prob(self, model: MegatronModel, store_prefix: str) -> None:
        """Call the hook of passes without gradients. `store_prefix` is "" for the policy and "ref_" for the reference
        model."""
        if self.log_prob is not None:
            self.log_prob(self.args, list(model.chunks), store_prefix)

    def before_train_step(self, model: TrainedModel, rollout_id: int, step_id: int) -> None:
        """Call the hook of optimizer steps. The gradients of the model must be zero."""
        if self.train_step is not None:
            # There is no object that keeps a schedule: each optimizer step sets its learning rate.
            self.train_step(self.args, rollout_id, step_id, list(model.chunks), model.optimizer, None)


NO_HOOKS = LearnerHooks()
