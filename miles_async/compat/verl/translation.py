"""Translates verl's keys: SkipManager's section `skip`, and the keys on which the folder of its recordings depends."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from miles_async.config.schema import RunConfig
from miles_async.config.translation import Outcome, Refused, Table, Translator, entries, sets

_SKIP_FIELDS = ("enable", "dump_dir", "steps", "action")

TABLE: Table = {
    # The settings have verl's names here, too.
    **{
        f"skip.{role}.{name}": sets(f"skip.{role}.{name}")
        for role in ("rollout", "async_rollout")
        for name in _SKIP_FIELDS
    },
    "actor_rollout_ref.rollout.skip.enable": sets("rollout.skip_rollout"),
    "trainer.experiment_name": sets("observability.experiment_name"),
    "trainer.project_name": sets("observability.project_name"),
    "trainer.total_training_steps": sets("rollout.num_rollout"),
    "trainer.save_freq": sets("learner.save_interval"),
    "trainer.test_freq": sets("rollout.eval_interval"),
    "trainer.default_local_dir": sets("learner.save"),
    "trainer.nnodes": Refused("set actor_num_nodes for the learner, and rollout_num_gpus for the engines"),
    "trainer.n_gpus_per_node": Refused(
        "set actor_num_gpus_per_node for the learner, and rollout_num_gpus for the engines"
    ),
    "data.train_files": sets("data.prompt_data"),
    "data.prompt_key": sets("data.input_key"),
    "data.gen_batch_size": sets("rollout.over_sampling_batch_size"),
    "data.train_batch_size": sets("rollout.rollout_batch_size"),
    "data.max_prompt_length": sets("rollout.rollout_max_prompt_len"),
    "data.max_response_length": sets("rollout.rollout_max_response_len"),
    "data.shuffle": sets("data.rollout_shuffle"),
    "data.seed": sets("data.rollout_seed"),
    "data.val_files": Refused("set eval_datasets"),
    "actor_rollout_ref.model.path": sets("model.hf_checkpoint"),
    "actor_rollout_ref.actor.optim.lr": sets("learner.lr"),
    "actor_rollout_ref.actor.use_kl_loss": sets("algorithm.use_kl_loss"),
    "actor_rollout_ref.actor.kl_loss_coef": sets("algorithm.kl_loss_coef"),
    "actor_rollout_ref.actor.entropy_coeff": sets("algorithm.entropy_coef"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Refused(
        "set global_batch_size to this number of prompts times n_samples_per_prompt"
    ),
    "actor_rollout_ref.rollout.n": sets("rollout.n_samples_per_prompt"),
    "actor_rollout_ref.rollout.temperature": sets("rollout.rollout_temperature"),
    "actor_rollout_ref.rollout.top_p": sets("rollout.rollout_top_p"),
    "actor_rollout_ref.rollout.top_k": sets("rollout.rollout_top_k"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": sets("engine.rollout_num_gpus_per_engine"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": sets("engine.sglang_server_args.mem_fraction_static"),
    "async_training.staleness_threshold": Refused("set max_weight_staleness to a number of weight versions"),
    "async_training.trigger_parameter_sync_step": Refused(
        "set update_weights_interval to a number of training batches"
    ),
}
_SECTIONS = frozenset({"actor_rollout_ref", "trainer", "async_training"})
"""Sections that only verl has."""


def recognises(content: Mapping[str, Any]) -> bool:
    """Whether the content has a section that only verl has, or a key of verl in a section with one of our names.

    A file with nothing but the section `skip` means the same in both projects, and is read as ours.
    """
    own = {key for key, rule in TABLE.items() if rule != sets(key)}
    return not _SECTIONS.isdisjoint(content) or any(key in own for key, _ in entries(content, TABLE))


def translate(content: Mapping[str, Any]) -> Outcome:
    """What the content of a file means here."""
    table = {**TABLE, **_skip_roles(content.get("skip"))}
    translator = Translator("verl", table)
    for key, value in entries(content, table):
        translator.apply(key, value)
    return translator


def resolve_skip_rollout(config: RunConfig) -> RunConfig:
    """The configuration without the deprecated `skip_rollout`, which enables both skip roles at every step.

    It has no effect if a role is enabled already.
    """
    skip = config.skip
    if skip.rollout.enable or skip.async_rollout.enable:
        text = "--skip-rollout is deprecated and has no effect beside skip.rollout or skip.async_rollout: remove it"
        update: dict[str, Any] = {}
    else:
        text = "--skip-rollout is deprecated: set skip.rollout.enable or skip.async_rollout.enable, and steps, instead"
        all_steps: dict[str, Any] = {"enable": True, "steps": ["0-"]}
        roles = {"rollout": skip.rollout, "async_rollout": skip.async_rollout}
        enabled = {name: role.model_copy(update=all_steps) for name, role in roles.items()}
        update = {"skip": skip.model_copy(update=enabled)}
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    update["rollout"] = config.rollout.model_copy(update={"skip_rollout": False})
    return config.model_copy(update=update)


def _skip_roles(section: Any) -> Table:
    """The rules for a user's skip modules. Each module has a field in verl's SkipManagerConfig."""
    roles = set(section) - {"rollout", "async_rollout"} if isinstance(section, Mapping) else set()
    return {f"skip.{role}.{name}": sets(f"skip.roles.{role}.{name}") for role in roles for name in _SKIP_FIELDS}
