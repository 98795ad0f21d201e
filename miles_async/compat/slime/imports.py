"""Lets users' modules import the names of slime and Miles from this project (`--slime-imports`).

slime's own fully asynchronous worker then runs unchanged: its file comes from a checkout of slime on `PYTHONPATH`, and
the modules that it imports are these:

    module                    what it has
    rollout.sglang_rollout    sglang_rollout.py
    rollout.rm_hub            rm_hub.py and rewards.py, and a module for each kind of reward
    rollout.data_source       data_source.py
    rollout.base_types        base_types.py
    rollout.filter_hub        dynamic_sampling_filters.check_reward_nonzero_std and check_no_aborted
    utils.types               miles_async/types.py
    utils.async_utils         async_utils.py
    utils.http_utils          http_utils.py, and get_rollout_num_engines
    utils.misc                load_function

They are found below `slime` and below `miles`. Every other module comes from a checkout, including those in its folder
`rollout/rm_hub`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from miles_async import filters, types
from miles_async.compat.slime import (
    async_utils,
    base_types,
    data_source,
    http_utils,
    rewards,
    rm_hub,
    sglang_rollout,
)
from miles_async.config.user_functions import load_function

PROJECTS = ("slime", "miles")


def install_slime_imports() -> None:
    """Let imports of the modules above find this project. Later calls do nothing.

    Without a checkout of a project, its packages hold nothing else.
    """
    for project in PROJECTS:
        if sys.modules.get(f"{project}.rollout.sglang_rollout") is not sglang_rollout:
            _install(project)


def _install(project: str) -> None:
    scores = _package(f"{project}.rollout.rm_hub")
    vars(scores).update(
        {name: getattr(rewards, name) for name in rewards.__all__},
        async_rm=rm_hub.async_rm,
        batched_async_rm=rm_hub.batched_async_rm,
        compute_score_dapo=rewards.compute_score,
        extract_boxed_answer=rewards.extract_answer,
    )
    stand_ins: dict[str, ModuleType] = {
        "rollout.sglang_rollout": sglang_rollout,
        "rollout.rm_hub": scores,
        "rollout.data_source": data_source,
        "rollout.base_types": base_types,
        "rollout.filter_hub.dynamic_sampling_filters": _module(
            f"{project}.rollout.filter_hub.dynamic_sampling_filters",
            check_reward_nonzero_std=filters.check_reward_nonzero_std,
            check_no_aborted=filters.check_no_aborted,
        ),
        "utils.types": types,
        "utils.async_utils": async_utils,
        "utils.http_utils": _module(
            f"{project}.utils.http_utils",
            get=http_utils.get,
            get_rollout_num_engines=sglang_rollout.get_rollout_num_engines,
            post=http_utils.post,
        ),
        "utils.misc": _module(f"{project}.utils.misc", load_function=load_by_path),
    }
    if importlib.util.find_spec(project) is None:
        for name in ("", ".rollout", ".rollout.filter_hub", ".utils"):
            sys.modules[project + name] = _package(project + name)
        for name in ("deepscaler", "f1", "gpqa", "math_dapo_utils", "math_utils"):
            stand_ins[f"rollout.rm_hub.{name}"] = rewards
    else:
        if importlib.util.find_spec(f"{project}.rollout.filter_hub") is None:
            sys.modules[f"{project}.rollout.filter_hub"] = _package(f"{project}.rollout.filter_hub")
        found = importlib.util.find_spec(f"{project}.rollout.rm_hub")
        if found is not None:
            scores.__path__ = list(found.submodule_search_locations or ())
    sys.modules |= {f"{project}.{name}": module for name, module in stand_ins.items()}
    # `import slime.utils.types` binds `slime`, and the module is looked up in its packages.
    for name, module in stand_ins.items():
        package, _, own_name = f"{project}.{name}".rpartition(".")
        setattr(importlib.import_module(package), own_name, module)


def load_by_path(path: str) -> Callable[..., Any]:
    """Import the function at `path`, which is written as `module.function`. Raises UserError if that fails."""
    return load_function(path, setting="load_function")


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name, f"Names of {name} for users' functions (miles_async/compat/slime/imports.py).")
    vars(module).update(names)
    return module


def _package(name: str) -> ModuleType:
    package = _module(name, __path__=[])
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    return package
