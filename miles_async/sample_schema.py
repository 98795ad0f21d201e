"""The schema of all samples that enter a run: answers of engines, posted samples and results of user functions.

Each function raises TrajectoryError that names the first invalid field, such as `tokens[3]: expected int, got str`.
Lengths are compared before anything of that length is allocated. `accept_values` converts all fields of a sample to
plain values (`json_values.py`). It is called whenever code of a user had the sample, so that the stages, the store,
checkpoints and events check nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from miles_async.columns.column import COLUMNS, SampleLimits, columns_of, set_column
from miles_async.columns.spans import check_version
from miles_async.columns.tokens import too_long
from miles_async.errors import TrajectoryError, UserError
from miles_async.json_values import (
    UnrepresentableError,
    finite_number,
    json_value,
    plain_text,
    readable_entries,
    shown,
    shown_error,
)
from miles_async.parsing import Natural, TokenId, parse
from miles_async.types import FROM_DATASET, Group, Prompt, Sample, SampleStatus
from miles_async.user_code import USER_CODE_ERRORS

T = TypeVar("T")


class FinishReason(Struct):
    """The reason why a response ended."""

    type: str
    matched: Any = None
    """The string or token that ended the response, if one did."""


class ReportedSpan(Struct):
    """The weight version that sampled the output tokens `[start, end)`, as SGLang reports it."""

    version: str
    start: Natural
    end: Natural
    oldest_keys: str | None = None
    """The oldest version whose keys and values they were sampled with (`adapters/sglang/key_versions.py`)."""


class OutputToken(Struct, array_like=True, gc=False):
    """An output token, which SGLang reports as `[log-probability, token id, text]`. Only the first entry is read."""

    log_prob: float


class AnswerMeta(Struct):
    """The part of `meta_info` that is read."""

    finish_reason: FinishReason
    output_token_logprobs: list[OutputToken] | bytes
    """As float32 in base64 if the engine packs them (`adapters/sglang/plugin.py`)."""
    weight_versions: list[ReportedSpan] | None = None
    cached_tokens: Natural = 0
    """Number of tokens of the request that were in the prefix cache when it began."""
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[float] | None = None

    @property
    def log_probs(self) -> list[float] | NDArray[np.float32]:
        """The log-probability of each output token in nats."""
        reported = self.output_token_logprobs
        if isinstance(reported, bytes):
            return np.frombuffer(reported, "<f4", len(reported) // 4).astype(np.float32)
        return [token.log_prob for token in reported]


class EngineAnswer(Struct):
    """SGLang's answer for one sample."""

    output_ids: list[TokenId]
    meta_info: AnswerMeta
    text: str = ""


_ANSWERS = msgspec.json.Decoder(list[EngineAnswer])


class PromptMeta(Struct):
    """The part of `meta_info` that is read if an engine scores given tokens."""

    input_token_logprobs: list[tuple[float | None, Natural, str | None]]
    """The first token of a sequence has no log-probability."""


class ScoredAnswer(Struct):
    """SGLang's answer with the log-probabilities of given tokens."""

    meta_info: PromptMeta


class PostedSpan(Struct):
    """The weight version that sampled the response tokens `[start, end)`, as an external generator posts it."""

    version: int | str
    start: Natural
    end: Natural
    oldest_keys: int | str | None = None


class PostedSample(Struct, kw_only=True):
    """A sample or segment that an external generator posts: its reward, and either a session or its columns."""

    reward: float | bool | None = None
    metadata: dict[str, Any] = {}
    session: str | None = None
    tokens: list[TokenId] = []
    response: str = ""
    response_length: Natural = 0
    rollout_log_probs: list[float] = []
    loss_mask: list[int] | None = None
    sampling_mask: list[list[TokenId]] | None = None
    weight_versions: list[PostedSpan] = []
    columns: dict[str, list[Any]] = {}
    """Columns of plug-ins, by name."""


class SampleFields(Struct):
    """The fields of a sample that every file has as JSON."""

    index: int | None
    trajectory: int | None
    prompt: str | list[dict[str, Any]]
    metadata: dict[str, Any]
    status: SampleStatus


