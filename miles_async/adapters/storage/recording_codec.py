"""A recording as arrays and JSON. The numbers go to safetensors, one array per kind; the rest to `meta.json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import safe_open

from miles_async.recording import GroupRecord, Recording
from miles_async.types import Sample, SampleStatus, VersionSpan

_KINDS: dict[str, Any] = {
    "log_probs": np.float64,  # as the engine's JSON gave them, so that a replay is exact
    "spans": np.int64,
    "tokens": np.int32,
    "loss_mask": np.int32,
    "text": np.uint8,
}
"""The arrays of a file, widest first, so that each begins at a multiple of its own width."""
_SAFETENSORS = {np.float64: "F64", np.int64: "I64", np.int32: "I32", np.uint8: "U8"}
"""What that format calls the types above."""


def describe(recording: Recording) -> dict[str, Any]:
    """All but the arrays, and how long each sample's part of each of them is."""
    groups = [
        {
            "feed_index": group.feed_index,
            "prompt": group.prompt,
            "version": group.version,
            "seconds": group.seconds,
            "samples": [_note(sample) | {"lengths": _lengths(sample)} for sample in group.samples],
        }
        for group in recording.groups
    ]
    return {"seconds": recording.seconds, "groups": groups}


def size_of(content: dict[str, Any]) -> int:
    """Bytes of the arrays that `describe` speaks of."""
    return sum(size * np.dtype(_KINDS[kind]).itemsize for kind, size in _totals(content).items())


def write(recording: Recording, content: dict[str, Any], path: Path) -> None:
    """A safetensors file: 8 bytes of length, a header in JSON, the arrays, each written sample by sample.

    Its library copies and writes all arrays in calls that hold the interpreter, and so would the freeing of all pieces
    at once: with 100 MB the event loop would stand still for a tenth of a second. Raises OSError.
    """
    header, at = {}, 0
    for kind, length in _totals(content).items():
        end = at + length * np.dtype(_KINDS[kind]).itemsize
        header[kind] = {"dtype": _SAFETENSORS[_KINDS[kind]], "shape": [length], "data_offsets": [at, end]}
        at = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind, dtype in _KINDS.items():
            for group in recording.groups:
                for sample in group.samples:
                    file.write(np.asarray(_values(sample, kind), dtype).data)


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


def _values(sample: Sample, kind: str) -> Any:
    match kind:
        case "tokens":
            return sample.tokens
        case "log_probs":
            return sample.rollout_log_probs
        case "loss_mask":
            return sample.loss_mask or ()
        case "spans":
            return list(_flat(sample.spans))
        case _:
            return np.frombuffer(_text(sample), np.uint8)


def _lengths(sample: Sample) -> dict[str, int]:
    lengths = {
        "tokens": len(sample.tokens),
        "log_probs": len(sample.rollout_log_probs),
        "spans": 3 * len(sample.spans),
        "text": len(_text(sample)),
    }
    # A mask that is absent is not one that is empty.
    return lengths if sample.loss_mask is None else lengths | {"loss_mask": len(sample.loss_mask)}


def _totals(content: dict[str, Any]) -> dict[str, int]:
    totals = dict.fromkeys(_KINDS, 0)
    for group in content["groups"]:
        for note in group["samples"]:
            for kind, length in note["lengths"].items():
                totals[kind] += length
    return totals


def _text(sample: Sample) -> bytes:
    return sample.response.encode("utf-8", "surrogatepass")


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
