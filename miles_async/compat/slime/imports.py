"""Lets users' modules import the names of slime and Miles from this project (`--slime-imports`).

slime's own fully asynchronous worker then runs unchanged: its file comes from a checkout of slime on `PYTHONPATH`, and
the modules that it imports are these:

    module                    what it has
    rollout.sglang_rollout    sglang_rollout.py
    rollout.rm_hub            rm_hub.py and rewards.py, and a module for each kind of reward
    rollout.data_source       data_source.py
    rollout.base_types        base_types.py
    rollout.filter_hub        filters.py, as base_types and dynamic_sampling_filters
    utils.types               miles_async/types.py, with the attributes of samples.py
    utils.async_utils         async_utils.py
    utils.http_utils          http_utils.py and get_rollout_num_engines
    utils.misc                load_function
    utils.processing_utils    load_tokenizer

They are found below `slime` and below `miles`. Only `miles` has these:

    rollout.base_types                    miles/base_types.py
    rollout.inference_rollout             miles/inference_rollout.py, as inference_rollout_common and _train
    rollout.fully_async_rollout           FullyAsyncRolloutFn
    rollout.generate_hub                  miles/generate_hub.py, as agentic_tool_call, multi_turn and single_turn

Every other module comes from a checkout, including those in its folder `rollout/rm_hub`. So do the other names of the
modules that contain several names of this project.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from miles_async import types
from miles_async.compat.miles import base_types as types_of_miles
from miles_async.compat.miles import generate_hub, inference_rollout
from miles_async.compat.slime import (
    async_utils,
    base_types,
    data_source,
    filters,
    http_utils,
    rewards,
    rm_hub,
    samples,
    sglang_rollout,
)
from miles_async.config.user_functions import load_function
from miles_async.errors import UserError

PROJECTS = ("slime", "miles")


def install_slime_imports() -> None:
    """Let imports of the modules above find this project. Later calls do nothing.

    Without a checkout of a project, its packages hold nothing else. Raises UserError for a package of this name that
    is not a checkout.
    """
    samples.add_names_of_slime()
    for project in PROJECTS:
        if sys.modules.get(f"{project}.rollout.sglang_rollout") is not sglang_rollout:
            _install(project)


def _install(project: str) -> None:
    checkout = importlib.util.find_spec(project)
    if checkout is not None:
        _require_checkout(project, checkout)
    scores = _package(f"{project}.rollout.rm_hub")
    vars(scores).update(
        _names_of(rewards),
        async_rm=rm_hub.async_rm,
        batched_async_rm=rm_hub.batched_async_rm,
        remote_rm=rm_hub.remote_rm,
        compute_score_dapo=rewards.compute_score,
        extract_boxed_answer=rewards.extract_answer,
    )
    names: dict[str, dict[str, Any]] = {
        "rollout.base_types": _names_of(base_types),
        "rollout.filter_hub.base_types": _names_of(filters),
        "rollout.filter_hub.dynamic_sampling_filters": _names_of(filters),
        "utils.types": {"Sample": types.Sample},
        "utils.http_utils": {
            "get": http_utils.get,
            "get_rollout_num_engines": sglang_rollout.get_rollout_num_engines,
            "post": http_utils.post,
        },
        "utils.misc": {"load_function": load_by_path},
        "utils.processing_utils": {"load_tokenizer": load_tokenizer},
    }
    if project == "miles":
        names["rollout.base_types"] = _names_of(types_of_miles)
        folder = "inference_rollout.inference_rollout"
        for path in (f"{folder}_common", f"{folder}_train", "fully_async_rollout"):
            names[f"rollout.{path}"] = _names_of(inference_rollout)
        for name, function in generate_hub.FUNCTIONS.items():
            names[f"rollout.generate_hub.{name}"] = {"generate": function}
    stand_ins: dict[str, ModuleType] = {
        "rollout.sglang_rollout": sglang_rollout,
        "rollout.rm_hub": scores,
        "rollout.data_source": data_source,
        "utils.async_utils": async_utils,
    }
    for name, members in names.items():
        hidden = None if checkout is None else _find(f"{project}.{name}")
        stand_ins[name] = _module(f"{project}.{name}", **members)
        if hidden is not None:
            # Python calls this function for names that the module does not have.
            vars(stand_ins[name])["__getattr__"] = _Hidden(hidden).attribute
    for name in (project, *sorted({f"{project}.{name.rpartition('.')[0]}" for name in stand_ins})):
        if _find(name) is None:
            sys.modules[name] = _package(name)
    if checkout is None:
        for name in ("deepscaler", "f1", "gpqa", "math_dapo_utils", "math_utils"):
            stand_ins[f"rollout.rm_hub.{name}"] = rewards
    elif (found := _find(f"{project}.rollout.rm_hub")) is not None:
        scores.__path__ = list(found.submodule_search_locations or ())
    sys.modules |= {f"{project}.{name}": module for name, module in stand_ins.items()}
    if checkout is not None:
        _add_examples(next(iter(checkout.submodule_search_locations or ())))
    # `import slime.utils.types` binds `slime`, and the module is looked up in its packages.
    for name, module in stand_ins.items():
        owner, _, own_name = f"{project}.{name}".rpartition(".")
        setattr(importlib.import_module(owner), own_name, module)


def load_by_path(path: str | None) -> Callable[..., Any] | None:
    """Import the function at `path`, which is written as `module.function`; None for None, as in Miles.

    Raises UserError if that fails.
    """
    return None if path is None else load_function(path, setting="load_function")


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **options: Any) -> Any:
    """The tokenizer of a checkpoint, of the library transformers, with the chat template of a file if one is named."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path, **options)
    if chat_template_path is not None:
        tokenizer.chat_template = Path(chat_template_path).read_text()
    return tokenizer


