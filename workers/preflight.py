"""Checks that run before any process starts: data, rewards, user functions, checkpoints and ports.

The checks take one to two seconds, instead of the minute that it takes to start all processes. A large checkpoint to
resume from takes longer, because its checksums are compared.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import structlog
from safetensors import SafetensorError, safe_open

from miles_async.adapters.datasets.factory import eval_groups, open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.checkpoints import CheckpointFolder, LoadedCheckpoint, read_progress
from miles_async.adapters.storage.warm_starts import Example
from miles_async.batching.layout import longest_sequence
from miles_async.config.derived import (
    FULLY_ASYNC_FUNCTION,
    GREEDY_FUNCTION,
    save_folder,
    schedule_of,
    trains_on_sampling_masks,
    trains_only,
)
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import install_slime_imports, load_function
from miles_async.errors import TrajectoryError, UserError
from miles_async.observability.run_folder import RunFolder
from miles_async.rewards.factory import RunRewards
from miles_async.rollout.contract import Arguments, flat_args
from miles_async.rollout.generate import load_generate_function
from miles_async.sample_schema import SampleLimits
from miles_async.scheduling.bounds import Schedule
from miles_async.skip import SkipContext, SkipManager
from miles_async.types import Group, Sample, Verdict

from .batches import saved_batch
from .continuation import unfinished_run
from .specs import external_router_key

WARM_START_EXAMPLES = 8192
"""Problems that a warm start trains on."""
WARM_START_CHECKS = 512
"""Problems that measure the accuracy of a warm start."""
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty SETTINGS frame of HTTP/2; the fourth byte is the type of a frame."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SftExamples:
    """The supervised examples of the warm start; empty without a warm start."""

    problems: list[Example]
    """Examples to train on."""
    check: list[Example]
    """Examples to measure the accuracy on."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the checks have read and the run needs again."""

    sft_examples: SftExamples
    continues: RunFolder | None
    """The folder of the run that `--resume auto` continues."""
    began_with: LoadedCheckpoint | None
    """The checkpoint of another run that this one begins with, or began with; None if that is the model."""
    starts_from: LoadedCheckpoint | None
    """The checkpoint that the learner starts from: `began_with`, or a later one of this run."""


def preflight(config: RunConfig, entry: str) -> Checked:
    """Open all files and import all functions that the run will use. Raises UserError for the first problem."""
    if config.rollout.slime_imports:
        install_slime_imports()
    args = flat_args(config)
    if config.model.hf_checkpoint is not None:
        check_weights(Path(config.model.hf_checkpoint).expanduser())
    began_with = checkpoint_to_resume(config)
    continuation = None if config.learner.resume is None else unfinished_run(config)
    for setting, directory in (("store_dir", config.cluster.store_dir), ("run_dir", config.observability.run_dir)):
        if directory is not None:
            check_writable(setting, Path(directory).expanduser().absolute())
    check_ray(config.cluster.ray_address)
    external_router_key(config)
    check_port("agent_port", config.rollout.agent_port)
    check_port("metrics_port", config.observability.metrics_port)
    rollout_function(config, entry)
    dynamic_filter(config, args)
    for setting, path in (
        ("over_sampling_filter_path", config.rollout.over_sampling_filter_path),
        ("rollout_sample_filter_path", config.rollout.rollout_sample_filter_path),
    ):
        if path is not None:
            load_function(path, setting=setting, plain=True)
    if trains_only(config):
        saved_batch(
            config,
            0,
            SampleLimits(longest=longest_sequence(config.learner), sampling_masks=trains_on_sampling_masks(config)),
        )
    if config.rollout.custom_generate_function_path is not None:
        load_generate_function(config.rollout.custom_generate_function_path)
    if config.rollout.eval_function_path is not None:
        load_function(config.rollout.eval_function_path, setting="eval_function_path")
    checkpoint = config.model.hf_checkpoint
    tokenizer = None if checkpoint is None else CheckpointTokenizer.of_run(config.data, checkpoint)
    for name, dataset in config.rollout.eval_datasets.items():
        eval_groups(config, name, dataset, tokenizer=tokenizer)
    # Data before rewards: for an unknown reasoning-gym task, the error of the data source suggests a similar name.
    data = open_data(config, tokenizer=tokenizer)
    if continuation is not None:
        data.seek(continuation.position)
    elif began_with is not None:
        data.seek(read_progress(began_with.folder)["data"])
    rewards = RunRewards(config, args)
    for dataset in config.rollout.eval_datasets.values():
        rewards.of(dataset)
    # Last, because the user modules imported above may register skip roles.
    SkipManager(config, SkipContext())
    sft_examples = _sft_examples(config, data)
    if continuation is None:
        return Checked(sft_examples=sft_examples, continues=None, began_with=began_with, starts_from=began_with)
    return Checked(
        sft_examples=sft_examples,
        continues=continuation.folder,
        began_with=continuation.began_with,
        starts_from=continuation.starts_from,
    )