class StoredSample(SampleFields):
    """The fields of a sample that was read from a file, without its columns (see `check_sample`)."""

    response: str
    reward: float | bool | dict[str, Any] | None


def decode_answers(content: bytes) -> list[EngineAnswer] | None:
    """Decode and check SGLang's answers to one request in one pass; None if an answer is invalid.

    This takes half the time of decoding to Python objects and calling `parse`.
    """
    try:
        return _ANSWERS.decode(content)
    except msgspec.MsgspecError:
        return None


def accept_values(sample: Sample, *, keeps_objects: bool = False) -> None:
    """Convert all fields of a sample to plain values, after code of a user had the sample.

    With `keeps_objects`, valid metadata keep their objects, which the user's reward function may read.

    Raises TrajectoryError that names the first field that cannot be converted. All fields are plain in this case, too:
    a field that was refused is empty, and an entry of the metadata holds the reason.
    """
    refused: list[str] = []

    def convert(field: str, conversion: Callable[[Any], Any], empty: Any) -> None:
        value = getattr(sample, field)
        try:
            setattr(sample, field, conversion(value))
        except Exception as error:
            # A method of a user's object may raise anything.
            setattr(sample, field, empty)
            reason = error if isinstance(error, UnrepresentableError) else f"cannot be {shown(value)}"
            refused.append(f"its {field} {reason}")

    convert("index", _optional_integer, None)
    convert("trajectory", _optional_integer, None)
    entries: list[str] = []
    given = sample.metadata
    convert("metadata", partial(_metadata, refused=entries), {})
    if keeps_objects and not entries and not refused:
        sample.metadata = dict(given)
    refused += [f"its metadata{entry}" for entry in entries]
    convert("prompt", _prompt, "")
    convert("label", json_value, None)
    convert("response", _text, "")
    convert("reward", json_value, None)
    convert("reward_key", lambda key: None if key is None else _text(key), None)
    convert("remove_sample", _flag, False)
    convert("status", SampleStatus, SampleStatus.FAILED)
    try:
        _accept_columns(sample)
    except Exception as error:
        if not isinstance(error, TrajectoryError):
            error = TrajectoryError(f"sample {sample.index}: a column cannot be read: {shown_error(error)}", [sample])
        sample.discard_columns()
        sample.response, sample.response_length = "", 0
        if not refused:
            raise error from None
    if refused:
        raise TrajectoryError(f"sample {sample.index}: {refused[0]}", [sample])


def accept_group(samples: Sequence[Sample]) -> None:
    """Accept the values of all samples. Raises TrajectoryError that names the samples that were refused."""
    errors = []
    for sample in samples:
        try:
            accept_values(sample)
        except TrajectoryError as error:
            errors.append(error)
    if errors:
        raise TrajectoryError(str(errors[0]), [sample for error in errors for sample in error.samples])


@contextmanager
def keep_origins(samples: Iterable[Sample]) -> Iterator[None]:
    """Restore afterwards where the prompts are from (`types.FROM_DATASET`), whatever a user's code did to metadata."""
    origins = [(sample, dict(sample.origin)) for sample in samples]
    try:
        yield
    finally:
        for sample, origin in origins:
            # `accept_values` refuses metadata that are no mapping.
            if origin and isinstance(sample.metadata, Mapping):
                sample.metadata = {**sample.metadata, FROM_DATASET: origin}


@contextmanager
def user_function(
    name: str, samples: Iterable[Sample], advice: str = "correct the function", *, ends_run: bool = True
) -> Iterator[None]:
    """Surround the call of a user's function that may change these samples. It must not surround an `await`.

    Afterwards the samples have plain values, and know where their prompts are from. If the function raises, or sets a
    value that is refused, UserError is raised. Without `ends_run`, it is TrajectoryError.
    """
    samples = list(samples)
    with keep_origins(samples):
        try:
            yield
        except USER_CODE_ERRORS as error:
            with suppress(TrajectoryError):
                accept_group(samples)
            raise (UserError if ends_run else TrajectoryError)(f"{name} raised {shown(error)}: {advice}") from error
        try:
            accept_group(samples)
        except TrajectoryError as error:
            if ends_run:
                raise UserError(f"{name} set an invalid value: {error}") from error
            raise


