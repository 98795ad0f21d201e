"""Builds the configuration of a run from YAML files, flags and dotted overrides; later sources override earlier ones.

Every value keeps its source, so error messages name the file or flag that the user has to change.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_async.config.checks import problems
from miles_async.config.derived import WINDOWED_FUNCTION, learner_ranks
from miles_async.config.fields import BY_PATH, SECTIONS, SETTINGS, SKIP_ROLES, is_skip_role, nearest
from miles_async.config.flags import Assignment, parse_flags
from miles_async.config.redaction import contains_redacted, redacted, redacted_values
from miles_async.config.schema import RunConfig
from miles_async.config.translators import Project, project_of, translate
from miles_async.config.translators.rules import Translation
from miles_async.config.yaml_text import YAMLError, dump_yaml, parse_yaml
from miles_async.errors import UserError
from miles_async.rewards.registry import reward_type

_SHIPPED_ROLLOUT_FUNCTIONS = "miles_async.rollout"
_ROLLOUT_FUNCTION_PATH = ("rollout", "rollout_function_path")
_ROLLOUT_NUM_GPUS = ("engine", "rollout_num_gpus")


def load_config(argv: Sequence[str], *, entry: str) -> RunConfig:
    """The resolved and checked configuration of `entry` (`train_async.py` or `train.py`).

    Raises UserError with one line per problem that the checks find without starting the run.
    """
    flags = parse_flags(argv)
    config = build([*(a for path in flags.config_files for a in read_yaml(Path(path))), *flags.assignments])
    if found := problems(config, entry):
        raise UserError("\n".join(found))
    return config


def build(assignments: Sequence[Assignment]) -> RunConfig:
    """A configuration from assignments, of which later ones override earlier ones.

    Raises UserError with one line per value that is invalid for its field.
    """
    values: dict[str, Any] = {}
    sources: dict[tuple[str, ...], str] = {}
    for last in {assignment.path: assignment for assignment in assignments}.values():
        if contains_redacted(last.value):
            raise UserError(
                f"{last.source}: a secret was left out of this file when it was written; set the value again"
            )
    for assignment in assignments:
        *parents, name = assignment.path
        section = values
        for parent in parents:
            # `field.key=value` extends the dict of an earlier assignment; the copy keeps that assignment unchanged.
            current = section.get(parent)
            section[parent] = section = dict(current) if isinstance(current, Mapping) else {}
        section[name] = assignment.value
        sources[assignment.path] = assignment.source
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_describe(detail, sources) for detail in error.errors())) from None
    config = _resolve_rollout_function(config, named=_ROLLOUT_FUNCTION_PATH in sources)
    config = _resolve_engines(config, named=_ROLLOUT_NUM_GPUS in sources)
    return _resolve_skip(_resolve_reward_key(config))


def read_yaml(path: Path) -> list[Assignment]:
    """The assignments in one YAML file, which may be a file of ROLL or verl.

    Raises UserError with the file and the key if the file is invalid.
    """
    try:
        content = parse_yaml(path.read_text())
    except FileNotFoundError:
        raise UserError(f"--config {path}: no such file") from None
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, Mapping):
        raise UserError(f"{path}: expected sections such as `rollout:`, got {type(content).__name__}")
    content = content or {}
    if (project := project_of(content)) is None:
        return _flatten(content, (), path)
    return [
        Assignment(tuple(setting.split(".")), translated.value, f"{path}: {translated.key}")
        for setting, translated in _translated(content, project, path).items()
    ]


def translation_table(path: Path) -> str | None:
    """What the file of another project means here, one setting per line and without secrets; None for our own sections.

    `path` is a file that `read_yaml` accepts.
    """
    content = parse_yaml(path.read_text()) or {}
    if (project := project_of(content)) is None:
        return None
    settings = _translated(content, project, path)
    lines = [f"  {setting} = {redacted(entry.value)}  (from {entry.key})" for setting, entry in settings.items()]
    return "\n".join([f"{path} has the keys of {project}, which mean:", *lines])


def _translated(content: Mapping[str, Any], project: Project, path: Path) -> Translation:
    try:
        return translate(content, project)
    except UserError as error:
        raise UserError("\n".join(f"{path}: {sentence}" for sentence in str(error).splitlines())) from None


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, without secrets.

    Loading the file gives an equal configuration, or is refused until the secrets are set again.
    """
    path.write_text(dump_yaml(redacted_values(config)))


