"""Samples in a safetensors file: their columns and response texts as arrays, all other fields as JSON.

Each array holds one part of a column of all samples, concatenated in order. Its name is that of the column, or
`column:part` if the value of a column consists of several arrays. The JSON of a sample holds the length of the sample's
slice of each array; a sample without a value of a column has no slice. No pickle is involved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
from msgspec import Meta
from numpy.typing import NDArray

from miles_async.columns.column import COLUMNS, columns_of, set_column
from miles_async.errors import TrajectoryError, UserError
from miles_async.sample_schema import SampleFields
from miles_async.types import Sample, SampleStatus

_RESPONSE = ":response"
"""The array of the response texts. JSON would take longer, and hold the interpreter lock."""
_JSON = "index", "trajectory", "prompt", "label", "reward", "reward_key", "remove_sample", "metadata", "response_length"
_TYPES = {"f": "F", "i": "I", "u": "U"}
_Natural = Annotated[int, Meta(ge=0)]


class SampleHeader(SampleFields):
    """The JSON of a sample; `check_stored` checks the other fields of the sample."""

    response_length: _Natural
    arrays: dict[str, _Natural]


@dataclass(frozen=True)
class SampleArrays:
    """What a file has of some samples. The arrays are those of the samples, and not copies."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    """The JSON of each sample."""
    arrays: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    """The slices of each array, in order."""

    @staticmethod
    def of(samples: Sequence[Sample]) -> SampleArrays:
        """Take the samples apart."""
        parts = SampleArrays()
        for sample in samples:
            arrays = dict(_arrays(sample))
            lengths = {name: len(array) for name, array in arrays.items()}
            header = {name: getattr(sample, name) for name in _JSON}
            parts.headers.append(header | {"status": sample.status.value, "arrays": lengths})
            for name, array in arrays.items():
                parts.arrays.setdefault(name, []).append(array)
        return parts

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum(array.nbytes for slices in self.arrays.values() for array in slices)

    def write(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write the arrays as a safetensors file with this metadata. Raises OSError.

        The file is 8 bytes with the length of the header, the header as JSON, and the arrays. It is written slice by
        slice instead of with `safetensors.numpy.save_file`, which copies and writes all arrays while it holds the
        interpreter lock: with 100 MB the event loop would not run for a tenth of a second.
        """
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        # Arrays of large numbers come first, so that every array is aligned to the size of its numbers.
        ordered = dict(sorted(self.arrays.items(), key=lambda entry: -entry[1][0].itemsize))
        offset = 0
        for name, slices in ordered.items():
            end = offset + sum(array.nbytes for array in slices)
            dtype, shape = slices[0].dtype, [sum(map(len, slices)), *slices[0].shape[1:]]
            kind = "BOOL" if dtype.kind == "b" else f"{_TYPES[dtype.kind]}{8 * dtype.itemsize}"
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = orjson.dumps(header)
        # The format pads the header with spaces to a multiple of 8 bytes, which aligns the arrays.
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in (array for slices in ordered.values() for array in slices):
                file.write(np.ascontiguousarray(array).data)


def read_samples(file: Any, headers: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The samples of an open safetensors file with these headers. The samples are not checked.

    Raises TrajectoryError if the arrays do not have the lengths that the headers state.
    """
    totals: dict[str, int] = {}
    for header in headers:
        for name, length in header["arrays"].items():
            totals[name] = totals.get(name, 0) + length
    stored = set(file.keys())
    columns = {name: file.get_slice(name) for name in totals if name in stored}
    for name, total in totals.items():
        if (columns[name].get_shape()[0] if name in columns else 0) != total:
            raise TrajectoryError(f"the array {name} does not have {total} entries")
    offsets = dict.fromkeys(totals, 0)
    samples = []
    for header in headers:
        slices = {}
        for name, length in header["arrays"].items():
            start, offsets[name] = offsets[name], offsets[name] + length
            # safetensors refuses an empty slice at the end of an array.
            slices[name] = columns[name][start : start + length] if length else np.empty(0)
        samples.append(_sample(header, slices))
    return samples


def _arrays(sample: Sample) -> Iterator[tuple[str, NDArray[Any]]]:
    # A response that ends within a character decodes to a lone surrogate, which plain UTF-8 cannot encode.
    yield _RESPONSE, np.frombuffer(sample.response.encode("utf-8", "surrogatepass"), np.uint8)
    for name, column, value in columns_of(sample):
        if value is not None:
            for part, array in column.arrays(value).items():
                yield f"{name}:{part}" if part else name, array


def _sample(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Sample:
    text = arrays[_RESPONSE].tobytes().decode("utf-8", "surrogatepass")
    fields = {name: header[name] for name in _JSON if name in header}
    sample = Sample(**fields, response=text, status=SampleStatus(header["status"]))
    values: dict[str, dict[str, NDArray[Any]]] = {}
    for name, array in arrays.items():
        if name != _RESPONSE:
            column, _, part = name.partition(":")
            values.setdefault(column, {})[part] = array
    for name, parts in values.items():
        try:
            set_column(sample, name, COLUMNS.find(name).restored(parts))
        except UserError as error:
            raise TrajectoryError(f"sample {sample.index}: {error}") from None
    return sample
