"""What a token column provides: one kind of per-token data, from the engine's answer to the loss.

A column is a subclass of `Column` (see `miles_async/plugins.py`). It declares the type of its entries, and thereby how
they are checked, stored, replayed and packed for the learner:

    class Temperature(Column):
        '''The temperature at which each token was sampled.'''

        default, lowest = 1.0, 0.0

    [project.entry-points."miles_async.columns"]
    temperature = "my_package:Temperature"

A generate function sets `sample.columns["temperature"]` to one number per response token. Reward functions and filters
read it there, and a loss function of the form `fn(args, tokens)` as `tokens.columns["temperature"]`. The columns of
this project are fields of `Sample`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from miles_async.errors import TrajectoryError, UserError
from miles_async.json_values import UnrepresentableError, json_value, shown, shown_error
from miles_async.parsing import parse
from miles_async.plugins import Kind, Plugin
from miles_async.token_values import TokenValues, array_of
from miles_async.types import Sample

_INTEGERS, _NUMBERS = "iub", "iuf"
"""The kinds of NumPy's types that an integer column, and a column of floats, accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimits:
    """The limits that the model and the learner set; None means no limit."""

    vocabulary: int | None = None
    """Number of token ids; ids begin at 0."""
    longest: int | None = None
    """Most tokens, of prompt and response together, that fit into a micro-batch of the learner."""
    sampling_masks: bool | None = None
    """True if every trained token needs a sampling mask, because the run samples with top-p or top-k. False if no
    sample may have a mask, because its log-probabilities would be those of another distribution than the learner's."""
    scores_missing: bool = True
    """Whether engines can compute missing log-probabilities: they compute them at temperature 1."""
    newest_version: int | None = None
    """The newest weight version of the run."""


NO_LIMITS = SampleLimits()


