"""Builds the configuration of a run from YAML files, flags and dotted overrides; later sources override earlier ones.

Every value keeps its source, so error messages name the file or flag that the user has to change.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from miles_async.config.checks import problems
from miles_async.config.fields import BY_PATH, SECTIONS, SETTINGS, SKIP_ROLES, is_skip_role, nearest, with_settings
from miles_async.config.flags import PASSED_ON, Assignment, Flags, parse_flags
from miles_async.config.generation import schedule_of
from miles_async.config.guest_flags import find_flag, shown
from miles_async.config.hydra import composed
from miles_async.config.losses import objective_of
from miles_async.config.memory import longest_sample
from miles_async.config.presets import like, names, preset, unlike, without_idle
from miles_async.config.prompt_files import count_rows, split_slice
from miles_async.config.redaction import contains_redacted, redacted_setting, redacted_values
from miles_async.config.schema import EvalDataset, Rollout, RunConfig, TrainDataset
from miles_async.config.schema.model import hub_name
from miles_async.config.server_args import current_name
from miles_async.config.translation import project_of, translate
from miles_async.config.untested import loaded_by_name
from miles_async.config.yaml_text import YAMLError, dump_yaml, parse_yaml
from miles_async.errors import UserError, collected, raise_collected
from miles_async.guests import GUESTS
from miles_async.modes.mode import MODES
from miles_async.modes.shipped import Windowed
from miles_async.plugins import errors_of
from miles_async.rewards.plugin import usable_reward
from miles_async.scheduling.bounds import Schedule
from miles_async.transports import TRANSPORTS

Rewarded = TypeVar("Rewarded", Rollout, TrainDataset, EvalDataset)

_SHIPPED_ROLLOUT_FUNCTIONS = "miles_async.rollout"
_ROLLOUT_FUNCTION_PATH = ("rollout", "rollout_function_path")
_NUM_EPOCH = ("rollout", "num_epoch")
_NUM_ROLLOUT = ("rollout", "num_rollout")
_ROLLOUT_NUM_GPUS = ("engine", "rollout_num_gpus")
_WEIGHT_TRANSFER = ("weights", "weight_transfer")
MAX_FILE_BYTES = 16 << 20
"""Largest file of settings, so that a file of data or a device does not fill the memory."""


def load_config(argv: Sequence[str], *, entry: str) -> RunConfig:
    """The resolved and checked configuration of `entry` (`train_async.py` or `train.py`).

    Raises UserError with one line per problem that the checks find without starting the run.
    """
    config, found = checked_config(parse_flags(argv), entry=entry)
    raise_collected(found)
    return config


def config_of_values(flags: Flags) -> tuple[RunConfig, list[str]]:
    """The configuration of everything that is valid for its field, and one sentence for everything else."""
    assignments, found, _ = _assignments_of(flags)
    config, invalid = validated(assignments, flags.notes)
    return _resolve_layout(config, flags.notes), [*found, *invalid]


def checked_config(flags: Flags, *, entry: str) -> tuple[RunConfig, list[str]]:
    """The configuration of everything that is valid, and one sentence for everything else."""
    assignments, found, all_files_read = _assignments_of(flags)
    config, invalid = validated(assignments, flags.notes)
    config = _resolve_layout(config, flags.notes)
    found += invalid
    if all_files_read:
        with collected(found):
            config = _resolve_correction(config, entry)
        checked = without_idle(config, flags.preset) if flags.preset in names() else config
        # The sentence about a key of another project does not name the setting, which has its default instead.
        refused = [one.path[-1] for one in assignments if any(each.startswith(f"{one.source}: ") for each in invalid)]
        found += without_consequences(problems(checked, entry), [*found, *refused])
    if not found:
        with collected(found):
            flags.notes += unlike(config, {assignment.path for assignment in assignments}, flags.preset)
    return config, list(dict.fromkeys(found))


def _assignments_of(flags: Flags) -> tuple[list[Assignment], list[str], bool]:
    """All assignments of a command line, one sentence for everything that is none, and whether all files could be
    read."""
    found, assignments, all_files_read = [*flags.problems], [], True
    if flags.preset is not None:
        with collected(found):
            source = f"--preset {flags.preset}"
            assignments += [
                Assignment(SETTINGS[name].path, value, source) for name, value in preset(flags.preset).items()
            ]
    for path in flags.config_files:
        try:
            assignments += read_assignments(Path(path), found)
        except UserError as error:
            found += str(error).splitlines()
            all_files_read = False
    return [*assignments, *flags.assignments], found, all_files_read


def without_consequences(sentences: Sequence[str], found: Sequence[str]) -> list[str]:
    """`sentences` without those about a setting that has another problem, from which they may only follow."""
    wrong = _settings_in(" ".join(found))
    return [sentence for sentence in sentences if wrong.isdisjoint(_settings_in(sentence))]


def _settings_in(text: str) -> set[str]:
    return SETTINGS.keys() & set(re.findall(r"[a-z]\w*", text.replace("-", "_")))


def validated(assignments: Sequence[Assignment], notes: list[str]) -> tuple[RunConfig, list[str]]:
    """The configuration of all assignments that are valid, and one sentence for each of the others.

    Adds one sentence to `notes` for each valid value that another value takes the place of.
    """
    found = []
    for last in {assignment.path: assignment for assignment in assignments}.values():
        if contains_redacted(last.value):
            found.append(f"{last.source}: a secret was left out of this file when it was written; set the value again")
    values, sources = _merged(assignments)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors()
        # A missing value has no assignment. Its siblings have, and the settings that they fill are invalid together.
        invalid = {_assigned(detail["loc"], sources) or tuple(map(str, detail["loc"][:-1])) for detail in details}
        valid = [each for each in assignments if not any(each.path[: len(path)] == path for path in invalid)]
        config, more = validated(valid, notes)
        return config, [*found, *(_describe(detail, sources) for detail in details), *more]
    config = _resolve_rollout_function(config, named=_ROLLOUT_FUNCTION_PATH in sources)
    config = _resolve_engines(config, named=_ROLLOUT_NUM_GPUS in sources)
    config = _resolve_rewards(config, notes)
    with collected(found):
        config = _resolve_epochs(config, named=_NUM_ROLLOUT in sources)
    if _NUM_ROLLOUT in sources and not sources.get(_NUM_EPOCH, "--preset").startswith("--preset"):
        notes.append(f"num_epoch {config.rollout.num_epoch} has no effect, because num_rollout is set")
    config = _resolve_server_arguments(config, notes)
    for guest in GUESTS.usable().values():
        with collected(found), errors_of(guest, "resolve its settings"):
            resolved = RunConfig.model_validate(guest.resolve(config))
            notes += like(guest, config, resolved)
            config = resolved
    return _resolve_transport(config, sources.get(_WEIGHT_TRANSFER, ""), notes), found


def _merged(assignments: Sequence[Assignment]) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """The values of all settings, in their sections, and the source of each by its path."""
    values: dict[str, Any] = {}
    sources: dict[tuple[str, ...], str] = {}
    for assignment in assignments:
        *parents, name = assignment.path
        section = values
        for parent in parents:
            # `field.key=value` extends the dict of an earlier assignment; the copy keeps that assignment unchanged.
            current = section.get(parent)
            section[parent] = section = dict(current) if isinstance(current, Mapping) else {}
        section[name] = assignment.value
        sources[assignment.path] = assignment.source
    return values, sources


def read_assignments(path: Path, found: list[str]) -> list[Assignment]:
    """The assignments in a file. Adds one sentence per refused key to `found`.

    Raises UserError if the file cannot be read.
    """
    content = _content(path)
    if (project := project_of(content)) is None:
        return _flatten(content, (), path, found)
    outcome = translate(content, project)
    found += [f"{path}: {sentence}" for sentence in outcome.problems]
    return [
        Assignment(tuple(setting.split(".")), translated.value, f"{path}: {translated.key}")
        for setting, translated in outcome.translation.items()
    ]


def translation_table(path: Path) -> str | None:
    """What the file of another project means here, one setting per line and without secrets; None for our own sections.

    `path` is a file that `read_assignments` accepts without a problem.
    """
    content = _content(path)
    if (project := project_of(content)) is None:
        return None
    outcome = translate(content, project)
    lines = [
        f"  {setting} = {redacted_setting(setting, entry.value)}  (from {entry.key})"
        for setting, entry in outcome.translation.items()
    ]
    lines += [f"  {key} {why}" for key, why in outcome.idle.items()]
    return "\n".join([f"{path} has the keys of {project}, which mean:", *lines])


def _content(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise UserError(f"--config {path} has more than {MAX_FILE_BYTES} bytes: set it to a YAML file of settings")
        content = parse_yaml(text.decode())
    except FileNotFoundError:
        raise UserError(f"--config {path}: no such file") from None
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}: set it to a YAML file of settings") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text in UTF-8: save it as UTF-8") from None
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, Mapping):
        raise UserError(f"{path}: expected sections such as `rollout:`, got {type(content).__name__}")
    # Other projects include files with Hydra.
    return composed(content, path) if content and "defaults" in content and project_of(content) else content or {}


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, without secrets.

    Loading the file gives an equal configuration, or is refused until the secrets are set again.
    """
    path.write_text(dump_yaml(redacted_values(config)))


