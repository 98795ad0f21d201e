"""A recording as arrays and JSON. The numbers go to safetensors, one array per kind; the rest to `meta.json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import safe_open

from miles_async.core.skip import GroupRecord, Recording
from miles_async.types import Sample, SampleStatus, VersionSpan

Columns = dict[str, list[NDArray[Any]]]
"""By kind, the pieces that lie one behind the other in the file's array of that name."""

_KINDS: dict[str, Any] = {
    "tokens": np.int32,
    "log_probs": np.float64,  # as the engine's JSON gave them, so that a replay is exact
    "loss_mask": np.int32,
    "spans": np.int64,
    "text": np.uint8,
}


_SAFETENSORS = {np.dtype("i4"): "I32", np.dtype("f8"): "F64", np.dtype("i8"): "I64", np.dtype("u1"): "U8"}
"""What that format calls the types above."""


def encode(recording: Recording) -> tuple[Columns, dict[str, Any]]:
    """Pieces of one sample each, and what tells them apart again."""
    columns: Columns = {kind: [] for kind in _KINDS}
    groups = []
    for group in recording.groups:
        samples = []
        for sample in group.samples:
            # Sample by sample: converting one list of millions would hold the interpreter for too long.
            parts = {kind: np.asarray(values, _KINDS[kind]) for kind, values in _columns(sample)}
            for kind, part in parts.items():
                columns[kind].append(part)
            samples.append(_note(sample) | {"lengths": {kind: part.size for kind, part in parts.items()}})
        about = {"feed_index": group.feed_index, "prompt": group.prompt, "version": group.version}
        groups.append(about | {"seconds": group.seconds, "samples": samples})
    return columns, {"seconds": recording.seconds, "groups": groups}


def size_of(columns: Columns) -> int:
    """Bytes."""
    return sum(part.nbytes for parts in columns.values() for part in parts)


def write(columns: Columns, path: Path) -> None:
    """A safetensors file (8 bytes of length, a header in JSON, the arrays), piece by piece.

    Its library copies and writes everything in one call that holds the interpreter: with 100 MB the event loop would
    stand still for as long. Raises OSError.
    """
    # Widest first, so that every array begins at a multiple of its own width.
    kinds = sorted(columns, key=lambda kind: -np.dtype(_KINDS[kind]).itemsize)
    header, at = {}, 0
    for kind in kinds:
        dtype, length = np.dtype(_KINDS[kind]), sum(part.size for part in columns[kind])
        end = at + length * dtype.itemsize
        header[kind] = {"dtype": _SAFETENSORS[dtype], "shape": [length], "data_offsets": [at, end]}
        at = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind in kinds:
            for part in columns[kind]:
                file.write(part.data)


def decode(path: Path, meta: dict[str, Any], step: int) -> Recording:
    """The recording of a verified file."""
    at = dict.fromkeys(_KINDS, 0)
    with safe_open(path, framework="numpy") as file:
        columns = {kind: file.get_slice(kind) for kind in _KINDS}

        def read(lengths: dict[str, int]) -> dict[str, NDArray[Any]]:
            parts = {}
            for kind, length in lengths.items():
                parts[kind] = columns[kind][at[kind] : at[kind] + length] if length else np.empty(0, _KINDS[kind])
                at[kind] += length
            return parts

        groups = [
            GroupRecord(
                feed_index=group["feed_index"],
                prompt=group["prompt"],
                version=group["version"],
                seconds=group["seconds"],
                samples=_Samples(group["samples"], [read(note["lengths"]) for note in group["samples"]]),
            )
            for group in meta["groups"]
        ]
    return Recording(groups=groups, seconds=meta["seconds"], replayed_from=step)


class _Samples(Sequence[Sample]):
    """Samples made when they are asked for.

    Lists of a whole batch's tokens, made at once, would be walked by one garbage collection after the other, each of
    which stops the event loop; arrays are not walked.
    """

    def __init__(self, notes: Sequence[dict[str, Any]], parts: Sequence[dict[str, NDArray[Any]]]) -> None:
        self._notes = notes
        self._parts = parts

    def __len__(self) -> int:
        return len(self._notes)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        return _sample(self._notes[place], self._parts[place])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _columns(sample: Sample) -> Iterator[tuple[str, Any]]:
    yield "tokens", sample.tokens
    yield "log_probs", sample.rollout_log_probs
    if sample.loss_mask is not None:
        yield "loss_mask", sample.loss_mask
    yield "spans", list(_flat(sample.spans))
    yield "text", np.frombuffer(sample.response.encode("utf-8", "surrogatepass"), np.uint8)


def _flat(spans: Iterable[VersionSpan]) -> Iterator[int]:
    for span in spans:
        yield from (span.version, span.start, span.end)


def _note(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "prompt": sample.prompt,
        "label": sample.label,
        "metadata": sample.metadata,
        "response_length": sample.response_length,
        "status": sample.status.value,
    }


def _sample(note: dict[str, Any], parts: dict[str, NDArray[Any]]) -> Sample:
    spans = parts["spans"].reshape(-1, 3).tolist()
    return Sample(
        index=note["index"],
        prompt=note["prompt"],
        label=note["label"],
        metadata=note["metadata"],
        tokens=parts["tokens"].tolist(),
        response=parts["text"].tobytes().decode("utf-8", "surrogatepass"),
        response_length=note["response_length"],
        loss_mask=parts["loss_mask"].tolist() if "loss_mask" in parts else None,
        rollout_log_probs=parts["log_probs"].tolist(),
        spans=[VersionSpan(*span) for span in spans],
        status=SampleStatus(note["status"]),
    )
