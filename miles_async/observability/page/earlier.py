"""Earlier runs of the same configuration, with which the live page and the report compare a run.

Two runs have the same configuration if `configuration_id` is equal, which leaves out seeds, names and output folders.
The runs are found through the `summary.json` of the folders beside the run's own, which is written when a run ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec

from miles_async.config.redaction import redacted_values
from miles_async.config.schema import RunConfig
from miles_async.events import RunStarted

MAX_RUNS = 20
"""Most earlier runs that are compared: the newest ones."""
MAX_FOLDERS = 500
"""Most folders that are read, the last ones by name. Names of run folders begin with the time."""
MAX_SUMMARY_BYTES = 1 << 20
"""Larger files are not summaries. A summary has a few kilobytes."""

_IRRELEVANT = {"data": ("rollout_seed",), "learner": ("seed", "save", "save_hf")}
"""Settings that two runs of the same configuration may differ in, besides the section `observability`."""


def configuration_id(config: RunConfig, entry: str) -> str:
    """Return the same text for two runs that differ only in seeds, names, output folders and observability settings."""
    settings = redacted_values(config)
    del settings["observability"]
    for section, names in _IRRELEVANT.items():
        for name in names:
            del settings[section][name]
    return sha256(entry.encode() + msgspec.json.encode(settings, order="sorted")).hexdigest()[:16]


class EarlierRun(msgspec.Struct, kw_only=True):
    """The values of a `summary.json` that are compared; see `summarize` for their meaning."""

    run: str
    configuration: str
    started: Annotated[datetime, msgspec.Meta(tz=True)]
    reason: str
    rollouts: int
    wall_seconds: float
    groups_per_second: float | None
    accuracy_before: float | None
    accuracy_before_interval: tuple[float, float] | None
    accuracy_after: float | None
    accuracy_after_interval: tuple[float, float] | None
    batches_per_reward: Annotated[int, msgspec.Meta(ge=1)]
    rewards: list[float | None]


def earlier_runs(run: RunStarted | None, folder: Path | None) -> list[EarlierRun]:
    """Return the newest runs beside `folder` with the configuration of `run` that began before it, newest first.

    Folders whose summary is missing, damaged or of another version are skipped, and so are runs without a batch.
    Nothing is found for a run that has not started (None).
    """
    if run is None or folder is None:
        return []
    try:
        names = sorted((path for path in folder.resolve().parent.iterdir() if not path.is_symlink()), reverse=True)
    except OSError:
        return []
    runs = (_read(path / "summary.json") for path in names[:MAX_FOLDERS])
    earlier = [
        each
        for each in runs
        if each is not None
        and each.configuration == run.configuration
        and each.rollouts
        and each.started.timestamp() < run.time
        and each.run != run.run
    ]
    return sorted(earlier, key=lambda each: each.started, reverse=True)[:MAX_RUNS]


def comparison(runs: Sequence[EarlierRun]) -> dict[str, Any] | None:
    """Return what page and report show of earlier runs, as plain values for JSON; None without an earlier run.

    `runs` are the runs without their rewards. `spread` has [lowest, median, highest] of each value that is known for
    at least one run. `figures` is the band of the rewards over batches, in the form of `Timeline.figures`.
    """
    if not runs:
        return None
    rows = [msgspec.structs.asdict(run) for run in runs]
    for row in rows:
        del row["rewards"]
    compared = ("accuracy_before", "accuracy_after", "wall_seconds", "groups_per_second")
    known = {name: [row[name] for row in rows if row[name] is not None] for name in compared}
    return {
        "runs": rows,
        "spread": {name: [min(values), median(values), max(values)] for name, values in known.items() if values},
        "figures": _band(runs),
    }


def _band(runs: Sequence[EarlierRun]) -> dict[str, Any]:
    """Return lowest, median (as `mean`) and highest reward of the runs that trained each batch."""
    width = max(run.batches_per_reward for run in runs)
    curves = [_coarsened(run.rewards, max(1, width // run.batches_per_reward)) for run in runs]
    band: dict[str, list[float | None]] = {"low": [], "mean": [], "high": []}
    for index in range(max(map(len, curves))):
        values = [value for curve in curves if index < len(curve) and (value := curve[index]) is not None]
        band["low"].append(min(values, default=None))
        band["mean"].append(median(values) if values else None)
        band["high"].append(max(values, default=None))
    return {"start": 0, "width": width, "series": {"earlier": band}}


def _coarsened(values: Sequence[float | None], step: int) -> list[float | None]:
    """Replace each `step` values by the mean of those that are not None."""
    return [_mean(values[start : start + step]) for start in range(0, len(values), step)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _read(path: Path) -> EarlierRun | None:
    """Return the summary in a file, or None if the file holds none."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_SUMMARY_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=EarlierRun)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