def _flatten(section: Mapping[str, Any], prefix: tuple[str, ...], file: Path, unknown: list[str]) -> list[Assignment]:
    assignments = []
    for key, value in section.items():
        path = (*prefix, str(key))
        dotted = ".".join(path)
        if dotted in SECTIONS:
            if value is not None and not isinstance(value, Mapping):
                unknown.append(f"{file}: {dotted} is a section, but its value is {value!r:.80}; put settings below it")
            else:
                assignments += _flatten(value or {}, path, file, unknown)
        elif path in BY_PATH:
            assignments.append(Assignment(path, value, f"{file}: {dotted}"))
        elif isinstance(value, Mapping) and is_skip_role(path):
            assignments.append(Assignment((*SKIP_ROLES, *path[1:]), value, f"{file}: {dotted}"))
        else:
            # The name may have blanks that look like those of an indentation.
            shown = dotted if dotted.isprintable() else repr(dotted)
            unknown.append(f"{file}: unknown key {shown}{_hint(path) or '; --help lists all settings'}")
    return assignments


def _hint(path: tuple[str, ...]) -> str:
    """The correct path if the setting exists in another section, the flag of the file or of the key, the place of an
    argument that is passed on, or the most similar name."""
    if (setting := SETTINGS.get(path[-1])) is not None:
        return f"; write it as {setting.dotted}"
    if len(path) == 1 and find_flag(f"{path[0]}_config") is not None:
        return f"; pass a file that begins with {path[0]}: as --{path[0]}-config"
    if len(path) == 1 and (found := find_flag(path[0])) is not None:
        return f"; it is a flag of {found[0]}: pass {shown(path[0])} on the command line"
    siblings = {known[-1] for known in BY_PATH if known[:-1] == path[:-1]}
    sections = {section.rpartition(".")[2] for section in SECTIONS if section.split(".")[:-1] == list(path[:-1])}
    prefix = next((prefix for prefix in PASSED_ON if path[-1].startswith(prefix)), None)
    if prefix is not None and not nearest(path[-1], list(SETTINGS), cutoff=0.85):
        return f"; write it as {PASSED_ON[prefix].dotted}.{path[-1].removeprefix(prefix)}"
    return nearest(path[-1], [*siblings, *sections]) or nearest(path[-1], list(SETTINGS), cutoff=0.75)


