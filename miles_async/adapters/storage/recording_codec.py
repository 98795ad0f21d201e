"""The file format of a recording: the samples as arrays (`sample_arrays.py`), everything else as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from safetensors import safe_open

from miles_async.adapters.storage.sample_arrays import SampleArrays, SampleHeader, read_samples
from miles_async.parsing import parse
from miles_async.recording import GroupRecord, Recording


class _GroupHeader(Struct):
    """The JSON of a group."""

    feed_index: str
    prompt: str
    version: int
    seconds: Annotated[float, Meta(ge=0)]
    samples: list[SampleHeader]


class _Header(Struct):
    """The JSON of a recording."""

    seconds: Annotated[float, Meta(ge=0)]
    groups: Annotated[list[_GroupHeader], Meta(min_length=1)]
    identity: dict[str, Any]


def take_apart(recording: Recording) -> tuple[dict[str, Any], SampleArrays]:
    """Everything but the arrays as JSON values, and the arrays."""
    parts = SampleArrays.of([sample for group in recording.groups for sample in group.samples])
    headers = iter(parts.headers)
    groups = [
        {
            "feed_index": group.feed_index,
            "prompt": group.prompt,
            "version": group.version,
            "seconds": group.seconds,
            "samples": [next(headers) for _ in group.samples],
        }
        for group in recording.groups
    ]
    return {"seconds": recording.seconds, "groups": groups}, parts


def read(path: Path, meta: dict[str, Any], step: int) -> Recording:
    """Read a file whose checksum was verified; `meta` contains the JSON of `take_apart`.

    Raises TrajectoryError if `meta` or the lengths of the arrays are invalid. The samples are not checked.
    """
    parse(meta, _Header, "recording")
    with safe_open(path, framework="numpy") as file:
        samples = iter(read_samples(file, [header for group in meta["groups"] for header in group["samples"]]))
    groups = [
        GroupRecord(
            feed_index=group["feed_index"],
            prompt=group["prompt"],
            version=group["version"],
            seconds=group["seconds"],
            samples=[next(samples) for _ in group["samples"]],
        )
        for group in meta["groups"]
    ]
    return Recording(groups=groups, seconds=meta["seconds"], replayed_from=step)
