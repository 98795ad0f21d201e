"""The tasks of an environment as a data file, written before the run starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import structlog

from miles_async.adapters.environments.process import environment_tasks
from miles_async.adapters.storage.checksum import checksum
from miles_async.atomic_files import atomic_file
from miles_async.config.fields import with_settings
from miles_async.config.schema import RunConfig

log = structlog.get_logger(__name__)


def with_environment_tasks(config: RunConfig) -> RunConfig:
    """Return the configuration with the tasks of `environment` as `prompt_data`, which are written to `cache_dir`.

    So shuffling, held-out problems, the warm start and resuming work as for every other file. The configuration is
    returned unchanged if the run has no environment, or if `prompt_data` is set.

    Raises UserError if the environment cannot be loaded or has no tasks.
    """
    data = config.data
    if data.environment is None or data.prompt_data is not None:
        return config
    log.info(f"reading the tasks of environment {data.environment}")
    rows = [
        json.dumps({"prompt": task["prompt"], "label": task["label"], "metadata": {"task": task["task"]}}).encode()
        for task in environment_tasks(data)
    ]
    name = re.sub(r"\W+", "-", Path(data.environment.partition(":")[2]).stem)
    file = Path(config.warm_start.cache_dir).expanduser() / "environments" / f"{name}-{checksum(rows)[:12]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary:
        temporary.write_bytes(b"".join(row + b"\n" for row in rows))
    return with_settings(config, prompt_data=str(file), input_key="prompt", label_key="label", metadata_key="metadata")