def _describe(detail: Any, sources: Mapping[tuple[str, ...], str]) -> str:
    location, given = detail["loc"], detail["input"]
    known = len(_assigned(location, sources))
    # Behind the path of the assignment, the location is that of an element of a list or a dict.
    within = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[known or 1 :])
    where = sources.get(_assigned(location, sources), location[0]) + within
    text = detail["msg"].removeprefix("Value error, ")
    message = _EXPECTED.get(detail["type"], text[0].lower() + text[1:])
    if detail["type"] == "string_type" and isinstance(given, int | float):
        message += " in quotes"
    return f"{where}: {message}, got {given!r:.80}"


_EXPECTED = {
    "dict_type": "input should be names with their values, such as {name: value}",
    "extra_forbidden": "unknown setting: remove it, or correct its name",
    "list_type": "input should be a list, such as [value, value]",
    "missing": "a value is missing: add it",
    "model_type": "input should be settings with their values, such as {setting: value}",
    "too_long": "input should have fewer values",
    "string_pattern_mismatch": "input should have only letters, digits, underscores, hyphens and dots",
    "string_unicode": "input should be a text in UTF-8",
    "tuple_type": "input should be a list, such as [value, value]",
}
"""Messages in place of pydantic's, by the type of the error."""


def _assigned(location: Sequence[str | int], sources: Mapping[tuple[str, ...], str]) -> tuple[str, ...]:
    """The path of the assignment with a value at this location; empty if none is so long, as for a missing value."""
    path = tuple(str(part) for part in location)
    return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in sources), ())


