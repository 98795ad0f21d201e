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

They are found below `slime` and below `miles`. Every other module comes from a checkout, including those in its folder
`rollout/rm_hub`. So do the other names of the modules below `utils` and `filter_hub` and of `base_types`.
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
        {name: getattr(rewards, name) for name in rewards.__all__},
        async_rm=rm_hub.async_rm,
        batched_async_rm=rm_hub.batched_async_rm,
        remote_rm=rm_hub.remote_rm,
        compute_score_dapo=rewards.compute_score,
        extract_boxed_answer=rewards.extract_answer,
    )
    filter_names = {name: getattr(filters, name) for name in filters.__all__}
    names: dict[str, dict[str, Any]] = {
        "rollout.base_types": {name: getattr(base_types, name) for name in base_types.__all__},
        "rollout.filter_hub.base_types": filter_names,
        "rollout.filter_hub.dynamic_sampling_filters": filter_names,
        "utils.types": {"Sample": types.Sample},
        "utils.http_utils": {
            "get": http_utils.get,
            "get_rollout_num_engines": sglang_rollout.get_rollout_num_engines,
            "post": http_utils.post,
        },
        "utils.misc": {"load_function": load_by_path},
        "utils.processing_utils": {"load_tokenizer": load_tokenizer},
    }
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
    if checkout is None:
        for package in ("", ".rollout", ".rollout.filter_hub", ".utils"):
            sys.modules[project + package] = _package(project + package)
        for name in ("deepscaler", "f1", "gpqa", "math_dapo_utils", "math_utils"):
            stand_ins[f"rollout.rm_hub.{name}"] = rewards
    else:
        if _find(f"{project}.rollout.filter_hub") is None:
            sys.modules[f"{project}.rollout.filter_hub"] = _package(f"{project}.rollout.filter_hub")
        found = _find(f"{project}.rollout.rm_hub")
        if found is not None:
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


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name, f"Names of {name} for users' functions (miles_async/compat/slime/imports.py).")
    vars(module).update(names)
    return module


def _package(name: str) -> ModuleType:
    package = _module(name, __path__=[])
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    return package