def _sft_examples(config: RunConfig, data: BufferedSource) -> SftExamples:
    if not config.warm_start.warm_start_max_steps:
        return SftExamples(problems=[], check=[])
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

    function = labelled if path is None else load_function(path, setting="warm_start_examples_path", plain=True)
    examples = chain.from_iterable(_examples(path, function(sample)) for sample in data.warm_start_problems())
    # Both lists come from one iterator, so no problem is used for training and for the check.
    check = list(islice(examples, WARM_START_CHECKS))
    return SftExamples(check=check, problems=list(islice(examples, WARM_START_EXAMPLES)))


def _examples(path: str | None, returned: Any) -> list[Example]:
    """Read what the function at `path` returned. Raises UserError unless it is a list of prompts with answers."""
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
    """Raises UserError if the folder has no safetensors files, or one of them is truncated. Reads only file headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"hf_checkpoint {folder} holds no *.safetensors: the learner reads no other format")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"hf_checkpoint {folder}: {file.name} is broken: {error}; copy the file again") from error


def check_ray(address: str | None, within: float = 5.0) -> None:
    """Raises UserError if no Ray head node answers at `address` `within` so many seconds.

    Ray itself would try for minutes. An address without a port, such as `auto`, is not checked.

    Ray uses gRPC, which is based on HTTP/2. A server answers the connection preface of HTTP/2 with a SETTINGS frame
    (RFC 9113, section 3.4), unless it expects TLS.
    """
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
            f"{setting} {port} is not available ({reason}): set --{flag} to a free port, or to 0"
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
    folder = save_folder(config)
    if folder is None or config.debug.debug_rollout_only:
        return nullcontext()
    check_writable("save", folder)
    return CheckpointFolder(folder).lock()


def checkpoint_to_resume(config: RunConfig) -> LoadedCheckpoint | None:
    """Return the newest intact checkpoint in the folder `load`; None if `load` is unset or the folder is empty.

    Reads the whole checkpoint to compare its checksums. The log names newer checkpoints that are damaged, and says that
    the folder is empty. Raises UserError if the folder is missing, or holds files but no intact checkpoint, or if the
    checkpoint was written after the last rollout.
    """
    if config.learner.load is None:
        return None
    folder = Path(config.learner.load).expanduser().absolute()
    checkpoints = CheckpointFolder(folder, checksums=config.learner.checkpoint_checksums)
    if checkpoints.is_empty():
        log.info("the folder of load is empty, so the run starts from the beginning", load=str(folder))
        return None
    checkpoint = checkpoints.latest()
    for sentence in checkpoint.damage:
        log.warning(f"{sentence}; resuming from an older checkpoint", checkpoint=checkpoint.folder.name)
    done = checkpoint.rollout + 1
    if done >= config.rollout.num_rollout:
        raise UserError(
            f"checkpoint {checkpoint.folder} was written after {done} rollouts, and num_rollout is "
            f"{config.rollout.num_rollout}: raise num_rollout to continue"
        )
    return checkpoint


def rollout_function(config: RunConfig, entry: str) -> Callable[..., Any]:
    """Import the rollout function. Raises UserError if that fails, or if the function has another signature.

    Without the fully asynchronous schedule there is no stream to drain, so the batch function replaces
    `fully_async_rollout`.
    """
    path = config.rollout.rollout_function_path
    if schedule_of(config, entry) is not Schedule.FULLY_ASYNC and path == FULLY_ASYNC_FUNCTION:
        path = GREEDY_FUNCTION
    function = load_function(path, setting="rollout_function_path")
    check_signature(function, f"rollout_function_path {path!r}")
    return function


def check_signature(function: Callable[..., Any], name: str) -> None:
    """Raises UserError if a rollout function cannot be called as the run calls it. `name` begins the sentence."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature, such as one written in C
        return
    try:
        signature.bind("args", 0, "data_source", evaluation=False)
    except TypeError as error:
        raise UserError(
            f"{name} has the signature {signature} ({error}): write fn(args, rollout_id, data_source, evaluation=False)"
        ) from None


def dynamic_filter(config: RunConfig, args: Arguments) -> Callable[[Group], Verdict]:
    """Return the dynamic sampling filter; without one, every generated group is kept.

    Raises UserError if the filter cannot be imported. The returned function raises TrajectoryError if the filter
    raises, and UserError if the filter returns neither a bool nor a verdict.
    """
    path = config.rollout.dynamic_sampling_filter_path
    if path is None:
        return lambda group: Verdict(True)
    function = load_function(path, setting="dynamic_sampling_filter_path", plain=True)

    def keep(group: Group) -> Verdict:
        try:
            returned = function(args, group)
        except Exception as error:
            # User code can raise any exception. The group counts as failed; the run continues.
            raise TrajectoryError(f"group {group.feed_index}: filter {path} raised {error!r}") from error
        try:
            return Verdict.of(returned)
        except TypeError as error:
            raise UserError(
                f"dynamic_sampling_filter_path {path} returned {error}: return True to keep the group or False to drop "
                "it, or Verdict(keep, reason) of miles_async.types"
            ) from None

    return keep