def _resolve_rollout_function(config: RunConfig, *, named: bool) -> RunConfig:
    """The configuration with the full path of the rollout function.

    `windowed_fifo_ratio` selects the windowed function unless the user names one (`named`). The name of a rollout mode
    refers to the function that the mode names. A short path such as `fully_async_rollout.generate_rollout_fully_async`
    refers to `miles_async.rollout`, unless the user has a module of that name. An unknown name is kept; importing the
    function reports the error.
    """
    path = config.rollout.rollout_function_path
    module = path.partition(".")[0]
    if not named and config.rollout.windowed_fifo_ratio is not None:
        resolved = Windowed.function
    elif module == path and path in (usable := MODES.usable()):
        resolved = usable[path].function
    elif not _module_exists(module) and _module_exists(f"{_SHIPPED_ROLLOUT_FUNCTIONS}.{module}"):
        resolved = f"{_SHIPPED_ROLLOUT_FUNCTIONS}.{path}"
    else:
        return config
    return with_settings(config, rollout_function_path=resolved)


def _resolve_correction(config: RunConfig, entry: str) -> RunConfig:
    """The configuration with an off-policy correction if generation and training overlap, unless it is set, or the
    importance ratio of the objective already begins at the policy that sampled.

    Raises UserError if the policy objective cannot be used.
    """
    algorithm = config.algorithm
    if algorithm.off_policy_correction is not None or config.learner.loss_type != "policy_loss":
        return config
    overlap = schedule_of(config, entry) is not Schedule.SYNCHRONOUS
    corrects = objective_of(algorithm).corrects or algorithm.use_rollout_logprobs
    correction = "tis" if overlap and not corrects else "none"
    return with_settings(config, off_policy_correction=correction)


def _resolve_engines(config: RunConfig, *, named: bool) -> RunConfig:
    """The configuration with engines on all devices of the learner if they share devices, unless their number is set
    (`named`)."""
    if not config.cluster.colocate or named:
        return config
    return with_settings(config, rollout_num_gpus=config.learner.ranks)


def _resolve_layout(config: RunConfig, notes: list[str]) -> RunConfig:
    """The configuration with micro-batches that hold the longest sample, and sequence parallelism only where there is
    tensor parallelism, as in Megatron-LM."""
    learner = config.learner
    if learner.sequence_parallel and learner.tensor_model_parallel_size == 1:
        notes.append("sequence_parallel has no effect, because tensor_model_parallel_size is 1")
        config = with_settings(config, sequence_parallel=False)
    longest, fits = longest_sample(config), config.learner.micro_batch_tokens
    if longest > fits:
        tokens = config.learner.least_tokens_per_gpu(longest)
        notes.append(
            f"a sample may have {longest} tokens (rollout_max_prompt_len + rollout_max_response_len), so "
            f"max_tokens_per_gpu is {tokens} instead of {learner.max_tokens_per_gpu}"
        )
        config = with_settings(config, max_tokens_per_gpu=tokens)
    return config


