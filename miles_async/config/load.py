"""One run's configuration from YAML files, flags and dotted overrides, in that order of precedence.

Every value remembers where it came from, so that a complaint names the file or the flag that a person can change.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from miles_async.config.checks import problems
from miles_async.config.derived import WINDOWED_FUNCTION
from miles_async.config.fields import BY_PATH, SECTIONS, SETTINGS, nearest
from miles_async.config.flags import Assignment, parse_flags
from miles_async.config.schema import RunConfig
from miles_async.config.yaml_text import parse_yaml
from miles_async.errors import UserError

SHIPPED_ROLLOUT_FUNCTIONS = "miles_async.rollout"
ROLLOUT_FUNCTION_PATH = ("rollout", "rollout_function_path")


def load_config(argv: Sequence[str], *, entry: str) -> RunConfig:
    """The resolved configuration of `entry` (`train_async.py` or `train.py`).

    Raises UserError with one sentence per line: everything that is wrong, as far as it can be told without starting.
    """
    flags = parse_flags(argv)
    config = build([*(a for path in flags.config_files for a in read_yaml(Path(path))), *flags.assignments])
    if found := problems(config, entry):
        raise UserError("\n".join(found))
    return config


def build(assignments: Sequence[Assignment]) -> RunConfig:
    """Later assignments win. Raises UserError with every value that does not fit its field."""
    values: dict[str, Any] = {}
    sources: dict[tuple[str, ...], str] = {}
    for assignment in assignments:
        *parents, name = assignment.path
        section = values
        for parent in parents:
            # `field.key=value` extends a dict that an earlier assignment gave; the copy leaves that one as it was.
            given = section.get(parent)
            section[parent] = section = dict(given) if isinstance(given, Mapping) else {}
        section[name] = assignment.value
        sources[assignment.path] = assignment.source
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(detail, sources) for detail in error.errors())) from None
    return _resolve_skip(_resolve_rollout_function(config, named=ROLLOUT_FUNCTION_PATH in sources))


def read_yaml(path: Path) -> list[Assignment]:
    """The settings of one file. Raises UserError naming file and key path."""
    try:
        content = parse_yaml(path.read_text())
    except FileNotFoundError:
        raise UserError(f"--config {path}: no such file") from None
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, Mapping):
        raise UserError(f"{path}: expected sections such as `rollout:`, got a {type(content).__name__}")
    return _flatten(content or {}, (), path)


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration; loading the file gives an equal one."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _flatten(section: Mapping[str, Any], prefix: tuple[str, ...], file: Path) -> list[Assignment]:
    assignments = []
    for key, value in section.items():
        path = (*prefix, str(key))
        dotted = ".".join(path)
        if dotted in SECTIONS:
            if value is not None and not isinstance(value, Mapping):
                raise UserError(f"{file}: {dotted} is a section, but holds {value!r}; write its settings below it")
            assignments += _flatten(value or {}, path, file)
        elif path in BY_PATH:
            assignments.append(Assignment(path, value, f"{file}: {dotted}"))
        else:
            raise UserError(f"{file}: unknown key {dotted}{_where(path)}")
    return assignments


def _where(path: tuple[str, ...]) -> str:
    """The place of a known setting that stands in the wrong section, else the nearest name."""
    if (setting := SETTINGS.get(path[-1])) is not None:
        return f"; write it as {setting.dotted}"
    siblings = {place[-1] for place in BY_PATH if place[:-1] == path[:-1]}
    sections = {section.rpartition(".")[2] for section in SECTIONS if section.split(".")[:-1] == list(path[:-1])}
    return nearest(path[-1], [*siblings, *sections]) or nearest(path[-1], list(SETTINGS))


def _sentence(detail: Any, sources: Mapping[tuple[str, ...], str]) -> str:
    location = tuple(str(part) for part in detail["loc"])
    # A value inside a list or a dict is blamed on the assignment of the whole.
    source = next((sources[location[:n]] for n in range(len(location), 0, -1) if location[:n] in sources), None)
    # Only a tuple can lack a part: every field has a default.
    message = "a value is missing" if detail["type"] == "missing" else detail["msg"][0].lower() + detail["msg"][1:]
    return f"{source or '.'.join(location)}: {message}, got {detail['input']!r}"


def _resolve_rollout_function(config: RunConfig, *, named: bool) -> RunConfig:
    """A ratio selects the windowed function unless another is named (seed `windowed-fifo`).

    A short name such as `fully_async_rollout.generate_rollout_fully_async` is ours unless the user has such a module;
    a name that neither has stays as it was written, for the message that says so.
    """
    path = config.rollout.rollout_function_path
    module = path.partition(".")[0]
    if not named and config.rollout.windowed_fifo_ratio is not None:
        resolved = WINDOWED_FUNCTION
    elif not _exists(module) and _exists(f"{SHIPPED_ROLLOUT_FUNCTIONS}.{module}"):
        resolved = f"{SHIPPED_ROLLOUT_FUNCTIONS}.{path}"
    else:
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"rollout_function_path": resolved})})


def _resolve_skip(config: RunConfig) -> RunConfig:
    """The legacy switch gives way to a role that is enabled; alone, it enables both on every step."""
    if not config.rollout.skip_rollout:
        return config
    skip = config.skip
    if skip.rollout.enable or skip.async_rollout.enable:
        text = "--skip-rollout is deprecated and has no effect beside skip.rollout or skip.async_rollout; remove it"
        update: dict[str, Any] = {}
    else:
        text = "--skip-rollout is deprecated: set skip.rollout.enable or skip.async_rollout.enable, and its steps"
        every: dict[str, Any] = {"enable": True, "steps": ["0-"]}
        roles = {"rollout": skip.rollout, "async_rollout": skip.async_rollout}
        update = {"skip": skip.model_copy(update={name: role.model_copy(update=every) for name, role in roles.items()})}
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    update["rollout"] = config.rollout.model_copy(update={"skip_rollout": False})
    return config.model_copy(update=update)


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