class _Hidden:
    """A module of a checkout whose place a stand-in has taken. It is imported when one of its names is needed."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec
        self._module: ModuleType | None = None

    def attribute(self, name: str) -> Any:
        """A name of the module. Raises AttributeError if there is none, and ImportError if its imports fail."""
        # Python looks for names such as `__path__` whenever it imports a module.
        if not (name.startswith("__") and name.endswith("__")):
            if self._module is None:
                module = importlib.util.module_from_spec(self._spec)
                assert self._spec.loader is not None
                self._spec.loader.exec_module(module)
                self._module = module
            if name in vars(self._module):
                return vars(self._module)[name]
        raise AttributeError(f"module {self._spec.name!r} has no attribute {name!r}")


def _require_checkout(project: str, found: ModuleSpec) -> None:
    """Raises UserError if the package with the name of a project lacks the packages that each checkout has."""
    where = next(iter(found.submodule_search_locations or ()), found.origin)
    for package in ("rollout", "utils"):
        if _find(f"{project}.{package}") is None:
            raise UserError(
                f"slime_imports: {where} is not the package of a checkout of {project}, because it has no {package}: "
                f"remove the folder that contains it from PYTHONPATH, or write there the folder that contains "
                f"{project}/{package}"
            )


def _add_examples(package: str) -> None:
    """Let `examples.name` find the examples beside the package of a checkout.

    Scripts name functions in this way, and in the folder of this project Python finds only its own `examples`.
    """
    folder = str(Path(package).parent / "examples")
    found = _find("examples")
    if found is not None and Path(folder).is_dir():
        searched = importlib.import_module("examples").__path__
        if folder not in list(searched):
            searched.append(folder)


def _find(name: str) -> ModuleSpec | None:
    """Where Python finds a module; None if there is none, or if the package that would contain it is a module."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _names_of(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name, f"Names of {name} for users' functions (miles_async/compat/slime/imports.py).")
    vars(module).update(names)
    return module


def _package(name: str) -> ModuleType:
    package = _module(name, __path__=[])
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    return package
