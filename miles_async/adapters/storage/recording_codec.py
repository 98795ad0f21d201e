"""The file format of a recording: numbers and response texts as safetensors arrays, everything else as JSON.

Each array holds one field of all samples, concatenated in order. The JSON of a sample (its header) holds the length of
the sample's slice of each array.

The format differs from the one of `rollout_file.py` because it has another purpose. A recording is written and read
while a run is going on, so neither may hold the GIL for long, and samples are created lazily. A rollout file is written
in one call and is self-contained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import numpy as np
import orjson
from msgspec import Meta, Struct
from numpy.typing import NDArray
from safetensors import safe_open

from miles_async.errors import TrajectoryError
from miles_async.recording import GroupRecord, Recording
from miles_async.sample_schema import parse
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Sample, SampleStatus, VersionSpan

_ARRAYS: dict[str, Any] = {
    "log_probs": np.float64,  # the precision of the JSON that engines answer, so that a replay is exact
    "spans": np.int64,
    "tokens": np.int32,
    "loss_mask": np.int32,
    "kept_counts": np.int32,
    "kept_ids": np.int32,
    "text": np.uint8,
}
"""The arrays of a file and their types, widest first, so that every array is aligned to its item size.

`kept_counts` and `kept_ids` are the two arrays of the sampling mask.
"""
_DTYPE_NAMES = {np.float64: "F64", np.int64: "I64", np.int32: "I32", np.uint8: "U8"}
"""The names of these types in the safetensors format."""


_Natural = Annotated[int, Meta(ge=0)]


class _SampleHeader(Struct):
    """The JSON of a sample; `check_stored` checks the other fields of the sample."""

    index: int | None
    prompt: str | list[dict[str, Any]]
    metadata: dict[str, Any]
    response_length: _Natural
    status: SampleStatus
    lengths: dict[Literal["tokens", "log_probs", "spans", "text", "loss_mask", "kept_counts", "kept_ids"], _Natural]
    trajectory: int | None = None


class _GroupHeader(Struct):
    """The JSON of a group."""

    feed_index: str
    prompt: str
    version: int
    seconds: Annotated[float, Meta(ge=0)]
    samples: list[_SampleHeader]


class _Header(Struct):
    """The JSON of a recording."""

    seconds: Annotated[float, Meta(ge=0)]
    groups: Annotated[list[_GroupHeader], Meta(min_length=1)]
    identity: dict[str, Any]


def describe(recording: Recording) -> dict[str, Any]:
    """Return everything but the arrays as JSON values, with the array lengths of each sample."""
    groups = [
        {
            "feed_index": group.feed_index,
            "prompt": group.prompt,
            "version": group.version,
            "seconds": group.seconds,
            "samples": [_sample_header(sample) | {"lengths": _lengths(sample)} for sample in group.samples],
        }
        for group in recording.groups
    ]
    return {"seconds": recording.seconds, "groups": groups}


def array_bytes(content: dict[str, Any]) -> int:
    """Return the size in bytes of all arrays; `content` is the result of `describe`."""
    return sum(size * np.dtype(_ARRAYS[kind]).itemsize for kind, size in _total_lengths(content).items())


def write(recording: Recording, content: dict[str, Any], path: Path) -> None:
    """Write the arrays as a safetensors file; `content` is the result of `describe`. Raises OSError.

    The file is 8 bytes with the length of the header, the header as JSON, and the arrays. It is written sample by
    sample instead of with `safetensors.numpy.save_file`, which copies and writes all arrays while it holds the GIL:
    with 100 MB the event loop would not run for a tenth of a second.
    """
    header, offset = {}, 0
    for kind, length in _total_lengths(content).items():
        end = offset + length * np.dtype(_ARRAYS[kind]).itemsize
        header[kind] = {"dtype": _DTYPE_NAMES[_ARRAYS[kind]], "shape": [length], "data_offsets": [offset, end]}
        offset = end
    text = orjson.dumps(header)
    # The format pads the header with spaces to a multiple of 8 bytes, which aligns the arrays.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind, dtype in _ARRAYS.items():
            for group in recording.groups:
                for sample in group.samples:
                    file.write(np.asarray(_values(sample, kind), dtype).data)


def read(path: Path, meta: dict[str, Any], step: int) -> Recording:
    """Read a file whose checksum was verified; `meta` contains the result of `describe`.

    Raises TrajectoryError if `meta` or the lengths of the arrays are invalid. The samples are not checked.
    """
    parse(meta, _Header, "recording")
    offsets = dict.fromkeys(_ARRAYS, 0)
    with safe_open(path, framework="numpy") as file:
        columns = {kind: file.get_slice(kind) for kind in _ARRAYS if kind in file.keys()}  # noqa: SIM118
        for kind, length in _total_lengths(meta).items():
            # A file without sampling masks may be older than their arrays.
            if (columns[kind].get_shape() if kind in columns else [0]) != [length]:
                raise TrajectoryError(f"recording: the array {kind} does not have {length} entries")

        def next_slices(lengths: dict[str, int]) -> dict[str, NDArray[Any]]:
            slices = {}
            for kind, length in lengths.items():
                start, offsets[kind] = offsets[kind], offsets[kind] + length
                # safetensors refuses an empty slice at the end of an array.
                slices[kind] = columns[kind][start : start + length] if length else np.empty(0, _ARRAYS[kind])
            return slices

        groups = [
            GroupRecord(
                feed_index=group["feed_index"],
                prompt=group["prompt"],
                version=group["version"],
                seconds=group["seconds"],
                samples=_LazySamples(group["samples"], [next_slices(header["lengths"]) for header in group["samples"]]),
            )
            for group in meta["groups"]
        ]
    return Recording(groups=groups, seconds=meta["seconds"], replayed_from=step)


class _LazySamples(Sequence[Sample]):
    """A sequence that creates each sample when it is accessed.

    The garbage collector traverses Python lists but not numpy arrays. Keeping a whole batch as arrays until it is
    replayed saves the event loop the pauses of many collections over millions of list items.
    """

    def __init__(self, headers: Sequence[dict[str, Any]], arrays: Sequence[dict[str, NDArray[Any]]]) -> None:
        self._headers = headers
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._headers)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return _sample(self._headers[index], self._arrays[index])

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
        case "kept_counts":
            return () if sample.sampling_mask is None else sample.sampling_mask.counts
        case "kept_ids":
            return () if sample.sampling_mask is None else sample.sampling_mask.token_ids
        case "spans":
            return list(_flatten(sample.spans))
        case _:
            return np.frombuffer(_text(sample), np.uint8)


def _lengths(sample: Sample) -> dict[str, int]:
    lengths = {
        "tokens": len(sample.tokens),
        "log_probs": len(sample.rollout_log_probs),
        "spans": 3 * len(sample.spans),
        "text": len(_text(sample)),
    }
    # A missing mask (train on all tokens) differs from an empty mask (no response tokens).
    if sample.loss_mask is not None:
        lengths["loss_mask"] = len(sample.loss_mask)
    if (mask := sample.sampling_mask) is not None:
        lengths |= {"kept_counts": len(mask.counts), "kept_ids": len(mask.token_ids)}
    return lengths


def _total_lengths(content: dict[str, Any]) -> dict[str, int]:
    totals = dict.fromkeys(_ARRAYS, 0)
    for group in content["groups"]:
        for header in group["samples"]:
            for kind, length in header["lengths"].items():
                totals[kind] += length
    return totals


def _text(sample: Sample) -> bytes:
    # A response that ends within a character decodes to a lone surrogate, which plain UTF-8 cannot encode.
    return sample.response.encode("utf-8", "surrogatepass")


def _flatten(spans: Iterable[VersionSpan]) -> Iterator[int]:
    for span in spans:
        yield from (span.version, span.start, span.end)


def _sample_header(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "trajectory": sample.trajectory,
        "prompt": sample.prompt,
        "label": sample.label,
        "reward": sample.reward,
        "metadata": sample.metadata,
        "response_length": sample.response_length,
        "status": sample.status.value,
    }


def _sample(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Sample:
    spans = arrays["spans"].reshape(-1, 3).tolist()
    return Sample(
        index=header["index"],
        # Recordings of older versions have neither.
        trajectory=header.get("trajectory"),
        reward=header.get("reward"),
        prompt=header["prompt"],
        label=header["label"],
        metadata=header["metadata"],
        tokens=arrays["tokens"].tolist(),
        response=arrays["text"].tobytes().decode("utf-8", "surrogatepass"),
        response_length=header["response_length"],
        loss_mask=arrays["loss_mask"].tolist() if "loss_mask" in arrays else None,
        rollout_log_probs=arrays["log_probs"].tolist(),
        sampling_mask=SamplingMask(arrays["kept_counts"], arrays["kept_ids"]) if "kept_ids" in arrays else None,
        spans=[VersionSpan(*span) for span in spans],
        status=SampleStatus(header["status"]),
    )
