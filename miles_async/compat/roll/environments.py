"""Environments of ROLL's agentic pipeline, which the library `roll` of environments runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.compat.roll.data import trains_agents
from miles_async.config.combined_keys import CombinedKeys

_MODULE = "roll.pipeline.agentic.env"
"""Registers ROLL's environments."""
_MANAGERS = (("TrajEnvManager", None), ("ProxyEnvManager", "GEMRunner"))
"""The classes of a file that make one conversation of a trajectory: `env_manager_cls` and `agent_runner_cls`."""
_NEEDED = ("env_type", "max_steps", "max_tokens_per_step", "agent_system_template", "agent_template")
_OPTIONAL = ("env_config", "tool_wrapper", "use_thread_lock", "max_env_step_concurrent")
_SAMPLING = ("temperature", "top_p", "top_k")
_READ = ("tags", "num_groups_partition", "num_env_groups", "group_size", "generating_args")
_DEFAULT_GROUPS = 128


def environments(keys: CombinedKeys) -> None:
    """The environments of `custom_envs` that are trained (`train_env_manager`) or evaluated (`val_env_manager`)."""
    if not trains_agents(keys):
        return
    trained = _groups(keys, "train_env_manager")
    evaluated = _groups(keys, "val_env_manager") if keys.number("eval_steps") else {}
    tags = {tag: _environment(keys, tag) for tag in (*trained, *evaluated)}
    longest = "actor_infer.generating_args.max_new_tokens"
    if not any(key.startswith("actor_infer.generating_args.") for key in keys.values):
        longest = "train_env_manager"
        for name, value in _below(keys, longest, "generating_args").items():
            if name in _SAMPLING:
                keys.set(f"rollout.rollout_{name}", value, "train_env_manager")
        limit = _below(keys, longest, "generating_args").get("max_new_tokens")
    else:
        limit = keys.whole_number(longest)
    keys.set("data.environment", f"roll:{_MODULE}", "custom_envs")
    keys.set("data.environment_settings", {"tags": tags, "max_new_tokens": limit}, f"custom_envs {longest}")
    keys.set("data.apply_chat_template_kwargs", {"enable_thinking": False}, "custom_envs")
    keys.set("rollout.custom_generate_function_path", "miles_async.rollout.environment.generate", "custom_envs")
    # Environments read the text of an answer with all that is in it.
    keys.set("rollout.tool_call_parser", "none", "custom_envs")
    keys.set("rollout.reasoning_parser", "none", "custom_envs")
    sizes = _evaluation(keys, evaluated)
    for tag, groups in trained.items():
        # Tasks that are evaluated are not trained.
        source = f"environment:{tag}" + (f"@[{sizes[tag]}:]" if tag in sizes else "")
        if len(trained) == 1:
            keys.set("data.prompt_data", source, "train_env_manager")
        else:
            keys.set(f"data.datasets.{tag}.prompt_data", source, "train_env_manager")
            keys.set(f"data.datasets.{tag}.weight", groups, "train_env_manager")
    why = "has no effect: an environment runs as many trajectories as the batches need, in one process"
    for manager in ("train_env_manager", "val_env_manager"):
        for name in keys.section(manager):
            if name == "format_penalty":
                keys.translator.idle[f"{manager}.{name}"] = "has no effect in ROLL either: env_config has the penalty"
            elif name not in _READ:
                keys.translator.idle[f"{manager}.{name}"] = why
    if not evaluated:
        keys.note("has no effect without eval_steps", "val_env_manager", "val_batch_size")


def _evaluation(keys: CombinedKeys, evaluated: Mapping[str, int]) -> Mapping[str, int]:
    """Set the data sets for evaluation, one for each tag, and return the number of tasks of each."""
    if not evaluated:
        return {}
    manager = "val_env_manager"
    samples = keys.section(manager).get("group_size", 1)
    batch = keys.values.get("val_batch_size")
    everything = sum(evaluated.values()) * (samples if isinstance(samples, int) else 1)
    rounds = batch // everything if isinstance(batch, int) and everything else 1
    sizes = {tag: groups * max(1, rounds) for tag, groups in evaluated.items()}
    sampling: Mapping[str, Any] = {}
    if not any(key.startswith("actor_infer.generating_args.") for key in keys.values):
        sampling = _below(keys, manager, "generating_args")
    chosen = {name: sampling[name] for name in _SAMPLING if name in sampling}
    datasets = {
        tag: {"path": f"environment:{tag}", "size": size, "n_samples": samples, **chosen}
        for tag, size in sizes.items()
    }
    keys.set("rollout.eval_datasets", datasets, f"{manager} val_batch_size" if batch is not None else manager)
    return sizes


def _groups(keys: CombinedKeys, manager: str) -> Mapping[str, int]:
    """The number of groups of each tag."""
    if manager not in keys.values:
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
        keys.refuse(f"{manager}.num_groups_partition {parts!r:.80} has to have a number of groups for each of tags")
        return {}
    return dict(zip(map(str, tags), parts, strict=True))


def _environment(keys: CombinedKeys, tag: str) -> Mapping[str, Any]:
    """What the environment process needs of an entry of `custom_envs`."""
    found = keys.section("custom_envs").get(tag)
    if not isinstance(found, Mapping):
        keys.refuse(f"custom_envs.{tag} is missing, or is no section: add it, or remove it from tags")
        return {}
    manager = str(found.get("env_manager_cls", "TrajEnvManager")).rpartition(".")[2]
    runner = found.get("agent_runner_cls") and str(found["agent_runner_cls"]).rpartition(".")[2]
    if (manager, runner) not in _MANAGERS:
        keys.refuse(
            f"custom_envs.{tag}.env_manager_cls {manager!r:.80} has no counterpart: set it to TrajEnvManager, with which "
            "a trajectory is one conversation and has one reward, or set custom_generate_function_path to a function"
        )
    elif missing := [name for name in _NEEDED if name not in found]:
        keys.refuse(f"custom_envs.{tag} has no {', '.join(missing)}: add what is missing")
    return {name: found[name] for name in (*_NEEDED, *_OPTIONAL) if name in found}


def _below(keys: CombinedKeys, key: str, name: str) -> Mapping[str, Any]:
    found = keys.section(key).get(name) or {}
    return found if isinstance(found, Mapping) else {}
