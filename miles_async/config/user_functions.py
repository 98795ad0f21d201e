"""Imports user functions, which settings name as `module.function`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from miles_async.config.fields import values_of
from miles_async.config.schema import Dataset, RunConfig
from miles_async.errors import UserError, collected, raise_collected
from miles_async.guests import GUESTS
from miles_async.json_values import shown_error

_ROLLOUT = "args, rollout_id, data_source, evaluation=False"


class Form(NamedTuple):
    """How the run calls the function that a setting names."""

    parameters: str
    may_be_async: bool = False
    """Whether the run awaits what the function returns."""
    may_yield: bool = False
    """Whether the function may yield what it returns."""
    must_be_async: bool = False
    """Whether the function has to be defined with `async def`."""
    offered: tuple[str, ...] = ()
    """Keyword arguments that the run adds if the function takes them."""


FORMS = {
    "buffer_filter_path": Form("args, rollout_id, buffer, num_samples", may_yield=True),
    "custom_advantage_function_path": Form("args, rollout_data"),
    "custom_agent_function_path": Form("*, base_url, prompt, request_kwargs, metadata", must_be_async=True),
    "custom_convert_samples_to_train_data_path": Form("args, samples"),
    "custom_eval_rollout_log_function_path": Form("rollout_id, args, data, extra_metrics"),
    "custom_generate_function_path": Form("args, sample, sampling_params", must_be_async=True, offered=("evaluation",)),
    "custom_loss_function_path": Form("args, tokens"),
    "custom_megatron_before_log_prob_hook_path": Form("args, model, store_prefix"),
    "custom_megatron_before_train_step_hook_path": Form(
        "args, rollout_id, step_id, model, optimizer, opt_param_scheduler"
    ),
    "custom_megatron_init_path": Form("args"),
    "custom_pg_loss_reducer_function_path": Form(
        "total_lengths, response_lengths, loss_masks, calculate_per_token_loss"
    ),
    "custom_reward_post_process_path": Form("args, samples"),
    "custom_rm_path": Form("args, sample", may_be_async=True),
    "custom_rollout_log_function_path": Form("rollout_id, args, samples, rollout_extra_metrics, rollout_time"),
    "custom_tis_function_path": Form(
        "*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths"
    ),
    "dataset_sampling": Form("args, datasets"),
    "data_source_path": Form("args"),
    "dynamic_sampling_filter_path": Form("args, group"),
    "eval_function_path": Form(_ROLLOUT, may_be_async=True),
    "generate_execute_tool_function_path": Form("name, params", must_be_async=True),
    "over_sampling_filter_path": Form("args, groups", may_yield=True),
    "rollout_all_samples_process_path": Form("args, all_groups, data_source"),
    "rollout_data_postprocess_path": Form("args, rollout_id, rollout_data"),
    "rollout_function_path": Form(_ROLLOUT, may_be_async=True),
    "rollout_sample_filter_path": Form("args, groups"),
    "rollout_sample_hook_path": Form("args, sample", may_be_async=True, offered=("rollout_id", "evaluation")),
    "warm_start_examples_path": Form("sample", may_yield=True),
}
"""By setting. With group_rm, a reward gets the samples of a group instead of one sample."""
OBJECTS = ("generate_tool_specs_path",)
"""Settings that name objects that are not called."""
LOGITS_PARAMETERS = "args, batch, logits, sum_of_sample_mean"
"""The parameters of slime's form of a loss, which gets the logits of a micro-batch."""


def install_guests(settings: Mapping[str, Any]) -> None:
    """Let modules of users import modules of guests. Call it before modules of users are imported.

    `settings` are the values of all settings by name. Raises UserError if a user's guest fails.
    """
    GUESTS.ask("install its modules", lambda guest: guest.install_modules(settings))


def check_functions(config: RunConfig) -> None:
    """Import everything that a setting names. Raises UserError with a sentence for each that the run cannot use.

    The modules of this project are only read: importing them would load NumPy and other libraries, which takes seconds.
    """
    settings = values_of(config)
    install_guests(settings)
    settings["dataset_sampling"] = config.data.sampling_function
    named = [(setting, path) for setting in FORMS for path in _paths(settings[setting])]
    sets: dict[str, Dataset] = {f"eval_datasets.{name}": each for name, each in config.rollout.eval_datasets.items()}
    for name, dataset in config.data.datasets.items():
        sets[f"datasets.{name}"] = dataset
        setting = f"datasets.{name}.dynamic_sampling_filter_path"
        named += [(setting, path) for path in _paths(dataset.dynamic_sampling_filter_path)]
    for name, each in sets.items():
        named += [(f"{name}.custom_rm_path", path) for path in _paths(each.custom_rm_path)]
    problems: list[str] = []
    for setting, path in named:
        if not is_defined_here(path):
            with collected(problems):
                load_function(path, setting=setting)
    for setting in OBJECTS:
        for path in _paths(settings[setting]):
            with collected(problems):
                load_named(path, setting=setting)
    raise_collected(problems)


def _paths(value: str | list[str] | None) -> list[str]:
    """The functions that a setting names."""
    return value if isinstance(value, list) else [] if value is None else [value]


