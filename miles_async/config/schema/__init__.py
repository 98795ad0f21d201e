"""Every setting of a run, grouped into sections. The name of a field is also its flag and its YAML key.

`--rollout-batch-size 32`, `rollout_batch_size: 32` under `rollout:` in YAML and `rollout.rollout_batch_size=32` on the
command line all set the same value. Field names are unique across sections, so flags need no section prefix; the skip
sections, whose fields share names, define a `flag_prefix`. Sections are immutable: the `config.yaml` in the run folder
describes exactly the run that wrote it. The docstring under a field is the help text of its flag.
Plug-ins add their own settings to the sections that name them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_async.config.plugins import PluginSettings
from miles_async.config.schema.algorithm import Algorithm
from miles_async.config.schema.data import Data, Dataset, TrainDataset
from miles_async.config.schema.faults import Fault, Faults
from miles_async.config.schema.learner import Learner
from miles_async.config.schema.model import Model, TinyModel, WarmStart
from miles_async.config.schema.observability import Debug, Observability
from miles_async.config.schema.rollout import EvalDataset, Rollout
from miles_async.config.schema.serving import Cluster, Engine, Weights
from miles_async.config.schema.skip import Skip, SkipAsyncRollout, SkipRole, SkipRollout
from miles_async.guests import GUESTS
from miles_async.losses.advantages.estimator import ADVANTAGES
from miles_async.losses.corrections.correction import CORRECTIONS
from miles_async.losses.objectives.objective import OBJECTIVES
from miles_async.rewards.plugin import REWARDS
from miles_async.section import Section
from miles_async.transports import TRANSPORTS

__all__ = [
    "Algorithm",
    "Cluster",
    "Data",
    "Dataset",
    "Debug",
    "Engine",
    "EvalDataset",
    "Fault",
    "Faults",
    "Learner",
    "Model",
    "Observability",
    "Rollout",
    "RunConfig",
    "Section",
    "Skip",
    "SkipAsyncRollout",
    "SkipRole",
    "SkipRollout",
    "TinyModel",
    "TrainDataset",
    "WarmStart",
    "Weights",
]


if not TYPE_CHECKING:
    _plugins = PluginSettings(
        *(Algorithm, Cluster, Data, Debug, Engine, Faults, Learner, Model, Observability, Rollout),
        *(Skip, SkipAsyncRollout, SkipRole, SkipRollout, TinyModel, WarmStart, Weights),
    )
    Algorithm = _plugins.added_to(Algorithm, OBJECTIVES, CORRECTIONS, ADVANTAGES)
    Rollout = _plugins.added_to(Rollout, REWARDS, GUESTS)
    Weights = _plugins.added_to(Weights, TRANSPORTS)


class RunConfig(Section):
    """The complete configuration of a run."""

    model: Model = Model()
    warm_start: WarmStart = WarmStart()
    data: Data = Data()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    learner: Learner = Learner()
    weights: Weights = Weights()
    engine: Engine = Engine()
    cluster: Cluster = Cluster()
    skip: Skip = Skip()
    observability: Observability = Observability()
    debug: Debug = Debug()
    faults: Faults = Faults()

    @property
    def keeps_reference(self) -> bool:
        """Whether the learner keeps a frozen reference model."""
        return self.algorithm.use_kl_loss or self.algorithm.kl_coef > 0

    @property
    def trains_on_sampling_masks(self) -> bool:
        """Whether top-p or top-k limits the tokens that training samples are drawn from.

        Engines then return the kept tokens, and the learner computes its log-probabilities over them. Greedy decoding
        ignores top-p and top-k.
        """
        rollout = self.rollout
        is_limited = rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0
        return is_limited and rollout.rollout_temperature > 0 and self.learner.loss_type != "sft_loss"

    @property
    def sampling_top_k(self) -> int:
        """The top-k of training samples: the setting, else the limit that top-p alone implies.

        SGLang returns no sampling mask without top-k. The limit is half of what fits into a mask: SGLang also keeps the
        tokens that are as likely as the last of the k, and refuses a mask that is too long.
        """
        if self.rollout.rollout_top_k > 0 or not self.trains_on_sampling_masks:
            return self.rollout.rollout_top_k
        return max(2, self.engine.sampling_mask_limit // 2)

    def reward_key_of(self, dataset: str) -> str | None:
        """The entry that counts of a reward that is a dictionary, for prompts of this data set; empty if it has no
        name."""
        own = self.data.datasets.get(dataset)
        return self.rollout.reward_key if own is None or own.reward_key is None else own.reward_key

    @property
    def samples_per_rollout(self) -> int:
        """Samples per training batch."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step: `global_batch_size`, or the training batch divided by its steps."""
        return self.learner.global_batch_size or self.samples_per_rollout // self.steps_per_pass

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per training batch, in all passes."""
        return self.steps_per_pass * self.learner.passes_per_rollout

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps per pass over a training batch: `num_steps_per_rollout`, or the training batch divided by
        `global_batch_size`, or 1 if both are unset. With `segments_are_samples` it is their number if each trajectory
        has one segment."""
        if self.learner.num_steps_per_rollout is not None:
            return self.learner.num_steps_per_rollout
        samples = self.samples_per_rollout
        return max(1, samples // (self.learner.global_batch_size or samples))

    def checkpoint_due(self, rollout_id: int) -> bool:
        """Whether a checkpoint or an export is written after rollout `rollout_id`."""
        learner, done = self.learner, rollout_id + 1
        if learner.save is None and learner.save_hf is None:
            return False
        return done == self.rollout.num_rollout or done % (learner.save_interval or done + 1) == 0

    def publish_due(self, rollout_id: int) -> bool:
        """Whether a new weight version follows rollout `rollout_id`."""
        done = rollout_id + 1
        return done % self.weights.update_weights_interval == 0 or done == self.rollout.num_rollout

    def evaluation_due(self, rollout_id: int) -> bool:
        """Whether an evaluation follows rollout `rollout_id`. The evaluation at the end of the run is not counted."""
        interval, done = self.rollout.eval_interval, rollout_id + 1
        return interval is not None and done % interval == 0 and done < self.rollout.num_rollout

    @property
    def evaluation_concurrency(self) -> int:
        """Evaluation samples that an engine runs beside training samples; 0 if the run never evaluates during
        training."""
        return 0 if self.rollout.eval_interval is None else max(1, self.engine.sglang_server_concurrency // 4)

    @property
    def restarts_learner(self) -> bool:
        """Whether a lost learner is replaced. Every batch since the last checkpoint is kept until the next one, so
        checkpoints must be written at intervals. A colocated run ends, because its engines share the learner's
        devices."""
        return self.learner.save is not None and self.learner.save_interval is not None and not self.cluster.colocate
