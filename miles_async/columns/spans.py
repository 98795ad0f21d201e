"""The column of weight versions, which a sample keeps as spans of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from miles_async.columns.column import Column, SampleLimits
from miles_async.errors import TrajectoryError
from miles_async.parsing import Natural, parse
from miles_async.types import Sample, VersionSpan

NO_VERSION = -1
"""Version of a token that no span covers."""


class _Span(Struct):
    version: Natural
    start: Natural
    end: Natural
    oldest_keys: Natural | None = None
    reused: Natural = 0


@dataclass(frozen=True, slots=True)
class VersionRuns:
    """The versions that sampled m tokens, as runs of tokens of one version."""

    versions: NDArray[np.int32]
    """[k] the version of each run, or NO_VERSION."""
    counts: NDArray[np.int64]
    """[k] number of tokens of each run."""

    def of_tokens(self) -> NDArray[np.int32]:
        """[m] the version that sampled each token, or NO_VERSION."""
        return np.repeat(self.versions, self.counts)


class Spans(Column):
    """The weight version that sampled each response token. Tokens that no model sampled, such as tool output, have
    none."""

    name = "spans"
    dtype, default = "int32", NO_VERSION

    def accept(self, given: Any, name: str) -> Any:
        spans = parse(given, list[_Span], name)
        return [VersionSpan(span.version, span.start, span.end, span.oldest_keys, span.reused) for span in spans]

    def appended(self, value: Any, count: int, entries: Any, name: str) -> Any:
        return value if entries is None else entries

    def check(self, sample: Sample, value: Any, limits: SampleLimits, name: str) -> None:
        end = 0
        for span in value:
            if not end <= span.start < span.end <= sample.response_length:
                raise TrajectoryError(
                    f"{name} must be in order and within the response, and one covers [{span.start}, {span.end}) of "
                    f"{sample.response_length} tokens"
                )
            end = span.end
            if span.oldest > span.version:
                raise TrajectoryError(f"{name}: keys of version {span.oldest} are newer than version {span.version}")
            check_version(span.version, limits.newest_version, f"sample {sample.index}")

    def arrays(self, value: Any) -> dict[str, NDArray[Any]]:
        rows = [(span.version, span.start, span.end, span.oldest, span.reused) for span in value]
        return {"": np.array(rows, np.int64).reshape(-1, 5)}

    def restored(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        return [_restored(*row) for row in arrays[""].tolist()]

    def packed(self, sample: Sample, value: Any, positions: NDArray[np.int64]) -> Any:
        versions = np.full(sample.response_length, NO_VERSION, np.int32)
        for span in value:
            versions[span.start : span.end] = span.version
        trained = versions[positions]
        ends = np.flatnonzero(np.diff(trained, append=trained[-1:] - 1))
        return VersionRuns(trained[ends], np.diff(ends, prepend=-1))

    def joined(self, parts: Sequence[Any]) -> Any:
        empty = np.empty(0, np.int32)
        return VersionRuns(
            np.concatenate([empty, *(part.versions for part in parts)]),
            np.concatenate([empty, *(part.counts for part in parts)]),
        )


def _restored(version: int, start: int, end: int, oldest: int, reused: int) -> VersionSpan:
    return VersionSpan(version, start, end, None if oldest == version else oldest, reused)


def check_version(version: int, newest: int | None, name: str) -> None:
    """Check that a weight version exists in this run. `name` begins the error message."""
    if newest is not None and version > newest:
        raise TrajectoryError(f"{name}: weight version {version} does not exist; the newest version is {newest}")