def _metadata(values: Any, refused: list[str]) -> dict[str, Any]:
    """The metadata with a sentence in place of each entry that cannot be converted."""
    if not isinstance(values, Mapping):
        raise UnrepresentableError(f"is {shown(values)} and not a dictionary")
    plain = readable_entries(values, refused)
    if not isinstance(plain.get("feed_index", ""), str):
        plain["feed_index"] = str(plain["feed_index"])
    return plain


def _optional_integer(value: Any) -> int | None:
    number = None if value is None else int(index(value))
    if number is not None and not -(2**63) <= number < 2**63:
        raise UnrepresentableError("has more than 64 bits")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UnrepresentableError(f"is {shown(value)} and not a text")
    return plain_text(str.__str__(value))


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return _text(value)
    messages = json_value(value)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UnrepresentableError(f"is {shown(value)} and neither a text nor a list of messages")
    return messages


def _flag(value: Any) -> bool:
    if (plain := json_value(value)) not in (0, 1):
        raise UnrepresentableError(f"is {shown(value)} and not a bool")
    return bool(plain)


def _accept_columns(sample: Sample) -> None:
    """Convert the columns to arrays. Raises TrajectoryError that names the first invalid entry."""
    name = f"sample {sample.index}"
    try:
        length = json_value(sample.response_length)
    except UnrepresentableError as error:
        raise TrajectoryError(f"{name}: response_length {error}") from None
    sample.response_length = parse(length, Natural, f"{name}: response_length")
    if not isinstance(sample.columns, Mapping):
        raise TrajectoryError(f"{name}: its columns are {shown(sample.columns)} and not a dictionary")
    sample.columns = {str(key): value for key, value in sample.columns.items() if value is not None}
    try:
        for column, declared, value in list(columns_of(sample)):
            set_column(sample, column, declared.accept(value, f"{name}: {column}"))
    except UserError as error:
        raise TrajectoryError(f"{name}: {error}") from None


def check_sample(sample: Sample, limits: SampleLimits, newest_version: int | None) -> None:
    """Accept the values of a finished sample and check its columns; log-probabilities and spans may be empty.

    `newest_version` is the newest weight version of the run; None if versions of another run are allowed.
    """
    accept_values(sample)
    check_columns(sample, limits, newest_version)


def check_columns(sample: Sample, limits: SampleLimits, newest_version: int | None) -> None:
    """Check the columns of a finished sample whose values are accepted; see `check_sample`."""
    limits = replace(limits, newest_version=newest_version)
    for name, column, value in columns_of(sample):
        column.check(sample, value, limits, f"sample {sample.index}: {name}")


def check_stored(samples: Sequence[Sample], limits: SampleLimits, newest_version: int | None) -> None:
    """Check the samples of a group that was read from a file: a recording or a saved rollout."""
    for sample in samples:
        parse(sample, StoredSample, f"sample {sample.index}")
        check_sample(sample, limits, newest_version)


def check_group(group: Group, limits: SampleLimits, newest_version: int) -> None:
    """Check a group that the pipeline generated: its length, its weight versions and its sampling masks."""
    masks = COLUMNS.find("sampling_mask")
    for sample in group:
        name = f"sample {sample.index}"
        if limits.longest is not None and len(sample.tokens) > limits.longest:
            raise TrajectoryError(f"{name}: {too_long(len(sample.tokens), limits.longest)}")
        for span in sample.spans:
            check_version(span.version, newest_version, name)
        masks.check(sample, sample.sampling_mask, limits, f"{name}: sampling_mask")


def check_reward(sample: Sample) -> None:
    """Check the reward that is trained on, and convert numbers of other types, such as NumPy's, to float."""
    reward, key = sample.reward, sample.reward_key
    number = finite_number(reward.get(str(key)) if isinstance(reward, Mapping) else reward)
    if number is None:
        entry = f" under reward_key {key!r}" if isinstance(reward, Mapping) else ""
        raise TrajectoryError(f"sample {sample.index}: reward {shown(reward)} has no finite number{entry}")
    sample.reward = {**reward, str(key): number} if isinstance(reward, Mapping) else number
