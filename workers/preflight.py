"""What can be found wrong before any process starts: data, rewards and user functions. Takes a second or two."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from miles_async.adapters.datasets.evaluation import eval_groups
from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.storage.checkpoints import CheckpointFolder, progress_in
from miles_async.config.derived import FULLY_ASYNC_FUNCTION, schedule_of, trains_only
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import TrajectoryError, UserError
from miles_async.rewards.factory import open_rewarder
from miles_async.rollout.contract import Arguments, flat_args
from miles_async.rollout.generate import load_generate_function
from miles_async.scheduling.bounds import Schedule
from miles_async.skip import SkipManager, SkipWorld
from miles_async.types import Group, Verdict

from .batches import saved_batch

BATCH_FUNCTION = "miles_async.rollout.sglang_rollout.generate_rollout"
WARM_START_LESSONS = 8192
WARM_START_CHECKS = 512
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty frame of HTTP/2; the fourth byte is its kind."""
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS


@dataclass(frozen=True, kw_only=True)
class SftExamples:
    """What the warm start learns from and is checked on: prompts and their answers. Empty where there is none."""

    problems: list[tuple[str, str]]
    check: list[tuple[str, str]]


def preflight(config: RunConfig, entry: str) -> SftExamples:
    """Open and import once what the run will use. Raises UserError with the first thing that does not work."""
    args = flat_args(config)
    if config.model.hf_checkpoint is not None:
        whole_checkpoint(Path(config.model.hf_checkpoint).expanduser())
    checkpoint_to_resume(config)
    reachable_ray(config.cluster.ray_address)
    unused_port("agent_port", config.rollout.agent_port)
    unused_port("metrics_port", config.observability.metrics_port)
    rollout_function(config, entry)
    dynamic_filter(config, args)
    for setting, path in (
        ("over_sampling_filter_path", config.rollout.over_sampling_filter_path),
        ("rollout_sample_filter_path", config.rollout.rollout_sample_filter_path),
    ):
        if path is not None:
            load_function(path, setting=setting, plain=True)
    if trains_only(config):
        saved_batch(config, 0)
    if config.rollout.custom_generate_function_path is not None:
        load_generate_function(config.rollout.custom_generate_function_path)
    if config.rollout.eval_function_path is not None:
        load_function(config.rollout.eval_function_path, setting="eval_function_path")
    for name, dataset in config.rollout.eval_datasets.items():
        eval_groups(config, name, dataset, checkpoint=config.model.hf_checkpoint)
    # Data before rewards: of an unknown task it says which known one is near.
    data = open_data(config, checkpoint=config.model.hf_checkpoint)
    open_rewarder(config, args)
    # After the user's modules, which may register roles of their own.
    SkipManager(SkipWorld(config=config))
    if not config.warm_start.warm_start_max_steps:
        return SftExamples(problems=[], check=[])
    template = config.warm_start.warm_start_template
    problems = data.warm_start_problems()
    pairs = ((template.replace("{prompt}", str(sample.prompt)), str(sample.label)) for sample in problems)
    return SftExamples(check=list(islice(pairs, WARM_START_CHECKS)), problems=list(islice(pairs, WARM_START_LESSONS)))


def whole_checkpoint(folder: Path) -> None:
    """Raises UserError when weights are missing or cut off; reads only their headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"hf_checkpoint {folder} holds no *.safetensors: the learner reads no other weights")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"hf_checkpoint {folder}: {file.name} is broken: {error}; copy it anew") from error


def reachable_ray(address: str | None, within: float = 5.0) -> None:
    """Raises UserError when no Ray listens there; Ray would try for minutes. `auto` and the like name no place.

    Ray speaks gRPC, and so answers the greeting of HTTP/2 with a frame of its settings (RFC 9113, 3.4), unless it wants
    TLS first.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        with socket.create_connection((host, int(port)), timeout=within) as connection:
            connection.sendall(HTTP2_GREETING)
            answer = connection.recv(len(HTTP2_SETTINGS))
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at ray_address {address} ({error}): start one with `ray start --head`, or unset it"
        ) from error
    if answer[3:4] != HTTP2_SETTINGS[3:4] and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise UserError(
            f"what answers at ray_address {address} is no Ray cluster: give the port of `ray start --head`, 6379 "
            "unless it was told another one (8265 is its dashboard's)"
        )


def unused_port(setting: str, port: int) -> None:
    """Raises UserError where somebody listens there already; this run's driver or rollout worker will."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason, flag = os.strerror(error.errno or 0), setting.replace("_", "-")
        raise UserError(f"{setting} {port} cannot be had ({reason}): set --{flag} to a free port, or to 0") from error


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """The newest checkpoint in `load`. Raises UserError when there is none, or nothing is left to do after it."""
    if config.learner.load is None:
        return None
    checkpoint = CheckpointFolder(Path(config.learner.load).expanduser().absolute()).latest()
    done = progress_in(checkpoint)["rollout"] + 1
    if done >= config.rollout.num_rollout:
        raise UserError(
            f"checkpoint {checkpoint} was written after {done} rollouts, and num_rollout is "
            f"{config.rollout.num_rollout}: raise num_rollout to go on"
        )
    return checkpoint


def rollout_function(config: RunConfig, entry: str) -> Callable[..., Any]:
    """train.py takes turns whatever the function: the persistent producer makes way for the batch function."""
    path = config.rollout.rollout_function_path
    if schedule_of(config, entry) is Schedule.SYNCHRONOUS and path == FULLY_ASYNC_FUNCTION:
        path = BATCH_FUNCTION
    return load_function(path, setting="rollout_function_path")


def dynamic_filter(config: RunConfig, args: Arguments) -> Callable[[Group], bool | Verdict]:
    """The dynamic sampling filter; without one every finished group is kept."""
    path = config.rollout.dynamic_sampling_filter_path
    if path is None:
        return lambda group: True
    function = load_function(path, setting="dynamic_sampling_filter_path", plain=True)

    def keep(group: Group) -> bool | Verdict:
        try:
            verdict = function(args, group)
            return verdict if isinstance(verdict, Verdict) else bool(verdict)
        except Exception as error:
            # The user's code may raise anything; it is this group that cannot be judged.
            raise TrajectoryError(f"group {group.feed_index}: filter {path} raised {error!r}") from error

    return keep
