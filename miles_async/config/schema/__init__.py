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
from miles_async.config.schema.data import Data
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
