"""How the run store encodes values: as MessagePack, compressed with Zstandard.

Per-token data is encoded as the bytes of its array. Samples repeat their prompts, events the names of their fields, and
most loss masks a one. pyarrow has Zstandard, which compresses as well as zlib in a quarter of the time, without the
interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.msgpack import Ext

from miles_async.token_values import TokenValues
from miles_async.types import Sample, versions_of

_FIELDS = tuple(entry.name for entry in fields(Sample))
sample_values: Callable[[Sample], tuple[Any, ...]] = attrgetter(*_FIELDS)
"""The values of all fields of a sample."""
SampleValues = Sequence[tuple[Any, ...]]
"""`sample_values` of each sample of a group."""
_SPANS, _RESPONSE_LENGTH = _FIELDS.index("spans"), _FIELDS.index("response_length")
_PART_TOKENS = 1 << 16
"""Response tokens of the samples that are compressed together: enough to find repeated prompts, few enough that a group
of long samples needs little memory."""
_ARRAY, _VALUES = 1, 2
"""The codes of the MessagePack extensions for an array, and for `TokenValues`."""


def _extension(value: Any) -> Ext:
    if isinstance(value, TokenValues):
        array = value.array
        return Ext(_VALUES, _header(array.dtype, array.shape[1:]) + array.tobytes())
    if isinstance(value, np.ndarray):
        return Ext(_ARRAY, _header(value.dtype, value.shape[1:]) + value.tobytes())
    raise NotImplementedError(f"a value of type {type(value).__name__} cannot be stored")


@cache
def _header(dtype: np.dtype[Any], entry: tuple[int, ...]) -> bytes:
    """The bytes before those of an array: its type, and the shape of an entry."""
    kind = msgspec.msgpack.encode((dtype.str, entry))
    return len(kind).to_bytes(1) + kind


def _of_extension(code: int, data: memoryview) -> Any:
    start = 1 + data[0]
    dtype, entry = msgspec.msgpack.decode(data[1:start])
    # A copy, so that the decoded message does not stay in memory.
    array = np.frombuffer(data[start:], dtype).reshape(-1, *entry).copy()
    return TokenValues.of(array) if code == _VALUES else array


encode = msgspec.msgpack.Encoder(enc_hook=_extension).encode
"""Encode a value as MessagePack, which stores floats and arrays exactly."""
decode = msgspec.msgpack.Decoder(ext_hook=_of_extension).decode
"""The inverse of `encode`."""
_zstandard = pa.Codec("zstd", compression_level=1)
_POOL = pa.system_memory_pool()
"""pyarrow's own pool would keep memory that nothing uses."""
_SIZE_BYTES = 8
"""Bytes before compressed data. They contain the size of the decompressed data."""


def pack(value: Any) -> bytes:
    """Encode and compress a value."""
    data = encode(value)
    compressed: bytes = _zstandard.compress(data, asbytes=True, memory_pool=_POOL)
    return len(data).to_bytes(_SIZE_BYTES) + compressed


def unpack(data: bytes, decode: Callable[[bytes], Any] = decode) -> Any:
    """The inverse of `pack`, for data that is not damaged. `decode` decodes the MessagePack."""
    size = int.from_bytes(data[:_SIZE_BYTES])
    return decode(_zstandard.decompress(memoryview(data)[_SIZE_BYTES:], size, asbytes=True, memory_pool=_POOL))


def pack_samples(samples: SampleValues) -> bytes:
    """Encode and compress samples of a group."""
    return pack([dict(zip(_FIELDS, values, strict=True)) for values in samples])


def unpack_samples(data: bytes) -> list[Sample]:
    """The inverse of `pack_samples`."""
    return list(map(Sample.from_dict, unpack(data)))


def parts_of(samples: SampleValues) -> Iterator[SampleValues]:
    """Divide a group into consecutive samples that are compressed and stored together."""
    part, tokens = [], 0
    for values in samples:
        part.append(values)
        tokens += values[_RESPONSE_LENGTH]
        if tokens >= _PART_TOKENS:
            yield part
            part, tokens = [], 0
    if part or not samples:
        yield part


def versions(samples: SampleValues) -> list[int]:
    """See `Group.versions`; in ascending order. Empty if a sample has none."""
    spans = [values[_SPANS] for values in samples]
    return sorted(versions_of(spans)) if all(spans) else []


def response_tokens(samples: SampleValues) -> int:
    """Number of response tokens of a group."""
    return sum(values[_RESPONSE_LENGTH] for values in samples)
