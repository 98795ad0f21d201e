"""`--check-config`: the settings, and the files that they name."""

from __future__ import annotations

from miles_async.config.schema import RunConfig
from miles_async.config.table import TableRow


def read_files(config: RunConfig, full: bool) -> list[TableRow]:
    """What the files of a run contain, see `check_files`. Imports nothing if the settings name no files."""
    if not (full or config.data.prompt_data or config.rollout.eval_datasets or config.learner.load):
        return []
    from .check_files import check_files

    return check_files(config, full=full)
