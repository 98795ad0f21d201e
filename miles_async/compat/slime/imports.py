"""Lets users' modules import slime's names from this project (`--slime-imports`).

slime's own fully asynchronous worker then runs unchanged: its file comes from a checkout of slime on `PYTHONPATH`, and
the modules that it imports are these:

    module                          what it has
    slime.rollout.sglang_rollout    sglang_rollout.py
    slime.rollout.rm_hub            rm_hub.py
    slime.rollout.data_source       data_source.py
    slime.rollout.base_types        base_types.py
    slime.rollout.filter_hub        dynamic_sampling_filters.check_reward_nonzero_std
    slime.utils.types               miles_async/types.py
    slime.utils.async_utils         run
    slime.utils.http_utils          get_rollout_num_engines
    slime.utils.misc                load_function

Every other module of slime comes from the checkout, including those in its folder `slime/rollout/rm_hub`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from miles_async import filters, types
from miles_async.compat.slime import base_types, data_source, rm_hub, sglang_rollout
from miles_async.config.user_functions import load_function

T = TypeVar("T")


def install_slime_imports() -> None:
    """Let imports of the modules above find this project. Later calls do nothing.

    Without a checkout of slime, the packages `slime`, `slime.rollout` and `slime.utils` are empty.
    """
    if sys.modules.get("slime.rollout.sglang_rollout") is sglang_rollout:
        return
    rewards = _package("slime.rollout.rm_hub")
    vars(rewards).update(async_rm=rm_hub.async_rm, batched_async_rm=rm_hub.batched_async_rm)
    if importlib.util.find_spec("slime") is None:
        for name in ("slime", "slime.rollout", "slime.rollout.filter_hub", "slime.utils"):
            sys.modules[name] = _package(name)
    else:
        if importlib.util.find_spec("slime.rollout.filter_hub") is None:
            sys.modules["slime.rollout.filter_hub"] = _package("slime.rollout.filter_hub")
        found = importlib.util.find_spec("slime.rollout.rm_hub")
        if found is not None:
            rewards.__path__ = list(found.submodule_search_locations or ())
    stand_ins = {
        "slime.rollout.sglang_rollout": sglang_rollout,
        "slime.rollout.rm_hub": rewards,
        "slime.rollout.data_source": data_source,
        "slime.rollout.base_types": base_types,
        "slime.rollout.filter_hub.dynamic_sampling_filters": _module(
            "slime.rollout.filter_hub.dynamic_sampling_filters",
            check_reward_nonzero_std=filters.check_reward_nonzero_std,
        ),
        "slime.utils.types": types,
        "slime.utils.async_utils": _module("slime.utils.async_utils", run=run),
        "slime.utils.http_utils": _module(
            "slime.utils.http_utils", get_rollout_num_engines=sglang_rollout.get_rollout_num_engines
        ),
        "slime.utils.misc": _module("slime.utils.misc", load_function=load_by_path),
    }
    sys.modules |= stand_ins
    # `import slime.utils.types` binds `slime`, and the module is looked up in its packages.
    for name, module in stand_ins.items():
        package, _, own_name = name.rpartition(".")
        setattr(importlib.import_module(package), own_name, module)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop of a background thread, and return its result. Blocks the calling thread."""
    return asyncio.run_coroutine_threadsafe(work, _background_loop()).result()


def load_by_path(path: str) -> Callable[..., Any]:
    """Import the function at `path`, which is written as `module.function`. Raises UserError if that fails."""
    return load_function(path, setting="load_function")


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slime-async-utils", daemon=True).start()
    return loop


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name, f"Names of {name} for users' functions (miles_async/compat/slime/imports.py).")
    vars(module).update(names)
    return module


def _package(name: str) -> ModuleType:
    package = _module(name, __path__=[])
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    return package