def _flatten(section: Mapping[str, Any], prefix: tuple[str, ...], file: Path) -> list[Assignment]:
    assignments = []
    for key, value in section.items():
        path = (*prefix, str(key))
        dotted = ".".join(path)
        if dotted in SECTIONS:
            if value is not None and not isinstance(value, Mapping):
                raise UserError(f"{file}: {dotted} is a section, but its value is {value!r}; put settings below it")
            assignments += _flatten(value or {}, path, file)
        elif path in BY_PATH:
            assignments.append(Assignment(path, value, f"{file}: {dotted}"))
        elif isinstance(value, Mapping) and is_skip_role(path):
            assignments.append(Assignment((*SKIP_ROLES, *path[1:]), value, f"{file}: {dotted}"))
        else:
            raise UserError(f"{file}: unknown key {dotted}{_hint(path)}")
    return assignments


def _hint(path: tuple[str, ...]) -> str:
    """The correct path if the setting exists in another section, otherwise the most similar name."""
    if (setting := SETTINGS.get(path[-1])) is not None:
        return f"; write it as {setting.dotted}"
    siblings = {known[-1] for known in BY_PATH if known[:-1] == path[:-1]}
    sections = {section.rpartition(".")[2] for section in SECTIONS if section.split(".")[:-1] == list(path[:-1])}
    return nearest(path[-1], [*siblings, *sections]) or nearest(path[-1], list(SETTINGS))


def _describe(detail: Any, sources: Mapping[tuple[str, ...], str]) -> str:
    location = tuple(str(part) for part in detail["loc"])
    # An invalid element of a list or a dict is reported with the assignment of the whole value.
    source = next((sources[location[:n]] for n in range(len(location), 0, -1) if location[:n] in sources), None)
    # Every field has a default, so only an element of a tuple can be missing.
    text = detail["msg"].removeprefix("Value error, ")
    message = "a value is missing" if detail["type"] == "missing" else text[0].lower() + text[1:]
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        message += " in quotes"
    return f"{source or '.'.join(location)}: {message}, got {detail['input']!r}"


def _resolve_rollout_function(config: RunConfig, *, named: bool) -> RunConfig:
    """The configuration with the full path of the rollout function.

    `windowed_fifo_ratio` selects the windowed function unless the user names one (`named`). A short name such as
    `fully_async_rollout.generate_rollout_fully_async` refers to `miles_async.rollout`, unless the user has a module of
    that name. An unknown name is kept; importing the function reports the error.
    """
    path = config.rollout.rollout_function_path
    module = path.partition(".")[0]
    if not named and config.rollout.windowed_fifo_ratio is not None:
        resolved = WINDOWED_FUNCTION
    elif not _module_exists(module) and _module_exists(f"{_SHIPPED_ROLLOUT_FUNCTIONS}.{module}"):
        resolved = f"{_SHIPPED_ROLLOUT_FUNCTIONS}.{path}"
    else:
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"rollout_function_path": resolved})})


def _resolve_engines(config: RunConfig, *, named: bool) -> RunConfig:
    """The configuration with engines on all devices of the learner if they share devices, unless their number is set
    (`named`)."""
    if not config.cluster.colocate or named:
        return config
    engine = config.engine.model_copy(update={"rollout_num_gpus": learner_ranks(config)})
    return config.model_copy(update={"engine": engine})


def _resolve_reward_key(config: RunConfig) -> RunConfig:
    """The configuration with the key of the reward that is trained on, if the built-in reward is a dictionary."""
    rollout = config.rollout
    kind = reward_type(rollout.rm_type)
    if rollout.reward_key is not None or kind is None or not kind.keys:
        return config
    return config.model_copy(update={"rollout": rollout.model_copy(update={"reward_key": kind.keys[0]})})


def _resolve_skip(config: RunConfig) -> RunConfig:
    """Translate the deprecated `skip_rollout`: enable both skip roles at every step, unless one is enabled already."""
    if not config.rollout.skip_rollout:
        return config
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


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # an empty name, or `__main__`, which has no spec in a program that was started as a file
        return module in sys.modules
