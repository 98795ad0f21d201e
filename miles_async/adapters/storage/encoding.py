"""How the run store encodes values: as MessagePack, compressed with Zstandard.

Samples repeat their prompts, events the names of their fields, and most loss masks a one. SGLang's log-probabilities
are float32, so half of the bytes of these floats are almost constant. Converting them to float32 before the compression
would save only a tenth more, and hold the interpreter lock. pyarrow has Zstandard, which compresses as well as zlib in
a quarter of the time, without the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from miles_async.sampling_mask import SamplingMask
from miles_async.types import Sample

_FIELDS = tuple(entry.name for entry in fields(Sample))
sample_values: Callable[[Sample], tuple[Any, ...]] = attrgetter(*_FIELDS)
"""The values of all fields of a sample."""
SampleValues = Sequence[tuple[Any, ...]]
"""`sample_values` of each sample of a group."""
_SPANS, _RESPONSE_LENGTH = _FIELDS.index("spans"), _FIELDS.index("response_length")

encode = msgspec.msgpack.Encoder().encode
"""Encode a value as MessagePack, which stores floats exactly."""
decode = msgspec.msgpack.Decoder().decode
"""The inverse of `encode`."""
_zstandard = pa.Codec("zstd", compression_level=1)
_SIZE_BYTES = 8
"""Bytes before compressed data. They contain the size of the decompressed data."""


def pack(value: Any) -> bytes:
    """Encode and compress a value."""
    data = encode(value)
    compressed: bytes = _zstandard.compress(data, asbytes=True)
    return len(data).to_bytes(_SIZE_BYTES) + compressed


def unpack(data: bytes, decode: Callable[[bytes], Any] = decode) -> Any:
    """The inverse of `pack`, for data that is not damaged. `decode` decodes the MessagePack."""
    size = int.from_bytes(data[:_SIZE_BYTES])
    return decode(_zstandard.decompress(memoryview(data)[_SIZE_BYTES:], size, asbytes=True))


def pack_samples(samples: SampleValues) -> bytes:
    """Encode and compress the samples of a group."""
    named = [dict(zip(_FIELDS, values, strict=True)) for values in samples]
    for values in named:
        if (mask := values["sampling_mask"]) is not None:
            values["sampling_mask"] = [np.asarray(array, np.int32).tobytes() for array in (mask.counts, mask.token_ids)]
    return pack(named)


def unpack_samples(data: bytes) -> list[Sample]:
    """The inverse of `pack_samples`."""
    samples = []
    for values in unpack(data):
        mask = values.pop("sampling_mask")
        sample = Sample.from_dict(values)
        if mask is not None:
            sample.sampling_mask = SamplingMask(*(np.frombuffer(array, np.int32) for array in mask))
        samples.append(sample)
    return samples


def versions(samples: SampleValues) -> list[int]:
    """The weight versions of a group in ascending order. Empty if a sample has none."""
    spans = [values[_SPANS] for values in samples]
    return sorted({span.version for one in spans for span in one}) if all(spans) else []


def response_tokens(samples: SampleValues) -> int:
    """Number of response tokens of a group."""
    return sum(values[_RESPONSE_LENGTH] for values in samples)
