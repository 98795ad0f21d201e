"""Checks that run before any process starts: data, rewards, user functions, checkpoints and ports.

The checks take one to two seconds, instead of the minute that it takes to start all processes. A large checkpoint to
resume from takes longer, because its checksums are compared.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from miles_async.adapters.datasets.factory import eval_groups, open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.checkpoints import CheckpointFolder
from miles_async.adapters.storage.warm_starts import Example
from miles_async.batching.layout import longest_sequence
from miles_async.columns.column import SampleLimits
from miles_async.config.generation import trains_only
from miles_async.config.model_shape import model_type_of
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import check_functions, load_function
from miles_async.errors import UserError, collected, raise_collected
from miles_async.guests import GUESTS
from miles_async.json_values import shown
from miles_async.parsing import decode_json
from miles_async.plugins import errors_of
from miles_async.rewards.factory import RunRewards
from miles_async.rollout.contract import flat_args
from miles_async.rollout.recordings import check_recordings
from miles_async.types import Sample
from miles_async.user_code import USER_CODE_ERRORS

from .beginning import Beginning, beginning_of
from .check_files import check_prompts
from .functions import saved_batch
from .specs import external_router_key

WARM_START_EXAMPLES = 8192
"""Problems that a warm start trains on."""
WARM_START_CHECKS = 512
"""Problems that measure the accuracy of a warm start."""
WEIGHT_INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, in a checkpoint of several files."""
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty SETTINGS frame of HTTP/2; the fourth byte is the type of a frame."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS


@dataclass(frozen=True, kw_only=True)
class PreflightResult:
    """What the checks have read and the run needs again."""

    beginning: Beginning
    problems: list[Example] = field(default_factory=list)
    """Supervised examples that a warm start trains on; empty without a warm start."""
    check: list[Example] = field(default_factory=list)
    """Supervised examples that measure the accuracy of a warm start."""


def preflight(config: RunConfig) -> PreflightResult:
    """Open all files and import all functions that the run will use.

    Raises UserError with a sentence per problem. Checks that depend on one that failed are left out.
    """
    problems: list[str] = []
    for check in _independent_checks(config):
        with collected(problems):
            check()
    beginning = Beginning()
    with collected(problems):
        beginning = beginning_of(config)
    functions: list[str] = []
    with collected(functions):
        check_functions(config)
    problems += functions
    data = _check_data(config, problems)
    if data is not None and beginning.position is not None:
        with collected(problems):
            data.seek(beginning.position)
    if not functions:
        with collected(problems):
            rewards = RunRewards(config, flat_args(config))
            for dataset in config.rollout.eval_datasets.values():
                rewards.of(dataset)
        with collected(problems):
            check_recordings(config)
        for guest in GUESTS.usable().values():
            with collected(problems), errors_of(guest, "check the run"):
                guest.check(config)
    checked = PreflightResult(beginning=beginning)
    if data is not None and not functions and config.warm_start.warm_start_max_steps:
        with collected(problems):
            checked = _with_examples(checked, config, data)
    raise_collected(problems)
    return checked


def _independent_checks(config: RunConfig) -> Iterator[Callable[[], object]]:
    """Yield checks whose results nothing else needs."""
    if config.model.hf_checkpoint is not None:
        yield partial(check_weights, Path(config.model.hf_checkpoint).expanduser())
    for setting, directory in (("store_dir", config.cluster.store_dir), ("run_dir", config.observability.run_dir)):
        if directory is not None:
            yield partial(check_writable, setting, Path(directory).expanduser().absolute())
    yield partial(check_ray, config.cluster.ray_address)
    yield partial(external_router_key, config)
    if config.engine.sglang_router_ip is None and config.engine.sglang_router_port is not None:
        yield partial(check_port, "sglang_router_port", config.engine.sglang_router_port)
    yield partial(check_port, "agent_port", config.rollout.agent_port)
    yield partial(check_port, "metrics_port", config.observability.metrics_port)
    if trains_only(config):
        limits = SampleLimits(longest=longest_sequence(config.learner), sampling_masks=config.trains_on_sampling_masks)
        yield partial(saved_batch, config, 0, limits)


def _check_data(config: RunConfig, problems: list[str]) -> BufferedSource | None:
    """Open all data. Returns that for training; None if it cannot be used. Adds what is wrong to `problems`."""
    checkpoint, tokenizer = config.model.hf_checkpoint, None
    if checkpoint is not None:
        with collected(problems):
            tokenizer = CheckpointTokenizer.of_run(config.data, checkpoint)
        if tokenizer is None:
            return None
    for name, dataset in config.rollout.eval_datasets.items():
        with collected(problems):
            eval_groups(config, name, dataset, tokenizer=tokenizer)
    with collected(problems):
        data = open_data(config, tokenizer=tokenizer)
        check_prompts(config, data, tokenizer)
        return data
    return None