def _resolve_server_arguments(config: RunConfig, notes: list[str]) -> RunConfig:
    """The configuration with SGLang's arguments under the names that the installed version has, and without a tensor
    parallelism that says what rollout_num_gpus_per_engine says."""
    given = dict(config.engine.sglang_server_args)
    for name in ("tp_size", "tensor_parallel_size"):
        if given.get(name) == config.engine.rollout_num_gpus_per_engine:
            del given[name]
    renamed = {name: current_name(name) for name in given if current_name(name) != name}
    if not renamed and len(given) == len(config.engine.sglang_server_args):
        return config
    notes += [f"--sglang-{old} is {new} in the installed SGLang".replace("_", "-") for old, new in renamed.items()]
    arguments = {renamed.get(name, name): value for name, value in given.items()}
    return with_settings(config, sglang_server_args=arguments)


def _resolve_transport(config: RunConfig, source: str, notes: list[str]) -> RunConfig:
    """The configuration with a transport that the engines can use, if a flag or file of another project chose another
    one. What `source` sets under our own name stays, and is refused."""
    wanted = config.weights.weight_transfer
    if wanted is None or re.search("weight.transfer$", source) or wanted not in (usable := TRANSPORTS.usable()):
        return config
    instead: str | None = None
    if config.learner.lora_rank:
        why: str | None = "engines load adapters from files"
    elif (why := loaded_by_name(config)) is not None and not usable[wanted].uses_loader:
        instead = "disk" if wanted == "disk_delta" else "broadcast"
    else:
        return config
    change = "has no effect" if instead is None else f"{wanted} is {instead} here"
    notes.append(f"{source} {change}, because {why}")
    return with_settings(config, weight_transfer=instead)


def _resolve_epochs(config: RunConfig, *, named: bool) -> RunConfig:
    """The configuration with the number of batches in `num_epoch` passes over the prompts, unless it is set (`named`).

    Each pass is rounded down to whole batches, as in slime and verl, unless a batch is larger than the data.

    Raises UserError if the rows of the prompts cannot be counted.
    """
    epochs, prompts = config.rollout.num_epoch, config.data.prompt_data
    if epochs is None or named:
        return config
    if prompts is None or hub_name(prompts) is not None:
        raise UserError("num_epoch needs the number of prompts, which only a file in prompt_data has: set num_rollout")
    if not Path(split_slice(prompts)[0]).expanduser().is_file():
        return config  # it is reported elsewhere
    rows, batch = count_rows(prompts), config.rollout.rollout_batch_size
    rollouts = epochs * (rows // batch) if rows >= batch else max(1, epochs * rows // batch)
    return with_settings(config, num_rollout=rollouts)


def _resolve_rewards(config: RunConfig, notes: list[str]) -> RunConfig:
    """The configuration without built-in rewards where a function scores, as in slime, and with the key of the reward
    that is trained on, if the reward is a dictionary."""
    rollout = _scored_once(config.rollout, "", notes)
    config = with_settings(
        config,
        rm_type=rollout.rm_type,
        datasets={name: _scored_once(one, f"datasets.{name}.", notes) for name, one in config.data.datasets.items()},
        eval_datasets={
            name: _scored_once(one, f"eval_datasets.{name}.", notes) for name, one in rollout.eval_datasets.items()
        },
    )
    reward = usable_reward(rollout.rm_type)
    if rollout.reward_key is not None or reward is None or not reward.keys:
        return config
    return with_settings(config, reward_key=reward.keys[0])


def _scored_once(settings: Rewarded, name: str, notes: list[str]) -> Rewarded:
    """Settings of the run or of a data set, whose names begin with `name`."""
    if settings.rm_type is None or settings.custom_rm_path is None:
        return settings
    notes.append(f"{name}rm_type {settings.rm_type} has no effect, because {name}custom_rm_path is set")
    return settings.model_copy(update={"rm_type": None})


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # an empty name, or `__main__`, which has no spec in a program that was started as a file
        return module in sys.modules
