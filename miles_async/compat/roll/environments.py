"""Environments of ROLL's agentic pipeline, which the library `roll` of environments runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.adapters.environments.server import Roll
from miles_async.compat.roll.data import (
    check_sampling,
    evaluates,
    trained_tags,
    trains_agents,
    trains_steps,
    whole_number_in,
)
from miles_async.config.combined_keys import CombinedKeys

_TRAIN, _EVAL = "train_env_manager", "val_env_manager"
_SETTINGS: Mapping[str, Any] = {
    "data.environment": "roll:roll.pipeline.agentic.env",
    "data.apply_chat_template_kwargs": {"enable_thinking": False},
    "rollout.custom_generate_function_path": "miles_async.rollout.environment.generate",
    # Environments read the text of an answer with all that is in it.
    "rollout.tool_call_parser": "none",
    "rollout.reasoning_parser": "none",
}
"""What all files with environments have. ROLL renders chats without thinking."""
_OPTIONAL = ("history_length", "env_config", "tool_wrapper", "use_thread_lock", "max_env_step_concurrent")
_SAMPLING = ("temperature", "top_p", "top_k")
_READ = ("tags", "num_groups_partition", "num_env_groups", "group_size", "generating_args")
_DEFAULT_GROUPS = 128


def environments(keys: CombinedKeys) -> None:
    """The environments of `custom_envs` that are trained (`train_env_manager`) or evaluated (`val_env_manager`)."""
    if not trains_agents(keys):
        return
    trained = _groups(keys, _TRAIN)
    evaluated = _groups(keys, _EVAL) if evaluates(keys) else {}
    tags = {tag: _environment(keys, tag) for tag in (*trained, *evaluated)}
    # As in ROLL, the sampling of actor_infer takes the place of that of the managers.
    shared = any(key.startswith("actor_infer.generating_args.") for key in keys.values)
    sampling, eval_sampling = ({} if shared else _sampling(keys, manager) for manager in (_TRAIN, _EVAL))
    for name in _SAMPLING:
        if name in sampling:
            keys.set(f"rollout.rollout_{name}", sampling[name], _TRAIN)
    if "stop_strings" in sampling:
        keys.set("rollout.rollout_stop", sampling["stop_strings"], _TRAIN)
    for manager, own in ((_TRAIN, sampling), (_EVAL, eval_sampling if evaluated else {})):
        if own:
            check_sampling(keys, f"{manager}.generating_args", own)
    longest = "actor_infer.generating_args.max_new_tokens" if shared else _TRAIN
    limit = keys.whole_number(longest) if shared else whole_number_in(keys, sampling, _TRAIN, "max_new_tokens")
    keys.set("data.environment_settings", {"tags": tags, "max_new_tokens": limit}, f"custom_envs {longest}")
    for setting, value in _SETTINGS.items():
        keys.set(setting, value, "custom_envs")
    if trains_steps(keys):
        keys.set("learner.segments_are_samples", True, "custom_envs")
        if not all(Roll.manager_of(tag) in Roll.BY_STEP for tag in trained_tags(keys)):
            keys.refuse(
                f"env_manager_cls of the tags in {_TRAIN}.tags: steps are samples of some tags and not of others, set "
                f"it to one of {', '.join(Roll.BY_STEP)} for all of them"
            )
    sizes = _evaluation(keys, evaluated, eval_sampling)
    for tag, groups in trained.items():
        # Tasks that are evaluated are not trained.
        source = f"environment:{tag}" + (f"@[{sizes[tag]}:]" if tag in sizes else "")
        if len(trained) == 1:
            keys.set("data.prompt_data", source, _TRAIN)
        else:
            keys.set(f"data.datasets.{tag}.prompt_data", source, _TRAIN)
            keys.set(f"data.datasets.{tag}.weight", groups, _TRAIN)
    for key in (f"{manager}.{name}" for manager in (_TRAIN, _EVAL) for name in keys.section(manager)):
        if key.endswith(".format_penalty"):
            keys.translator.idle[key] = "has no effect in ROLL either: env_config has the penalty"
        elif key.endswith(".group_filter_cls"):
            keys.refuse(
                f"{key} has no counterpart: remove it, and set dynamic_sampling_filter_path to a function that keeps "
                "the same groups"
            )
        elif key.rpartition(".")[2] not in _READ:
            keys.translator.idle[key] = "has no effect: one process runs as many environments as the batches need"


def _evaluation(keys: CombinedKeys, evaluated: Mapping[str, int], sampling: Mapping[str, Any]) -> Mapping[str, int]:
    """Set the data sets for evaluation, one for each tag, and return the number of tasks of each."""
    if not evaluated:
        keys.note("has no effect without eval_steps, val_env_manager and training", _EVAL, "val_batch_size")
        return {}
    samples = whole_number_in(keys, keys.section(_EVAL), _EVAL, "group_size") or 1
    rounds = (keys.whole_number("val_batch_size") or 1) // (sum(evaluated.values()) * samples)
    sizes = {tag: groups * max(1, rounds) for tag, groups in evaluated.items()}
    chosen = {name: sampling[name] for name in _SAMPLING if name in sampling}
    datasets = {
        tag: {"path": f"environment:{tag}", "size": size, "n_samples": samples, **chosen} for tag, size in sizes.items()
    }
    keys.set("rollout.eval_datasets", datasets, " ".join(keys.given(_EVAL, "val_batch_size")))
    return sizes


def _groups(keys: CombinedKeys, manager: str) -> Mapping[str, int]:
    """The number of groups of each tag."""
    if manager == _EVAL and not keys.given(manager):
        return {}
    found = keys.section(manager)
    tags, parts = found.get("tags"), found.get("num_groups_partition")
    if not isinstance(tags, list) or not tags or len({*map(str, tags)}) < len(tags):
        keys.refuse(f"{manager}.tags {tags!r:.80} is not a list of different tags of custom_envs: write it as [tag]")
        return {}
    number = found.get("num_env_groups", _DEFAULT_GROUPS)
    if parts is None and isinstance(number, int):
        parts = [max(1, number // len(tags))] * len(tags)
    whole = isinstance(parts, list) and all(type(part) is int and part > 0 for part in parts)
    if not isinstance(parts, list) or not whole or len(parts) != len(tags):
        keys.refuse(f"{manager}.num_groups_partition {parts!r:.80} needs a number of groups for each of tags")
        return {}
    return dict(zip(map(str, tags), parts, strict=True))


def _environment(keys: CombinedKeys, tag: str) -> Mapping[str, Any]:
    """What the environment process needs of an entry of `custom_envs`."""
    found = keys.section("custom_envs").get(tag)
    if not isinstance(found, Mapping):
        keys.refuse(f"custom_envs.{tag} is missing, or is not a section: add it, or remove it from tags")
        return {}
    manager = Roll.manager_of(found)
    runner = str(found.get("agent_runner_cls")).rpartition(".")[2]
    # The first and the last make one conversation of a trajectory.
    if manager not in Roll.MANAGERS and (manager, runner) != ("ProxyEnvManager", "GEMRunner"):
        keys.refuse(
            f"custom_envs.{tag}.env_manager_cls {manager!r:.80} has no counterpart: set it to one of "
            f"{', '.join(Roll.MANAGERS)}, or set custom_generate_function_path"
        )
    for name in ("max_steps", "max_tokens_per_step"):
        whole_number_in(keys, found, f"custom_envs.{tag}", name)
    if missing := [name for name in Roll.KEYS if name not in found]:
        keys.refuse(f"custom_envs.{tag} has no {', '.join(missing)}: add what is missing")
    by_step = {"env_manager_cls": manager} if manager in Roll.BY_STEP else {}
    return by_step | {name: found[name] for name in (*Roll.KEYS, *_OPTIONAL) if name in found}


def _sampling(keys: CombinedKeys, manager: str) -> Mapping[str, Any]:
    found = keys.section(manager).get("generating_args")
    return found if isinstance(found, Mapping) else {}