def _with_examples(checked: PreflightResult, config: RunConfig, data: BufferedSource) -> PreflightResult:
    """Add the examples of the warm start."""
    template, path = config.warm_start.warm_start_template, config.warm_start.warm_start_examples_path

    def labelled(sample: Sample) -> list[Example]:
        prompt, label = sample.prompt, str(sample.label)
        if isinstance(prompt, str):
            return [Example(template.replace("{prompt}", prompt), label)]
        if template != "{prompt}":
            raise UserError(
                "warm_start_template is a template for texts, and the prompts of the data are lists of messages: unset "
                "it, so that the chat template renders them"
            )
        return [Example(prompt, label, sample.metadata.get("tools"))]

    function = labelled if path is None else load_function(path, setting="warm_start_examples_path")
    examples = chain.from_iterable(_examples(path, function, sample) for sample in data.warm_start_problems())
    # Both lists come from one iterator, so no problem is used for training and for the check.
    check = list(islice(examples, WARM_START_CHECKS))
    return replace(checked, check=check, problems=list(islice(examples, WARM_START_EXAMPLES)))


def _examples(path: str | None, function: Callable[[Sample], Any], sample: Sample) -> list[Example]:
    """Call the function at `path`. Raises UserError unless it returns a list of prompts with answers."""
    try:
        returned = function(sample)
        returned = returned if isinstance(returned, str) else list(returned)
    except UserError:
        raise
    except USER_CODE_ERRORS as error:
        raise UserError(f"warm_start_examples_path {path} raised {shown(error)}: change the function") from error
    match returned:
        case [*examples] if all(_is_example(example) for example in examples):
            return [Example(*example) for example in examples]
        case _:
            raise UserError(
                f"warm_start_examples_path {path} returned {returned!r:.80}: return a list of pairs (prompt, answer)"
            )


def _is_example(value: Any) -> bool:
    match value:
        case [str() | [{"role": _}, *_], str()] | [str() | [{"role": _}, *_], str(), list() | None]:
            return True
        case _:
            return False


def check_weights(folder: Path) -> None:
    """Raises UserError if the model has no type, the folder lacks safetensors files, or one of them is truncated.

    Reads only the headers of the files.
    """
    if model_type_of(str(folder)) is None:
        raise UserError(
            f"hf_checkpoint {folder}: config.json has no model_type; set it to the type of the model, such as qwen3"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"hf_checkpoint {folder} holds no *.safetensors: save the model in this format, because the learner reads "
            "no other"
        )
    if missing := _files_of_index(folder) - {file.name for file in files}:
        raise UserError(
            f"hf_checkpoint {folder}: {min(missing)}, which {WEIGHT_INDEX} names, is missing; copy the checkpoint again"
        )
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"hf_checkpoint {folder}: {file.name} is broken: {error}; copy the file again") from error


def _files_of_index(folder: Path) -> set[str]:
    """The files that the index of a checkpoint names. Raises UserError if the index is not valid."""
    index = folder / WEIGHT_INDEX
    if not index.is_file():
        return set()
    try:
        return set(decode_json(index.read_bytes(), _Index).weight_map.values())
    except ValueError as error:
        raise UserError(f"hf_checkpoint {folder}: {WEIGHT_INDEX} is broken ({error}); copy it again") from error


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_ray(address: str | None, within: float = 5.0) -> None:
    """Raises UserError if no Ray head node answers at `address` `within` so many seconds.

    Ray itself would try for minutes. An address without a port, such as `auto`, is not checked.

    Ray uses gRPC, which is based on HTTP/2. A server answers the connection preface of HTTP/2 with a SETTINGS frame
    (RFC 9113, section 3.4), unless it expects TLS.
    """
    # Ray installs no gRPC client for Python, and its own check needs seconds to import Ray.
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        with socket.create_connection((host, int(port)), timeout=within) as connection:
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(len(HTTP2_SETTINGS))
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at ray_address {address} ({error}): start one with `ray start --head`, or unset it"
        ) from error
    if answer[3:4] != HTTP2_SETTINGS[3:4] and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise UserError(
            f"ray_address {address} is not the address of a Ray head node: set the port of `ray start --head`, 6379 by "
            "default (8265 is the port of the dashboard)"
        )


def check_port(setting: str, port: int) -> None:
    """Raises UserError if the port is in use: the driver or the rollout worker of this run will listen on it."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason, flag = os.strerror(error.errno or 0), setting.replace("_", "-")
        raise UserError(
            f"{setting} {port} is not available ({reason}): set --{flag} to a free port, or unset it"
        ) from error


def check_writable(setting: str, folder: Path) -> None:
    """Raises UserError if files cannot be created in the folder, or the folder itself cannot be created."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        flag = setting.replace("_", "-")
        raise UserError(
            f"{setting} {folder} is not writable: set --{flag} to a folder that is, or change the permissions of "
            f"{existing}"
        )


def lock_checkpoints(config: RunConfig) -> AbstractContextManager[None]:
    """Return a block inside which no other run writes to the folder `save`.

    Entering it raises UserError if another run writes to the folder. Raises UserError if the folder is not writable. A
    run without a learner writes no checkpoints.
    """
    folder = config.learner.save_folder
    if folder is None or config.debug.debug_rollout_only:
        return nullcontext()
    check_writable("save", folder)
    return CheckpointFolder(folder).lock()