class Column(Plugin):
    """One kind of per-token data. A sample has either no value of a column, or an entry for each token it covers."""

    dtype: ClassVar[str] = "float32"
    """NumPy's name of the type of an entry's numbers."""
    shape: ClassVar[tuple[int, ...]] = ()
    """The shape of an entry: `()` for a number, `(k,)` for k numbers."""
    covers: ClassVar[Literal["response", "sequence"]] = "response"
    """The tokens that have an entry: those of the response, or those of the prompt too."""
    default: ClassVar[float] = 0
    """The entry of a response token that no model sampled, and of one whose entry nobody set."""
    lowest: ClassVar[float | None] = None
    """The least valid number; None if there is none but that of the type."""
    highest: ClassVar[float | None] = None
    """The greatest valid number; None if there is none but that of the type."""
    trained: ClassVar[bool] = True
    """Whether the learner gets the entries of the trained tokens."""

    def accept(self, given: Any, name: str) -> Any:
        """Convert what code of a user, a file or a client set to the value that samples keep; None stays None.

        `name` begins error messages, such as "sample 3: temperature". Raises TrajectoryError if an entry has another
        type, is out of range or has another shape.
        """
        if given is None:
            return None
        array = self._numbers(given, name)
        lowest, highest = self._range
        out = (array < lowest) | (array > highest)
        # NaN and infinity are refused when the sample has finished, because a step with them is skipped.
        if array.dtype.kind == "f":
            out &= np.isfinite(array)
        if out.any():
            wrong = int(np.argwhere(out)[0, 0])
            found = shown(array[wrong].tolist())
            raise TrajectoryError(f"{name}[{wrong}]: {found} is not between {lowest:.10g} and {highest:.10g}")
        if isinstance(given, TokenValues) and given.dtype == self.dtype:
            return given
        return TokenValues(array, self.dtype)

    @cached_property
    def _type(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @cached_property
    def _range(self) -> tuple[float, float]:
        """The least and the greatest valid number."""
        kind = self._type.kind
        limits: Any = None if kind == "b" else np.finfo(self.dtype) if kind == "f" else np.iinfo(self.dtype)
        lowest, highest = (0, 1) if limits is None else (limits.min, limits.max)
        return lowest if self.lowest is None else self.lowest, highest if self.highest is None else self.highest

    def _numbers(self, given: Any, name: str) -> NDArray[Any]:
        """The entries as an array of numbers, whose type may have more bits than `dtype`."""
        has_floats = self._type.kind == "f"
        try:
            array = np.asarray(given)
        except Exception:
            # Lists of unequal lengths, or a method of a user's object that raised.
            array = np.array(None)
        if array.shape == (0,):
            array = np.zeros((0, *self.shape), self.dtype)
        if array.ndim == 0 or array.dtype.kind not in (_NUMBERS if has_floats else _INTEGERS):
            array = self._parsed(given, name, float if has_floats else int)
        if array.shape[1:] != self.shape:
            found = list(array.shape[1:])
            raise TrajectoryError(f"{name}: an entry has the shape {found} instead of {list(self.shape)}")
        return array

    def _parsed(self, given: Any, name: str, kind: type[int] | type[float]) -> NDArray[Any]:
        """Convert entries that NumPy does not take for numbers of this kind, with an error message for the first one
        that is none."""
        lowest, highest = self._range
        # msgspec compares with integers of 64 bits.
        bounds = Meta(ge=max(kind(lowest), kind(-(2**63))), le=min(kind(highest), kind(2**63 - 1)))
        schema: Any = Annotated[kind, bounds if kind is int else Meta()]
        for _ in (..., *self.shape):
            schema = list[schema]
        try:
            return np.array(parse(json_value(given), schema, name), self.dtype)
        except UnrepresentableError as error:
            raise TrajectoryError(f"{name} {error}") from None
        except ValueError as error:
            raise TrajectoryError(f"{name}: {shown_error(error)}") from None

    def appended(self, value: Any, count: int, entries: Any, name: str) -> Any:
        """The value with `entries` for `count` more response tokens; None stands for default entries.

        Raises what `accept` raises if code of a user has set the value.
        """
        if entries is None:
            added = np.full((count, *self.shape), self.default, self.dtype)
        else:
            added = array_of(entries, self._type) if isinstance(entries, list) else np.array(entries, self.dtype)
        if not len(value):
            return TokenValues.of(added)
        before = value if isinstance(value, TokenValues) else self.accept(value, name)
        return TokenValues.of(np.concatenate((before.array, added)))

    def check(self, sample: Sample, value: Any, limits: SampleLimits, name: str) -> None:
        """Check the value of a finished sample, which is None if the sample has none. Raises TrajectoryError."""
        if value is None:
            return
        response, covered = sample.response_length, len(sample.tokens)
        if self.covers == "response":
            covered = response
        if len(value) != covered:
            tokens = f"{covered} tokens" if self.covers == "sequence" else f"response_length is {response}"
            raise TrajectoryError(f"{name} has {len(value)} entries; {tokens}")
        if len(wrong := np.argwhere(~np.isfinite(np.asarray(value)))):
            raise TrajectoryError(f"{name}[{wrong[0, 0]}] is not finite")

    def arrays(self, value: Any) -> dict[str, NDArray[Any]]:
        """The value as arrays, by name, without a copy. Files and the run store contain them."""
        return {"": self._entries(value)}

    def restored(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        """The inverse of `arrays`, without a copy."""
        return TokenValues.of(self._entries(arrays[""]))

    def packed(self, sample: Sample, value: Any, positions: NDArray[np.int64]) -> Any:
        """[m, ...] the entries of the response tokens at `positions` [m], ascending, as the learner gets them."""
        if value is None:
            return np.full((len(positions), *self.shape), self.default, self.dtype)
        entries = self._entries(value)
        return entries[positions + sample.prompt_length] if self.covers == "sequence" else entries[positions]

    def _entries(self, value: Any) -> NDArray[Any]:
        """[n, ...] the entries of a value, whose array has another shape and type if it is empty."""
        entries = np.asarray(value, self.dtype)
        return entries if len(entries) else entries.reshape(0, *self.shape)

    def joined(self, parts: Sequence[Any]) -> Any:
        """The results of `packed` of several samples, one after the other."""
        return np.concatenate([np.empty((0, *self.shape), self.dtype), *parts])


COLUMNS = Kind("token column", Column, "miles_async.columns", by_path=False)


def columns_of(sample: Sample) -> Iterator[tuple[str, Column, Any]]:
    """The name, the declaration and the value of each column of a sample; None if it has no value.

    Raises UserError for a name that no column has.
    """
    for name, column in COLUMNS.shipped.items():
        yield name, column, getattr(sample, name)
    for name, value in sample.columns.items():
        yield name, COLUMNS.find(name), value


def value_of(sample: Sample, name: str) -> Any:
    """The value of a column; None if the sample has none."""
    return getattr(sample, name) if name in COLUMNS.shipped else sample.columns.get(name)


def set_column(sample: Sample, name: str, value: Any) -> None:
    """Set the value of a column."""
    if name in COLUMNS.shipped:
        setattr(sample, name, value)
    else:
        sample.columns[name] = value


def append_tokens(sample: Sample, ids: Sequence[int], **entries: Any) -> None:
    """Append response tokens to a sample, with these `entries` of other columns, and default entries of the rest.

    A column without a value stays without one. Raises TrajectoryError if code of a user has set an invalid value.
    """
    count = len(ids)
    try:
        for name, column, value in list(columns_of(sample)):
            if value is not None:
                added = ids if name == "tokens" else entries.get(name)
                set_column(sample, name, column.appended(value, count, added, f"sample {sample.index}: {name}"))
    except UserError as error:
        raise TrajectoryError(f"sample {sample.index}: {error}") from None
    sample.response_length += count
