"""Starts the process of an environment (`server.py`), sends it requests, and writes its tasks as a data file.

The libraries of environments need versions of packages that this project does not have, so each has a separate Python
environment. If the process ends, its tasks fail, and the next task starts another process.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import structlog

from miles_async.adapters.environments.server import MAX_LINE_BYTES
from miles_async.adapters.storage.checksum import checksum
from miles_async.atomic_files import atomic_file
from miles_async.config.fields import with_settings
from miles_async.config.prompt_files import environment_split
from miles_async.config.schema import Data, RunConfig
from miles_async.environments import ENVIRONMENTS
from miles_async.errors import InfrastructureError, TrajectoryError, UserError
from miles_async.observability.redacted_log import child_stderr

STOP_SECONDS = 10.0
"""Time that an environment has to release what it holds after the end of its input."""

log = structlog.get_logger(__name__)


def environment_command(data: Data) -> list[str]:
    """The command of the process. Raises UserError if its Python environment does not exist."""
    assert data.environment is not None, "the run has an environment"
    library, _, name = data.environment.partition(":")
    plugin = ENVIRONMENTS.find(library)
    python = Path(data.environment_python or f".venv-{library}/bin/python").expanduser()
    if not python.is_file():
        create = f"create it with `{plugin.setup}`, or " if plugin.setup else ""
        raise UserError(
            f"environment {data.environment}: there is no {python}; {create}set environment_python to a Python that "
            f"has {library}"
        )
    # -P: modules of this folder would hide modules of the environment.
    return [str(python), "-P", str(plugin.program), library, name]


def environment_start(data: Data, key: str = "") -> bytes:
    """The first line of the input. Settings and key may be secret, and every user can read the command of a process."""
    return json.dumps({"settings": data.environment_settings, "key": key}).encode() + b"\n"


def environment_tasks(data: Data, splits: Sequence[str | None] = (None,)) -> list[list[dict[str, Any]]]:
    """Return the first `environment_size` tasks of each split, each with `prompt`, `label` and `task`.

    Raises UserError if the environment cannot be loaded or has no tasks.
    """
    requests = [
        {"id": number, "method": "tasks", "limit": data.environment_size, "split": split}
        for number, split in enumerate(splits, start=1)
    ]
    # What the environment printed comes before the error that this function raises.
    with child_stderr(finish_within=STOP_SECONDS) as output:
        finished = subprocess.run(
            environment_command(data),
            input=environment_start(data) + b"".join(json.dumps(request).encode() + b"\n" for request in requests),
            stdout=PIPE,
            stderr=output,
            check=False,
        )
    # A process that dies while it writes leaves a part of a line at the end.
    *lines, _ = finished.stdout.split(b"\n")
    answers = {answer["id"]: answer for answer in map(json.loads, lines)}
    for answer in answers.values():
        if "error" in answer:
            raise _not_loaded(data, answer["error"])
    found: list[list[dict[str, Any]]] = []
    for request in requests:
        if request["id"] not in answers:
            raise UserError(
                f"environment {data.environment} ended with exit code {finished.returncode}; its output is above"
            )
        found.append(answers[request["id"]]["result"])
        if not found[-1]:
            raise UserError(
                f"environment {data.environment} has no tasks: set environment_settings to those of a data set with "
                "tasks"
            )
    return found


def with_environment_tasks(config: RunConfig) -> RunConfig:
    """Return the configuration with the tasks of `environment` as files, which are written to `cache_dir`.

    They are `prompt_data` if no other data is set, and the data sets that name a split of the environment. So
    shuffling, held-out problems, the warm start and resuming work as for every other file. The configuration is
    returned unchanged if it needs no tasks of an environment.

    Raises UserError if the environment cannot be loaded or has no tasks.
    """
    data, evaluated = config.data, config.rollout.eval_datasets
    own = data.environment is not None and data.prompt_data is None and not data.datasets
    sources = [data.prompt_data or "", *(one.prompt_data for one in data.datasets.values())]
    sources += [one.path for one in evaluated.values()]
    named = [split for source in sources if (split := environment_split(source)) is not None]
    splits: list[str | None] = [*dict.fromkeys([*([None] if own else []), *named])]
    if not splits:
        return config
    log.info(f"reading the tasks of environment {data.environment}")
    read = dict(zip(splits, environment_tasks(data, splits), strict=True))
    module = Path(str(data.environment).partition(":")[2]).stem
    files = {split: _task_file(config, split or module, tasks) for split, tasks in read.items()}

    def path(source: str) -> str:
        split = environment_split(source)
        return source if split is None else f"{files[split]}{source.removeprefix(f'environment:{split}')}"

    keys = {"input_key": "prompt", "label_key": "label", "metadata_key": "metadata"}
    with_tasks = with_settings(
        config,
        prompt_data=files[None] if own else data.prompt_data and path(data.prompt_data),
        datasets={
            name: one.model_copy(update={"prompt_data": path(one.prompt_data), **keys})
            if environment_split(one.prompt_data) is not None
            else one
            for name, one in data.datasets.items()
        },
        eval_datasets={
            name: one.model_copy(update={"path": path(one.path), **keys})
            if environment_split(one.path) is not None
            else one
            for name, one in evaluated.items()
        },
    )
    trained = own or environment_split(data.prompt_data or "") is not None
    return with_settings(with_tasks, **keys) if trained else with_tasks


def _task_file(config: RunConfig, name: str, tasks: Sequence[Mapping[str, Any]]) -> str:
    """Write a file of prompts with these tasks, and return its path."""
    rows = [
        json.dumps({"prompt": task["prompt"], "label": task["label"], "metadata": {"task": task["task"]}}).encode()
        for task in tasks
    ]
    name = re.sub(r"\W+", "-", name)
    file = Path(config.warm_start.cache_dir).expanduser() / "environments" / f"{name}-{checksum(rows)[:12]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary:
        temporary.write_bytes(b"".join(row + b"\n" for row in rows))
    return str(file)


class EnvironmentProcess:
    """Runs tasks in one process, concurrently. It is started by the first task."""

    def __init__(self, data: Data, key: str) -> None:
        """`key` is the API key of the endpoint at which tasks find the model."""
        self._data = data
        self._key = key
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Answers that are awaited, by the number of the request. Number 0 is the start."""
        self._starting = asyncio.Lock()

    async def run(self, task: dict[str, Any], url: str) -> dict[str, Any]:
        """Let the model at the OpenAI base URL `url` do a task; return its `reward` and `metrics`.

        Raises InfrastructureError if a sandbox, a tool server or the process failed, TrajectoryError if the code of
        the environment or a request to the model did, and UserError if the environment cannot be loaded.
        """
        async with self._starting:
            if self._process is None:
                await self._start()
        number = next(self._numbers)
        try:
            answer = await self._request({"id": number, "method": "run", "task": task, "url": url})
        except asyncio.CancelledError:
            self._send({"method": "cancel", "run": number})
            raise
        if (error := answer.get("error")) is None:
            result: dict[str, Any] = answer["result"]
            return result
        what = {"model": "a request to the model", "task": "its code"}.get(error["fault"])
        if what is not None:
            raise TrajectoryError(f"environment {self._data.environment}: {what} failed: {error['message']}")
        raise InfrastructureError(f"environment {self._data.environment} failed: {error['message']}")

    async def close(self) -> None:
        """End the process."""
        if self._process is None or self._process.stdin is None or self._reader is None:
            return
        process, reader = self._process, self._reader
        self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        with suppress(ProcessLookupError):
            process.kill()
        await reader

    async def _start(self) -> None:
        with child_stderr({self._key}) as output:
            self._process = await asyncio.create_subprocess_exec(
                *environment_command(self._data),
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                limit=MAX_LINE_BYTES,
            )
        assert self._process.stdin is not None, "a pipe"
        # A process that has died is noticed when its answers are read.
        with suppress(ConnectionError):
            self._process.stdin.write(environment_start(self._data, self._key))
            await self._process.stdin.drain()
        started = self._expect(0)
        self._reader = asyncio.create_task(self._read(self._process))
        if (error := (await started).get("error")) is not None:
            raise _not_loaded(self._data, error)

    async def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = self._expect(request["id"])
        self._send(request)
        try:
            return await answer
        finally:
            self._answers.pop(request["id"], None)

    def _expect(self, number: int) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        return future

    def _send(self, request: dict[str, Any]) -> None:
        # Without a process the answer is an error already.
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self, process: Process) -> None:
        """Distribute the answers until the process ends; then every request that waits gets an error."""
        assert process.stdout is not None, "a pipe"
        try:
            # A process that dies while it writes leaves a part of a line.
            while (line := await process.stdout.readline()).endswith(b"\n"):
                answer = json.loads(line)
                if (future := self._answers.get(answer["id"])) is not None and not future.done():
                    future.set_result(answer)
        except ValueError:
            # The line has more than `MAX_LINE_BYTES`, or is not an answer.
            with suppress(ProcessLookupError):
                process.kill()
        code = await process.wait()
        self._process = None
        for future in self._answers.values():
            if not future.done():
                message = f"its process ended with exit code {code}; see the log of the rollout worker"
                future.set_result({"error": {"fault": "environment", "message": message}})


def _not_loaded(data: Data, error: dict[str, str]) -> UserError:
    library = str(data.environment).partition(":")[0]
    if error["fault"] == "missing":
        setup = ENVIRONMENTS.find(library).setup
        advice = f"run `{setup}`" if setup else "set environment_python to a Python that has it"
        return UserError(f"environment {data.environment}: {library} is not installed; {advice}")
    return UserError(
        f"environment {data.environment} cannot be loaded ({error['message']}): name a Python file, or a package that "
        f"is installed beside {library}, and check environment_settings"
    )