def is_defined_here(path: str) -> bool:
    """Whether a module of this project defines or imports the function."""
    module_path, _, name = path.rpartition(".")
    if not module_path.startswith("miles_async."):
        return False
    try:
        spec = importlib.util.find_spec(module_path)
    except ModuleNotFoundError:
        return False
    if spec is None or spec.origin is None:
        return False
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return True
    return False


def load_function(path: str, *, setting: str) -> Callable[..., Any]:
    """Import the function at `path`, which is written as `module.function`.

    `setting` is the setting that holds the path: its function has the form in `FORMS`, or a form of a guest.
    Raises UserError as `load_named`, and if the run cannot call the function in this way.
    """
    function = load_named(path, setting=setting)
    if not callable(function):
        raise UserError(f"{setting} {path!r} is a {type(function).__name__}, not a function: name one")
    name, kind = f"{setting} {path!r}", setting.rpartition(".")[2]
    if kind in FORMS:
        adapted = GUESTS.ask("adapt a function", lambda guest: guest.adapt_function(function, name, kind))
        function = next(filter(None, adapted.values()), function)
    _check_form(function, name, kind)
    return function  # type: ignore[no-any-return]


def load_named(path: str, *, setting: str) -> Any:
    """Import the object at `path`, which is written as `module.name`. `setting` is the setting that holds the path.

    Raises UserError if the module does not exist or fails to import, or has no such object.
    """
    kind = "object" if setting in OBJECTS else "function"
    module_path, _, name = path.rpartition(".")
    if not all(path.split(".")) or not module_path or re.search(r"[/:\\]", path):
        raise UserError(f"{setting} {path!r} names no {kind} of a module: write module.{kind}")
    if module_path == "__main__":
        raise UserError(
            f"{setting} {path!r}: __main__ is another program in each process of the run; put the {kind} in a module"
        )
    module = _import(module_path, f"{setting} {path!r} cannot be imported")
    if not hasattr(module, name):
        public = [other for other, value in vars(module).items() if callable(value) or setting in OBJECTS]
        near = get_close_matches(name, public, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"{setting} {path!r}: module {module.__name__} has no {kind} {name!r}{hint}")
    return getattr(module, name)


def _check_form(function: Callable[..., Any], name: str, setting: str) -> None:
    """Raises UserError if the run cannot call a function as it calls those of `setting`. `name` begins the sentence."""
    form, is_async = FORMS.get(setting), inspect.iscoroutinefunction(function)
    if form is None:
        return
    if is_async and not (form.may_be_async or form.must_be_async):
        raise UserError(f"{name} is async: write it with a plain def, because it is not awaited")
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if yields and not form.may_yield:
        raise UserError(f"{name} yields its results: write a function that returns them")
    if form.must_be_async and not is_async:
        raise UserError(f"{name} is not an async function: define it with async def")
    # A class is not called itself if processes create an object of it (`custom_rm_isolated`).
    if isinstance(function, type):
        return
    try:
        # A decorator may pass other arguments than it gets, so what it wraps does not count.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a callable without a signature, such as one written in C
        return
    error = _binding_error(signature, form.parameters, _taken(signature, form.offered))
    if error is None or (setting == "custom_loss_function_path" and takes_logits(function)):
        return
    forms = f"fn({form.parameters})"
    if setting == "custom_loss_function_path":
        forms += f" or fn({LOGITS_PARAMETERS})"
    raise UserError(f"{name} has the signature {signature} ({error}): write {forms}")


def with_keywords(function: Callable[..., Any], offered: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with those of the `offered` keyword arguments that it takes, as slime calls it."""
    try:
        taken = _taken(inspect.signature(function), offered)
    except (TypeError, ValueError):  # a callable without a signature, such as one written in C
        return function
    return partial(function, **{name: offered[name] for name in taken})


def _taken(signature: inspect.Signature, offered: Iterable[str]) -> list[str]:
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return [name for name in offered if takes_all or name in signature.parameters]


def takes_logits(function: Callable[..., Any]) -> bool:
    """Whether a loss has slime's form."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return False
    return _binding_error(signature, LOGITS_PARAMETERS) is None


def _binding_error(signature: inspect.Signature, parameters: str, added: Sequence[str] = ()) -> TypeError | None:
    """Why a function with this signature cannot be called with `parameters` and `added` keywords; None if it can."""
    by_position, _, by_name = parameters.rpartition("*, ") if "*, " in parameters else (parameters, "", "")
    names = by_position.split(", ") if by_position else []
    positional = [one for one in names if "=" not in one]
    keywords = [one.partition("=")[0] for one in names if "=" in one] + (by_name.split(", ") if by_name else [])
    keywords += added
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return error
    return None


def _import(module_path: str, problem: str) -> ModuleType:
    try:
        return importlib.import_module(module_path)
    except BaseException as error:
        # Importing runs user code, which can raise any exception. A module that ends the process is not a function.
        raise UserError(f"{problem}: {shown_error(error)}; {_advice(error)}") from error


def _advice(error: BaseException) -> str:
    match error:
        case ModuleNotFoundError():
            return "install it, or add its folder to PYTHONPATH"
        case Exception():
            return "change the module so that Python can import it"
        case _:
            return 'put what the module does as a program below `if __name__ == "__main__":`'
