"""The schema of all samples that enter a run: answers of engines, posted samples and results of user functions.

Each function raises TrajectoryError that names the first invalid field, such as `tokens[3]: expected int, got str`.
Lengths are compared before anything of that length is allocated. `accept_values` converts all fields of a sample to
plain values (`json_values.py`). It is called whenever code of a user had the sample, so that the stages, the store,
checkpoints and events check nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from operator import index
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from miles_async.errors import TrajectoryError
from miles_async.json_values import (
    UnrepresentableError,
    finite_number,
    json_value,
    plain_text,
    readable_entries,
    shown,
    shown_error,
)
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Group, Prompt, Sample, SampleStatus, VersionSpan

T = TypeVar("T")
_Natural = Annotated[int, Meta(ge=0, lt=2**62)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_COLUMNS = "tokens", "rollout_log_probs", "loss_mask"
MASK_IS_MISSING = (
    "no sampling mask, although rollout_top_p or rollout_top_k limits the tokens that are sampled: use args.turns, or "
    "copy the engine's output_token_sampling_mask into sample.sampling_mask and output_token_sampling_logprobs into "
    "sample.rollout_log_probs, or unset rollout_top_p and rollout_top_k"
)
"""The end of the error message for a sample without a sampling mask."""


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


NO_LIMITS = SampleLimits()


class FinishReason(Struct):
    """The reason why a response ended."""

    type: str
    matched: Any = None
    """The string or token that ended the response, if one did."""


class ReportedSpan(Struct):
    """The weight version that sampled the output tokens `[start, end)`, as SGLang reports it."""

    version: str
    start: _Natural
    end: _Natural


class OutputToken(Struct, array_like=True, gc=False):
    """An output token, which SGLang reports as `[log-probability, token id, text]`. Only the first entry is read."""

    log_prob: float


class AnswerMeta(Struct):
    """The part of `meta_info` that is read."""

    finish_reason: FinishReason
    output_token_logprobs: list[OutputToken]
    weight_versions: list[ReportedSpan] | None = None
    output_token_sampling_mask: list[list[_TokenId]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class EngineAnswer(Struct):
    """SGLang's answer for one sample."""

    output_ids: list[_Natural]
    meta_info: AnswerMeta
    text: str = ""


_ANSWERS = msgspec.json.Decoder(list[EngineAnswer])


class PromptMeta(Struct):
    """The part of `meta_info` that is read if an engine scores given tokens."""

    input_token_logprobs: list[tuple[float | None, _Natural, str | None]]
    """The first token of a sequence has no log-probability."""


class ScoredAnswer(Struct):
    """SGLang's answer with the log-probabilities of given tokens."""

    meta_info: PromptMeta


class PostedSpan(Struct):
    """The weight version that sampled the response tokens `[start, end)`, as an external generator posts it."""

    version: int | str
    start: _Natural
    end: _Natural


class PostedSample(Struct, kw_only=True):
    """A sample or segment that an external generator posts: its reward, and either a session or its columns."""

    reward: float | bool | None = None
    metadata: dict[str, Any] = {}
    session: str | None = None
    tokens: list[_Natural] = []
    response: str = ""
    response_length: _Natural = 0
    rollout_log_probs: list[float] = []
    loss_mask: list[int] | None = None
    sampling_mask: list[list[_TokenId]] | None = None
    weight_versions: list[PostedSpan] = []


class StoredSample(Struct):
    """The fields of a sample that was read from a file, without its columns (see `check_sample`)."""

    index: int | None
    trajectory: int | None
    prompt: str | list[dict[str, Any]]
    metadata: dict[str, Any]
    response: str
    reward: float | bool | dict[str, Any] | None
    status: SampleStatus


class _Span(Struct):
    version: _Natural
    start: _Natural
    end: _Natural


class _Columns(Struct):
    """The columns of a finished sample."""

    tokens: list[_TokenId]
    response_length: _Natural
    rollout_log_probs: list[float]
    loss_mask: list[int | float | bool] | None
    spans: list[_Span]


def decode_answers(content: bytes) -> list[EngineAnswer] | None:
    """Decode and check SGLang's answers to one request in one pass; None if an answer is invalid.

    This takes half the time of decoding to Python objects and calling `parse`.
    """
    try:
        return _ANSWERS.decode(content)
    except msgspec.MsgspecError:
        return None


def parse(value: Any, schema: type[T], name: str) -> T:
    """Convert `value` to `schema`. `name` begins the error message, such as "sample 3"."""
    try:
        return msgspec.convert(value, schema, from_attributes=True)
    except msgspec.ValidationError as error:
        complaint, _, path = str(error).replace("`", "").partition(" - at ")
        where = path.removeprefix("$").removeprefix(".")
        sentence = complaint[:1].lower() + complaint[1:]
        raise TrajectoryError(f"{name}: {where + ': ' if where else ''}{sentence}") from None
    except UnicodeEncodeError:
        # A text in place of a number, or a text that is a key.
        raise TrajectoryError(f"{name}: a text has half of a surrogate pair; send valid UTF-8") from None


def decode_json(content: bytes | str, schema: type[T]) -> T:
    """Decode JSON of a client or a data file. Raises ValueError with a sentence that says what is wrong."""
    try:
        return msgspec.json.decode(content, type=schema)
    except RecursionError:
        raise ValueError("the JSON is nested too deep: store it flat, or as text") from None


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
        sample.tokens, sample.response, sample.response_length = [], "", 0
        sample.rollout_log_probs, sample.loss_mask, sample.sampling_mask, sample.spans = [], None, None, []
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
    """Convert the columns to lists of Python's numbers. Raises TrajectoryError that names the first invalid entry."""
    name = f"sample {sample.index}"
    try:
        columns = parse(sample, _Columns, name)
    except TrajectoryError:
        # Arrays, and lists of numbers of NumPy, are converted first; other samples are spared that.
        try:
            for column in (*_COLUMNS, "response_length"):
                setattr(sample, column, json_value(getattr(sample, column)))
        except UnrepresentableError as error:
            raise TrajectoryError(f"{name}: {column} {error}") from None
        columns = parse(sample, _Columns, name)
    sample.tokens, sample.response_length = columns.tokens, columns.response_length
    sample.rollout_log_probs = columns.rollout_log_probs
    if columns.loss_mask is not None and not set(columns.loss_mask) <= {0, 1}:
        raise TrajectoryError(f"{name}: its loss_mask has entries other than 0 and 1")
    sample.loss_mask = None if columns.loss_mask is None else list(map(int, columns.loss_mask))
    sample.spans = [VersionSpan(span.version, span.start, span.end) for span in columns.spans]
    _convert_mask(sample, name)


def check_sample(sample: Sample, limits: SampleLimits, newest_version: int | None) -> None:
    """Accept the values of a finished sample and check its columns; log-probabilities and spans may be empty.

    `newest_version` is the newest weight version of the run; None if versions of another run are allowed.
    """
    accept_values(sample)
    check_columns(sample, limits, newest_version)


def check_columns(sample: Sample, limits: SampleLimits, newest_version: int | None) -> None:
    """Check the columns of a finished sample whose values are accepted; see `check_sample`."""
    name, columns = f"sample {sample.index}", sample
    tokens, response = len(columns.tokens), columns.response_length
    if response > tokens:
        raise TrajectoryError(f"{name}: {tokens} tokens, fewer than its response_length {response}")
    if response == tokens:
        raise TrajectoryError(f"{name}: its tokens contain no prompt; put the prompt first")
    if limits.longest is not None and tokens > limits.longest:
        raise TrajectoryError(f"{name}: {too_long(tokens, limits.longest)}")
    if (mask := columns.loss_mask) is not None and len(mask) != response:
        raise TrajectoryError(f"{name}: a loss_mask of {len(mask)} entries; response_length is {response}")
    if columns.rollout_log_probs and len(columns.rollout_log_probs) != response:
        raise TrajectoryError(
            f"{name}: {len(columns.rollout_log_probs)} rollout_log_probs; response_length is {response}"
        )
    if not all(map(isfinite, columns.rollout_log_probs)):
        raise TrajectoryError(f"{name}: a rollout_log_prob is not finite")
    if limits.vocabulary is not None and max(columns.tokens) >= limits.vocabulary:
        raise TrajectoryError(
            f"{name}: token {max(columns.tokens)} is outside the vocabulary of {limits.vocabulary} tokens"
        )
    end = 0
    for span in columns.spans:
        if not end <= span.start < span.end <= response:
            raise TrajectoryError(
                f"{name}: its version spans must be in order and within the response, and one covers "
                f"[{span.start}, {span.end}) of {response} tokens"
            )
        end = span.end
        if newest_version is not None:
            check_version(span.version, newest_version, name)
    check_mask(sample, limits, name)


def _convert_mask(sample: Sample, name: str) -> None:
    mask: Any = sample.sampling_mask  # user functions set the lists that SGLang reports
    if mask is None:
        return
    if not isinstance(mask, SamplingMask):
        mask = sample.sampling_mask = SamplingMask.from_rows(
            parse(mask, list[list[_TokenId]], f"{name}: sampling_mask")
        )
    if mask.has_duplicates():
        raise TrajectoryError(f"{name}: its sampling_mask names a token twice; name each kept token once")


def check_mask(sample: Sample, limits: SampleLimits, name: str) -> None:
    """Check that the sampling mask has the response's length and keeps each trained token, or that it may be missing.

    `name` begins the error message.
    """
    mask = sample.sampling_mask
    if mask is None:
        if limits.sampling_masks and sample.has_trained_tokens:
            raise TrajectoryError(f"{name}: {MASK_IS_MISSING}")
        return
    if limits.sampling_masks is False:
        raise TrajectoryError(
            f"{name}: it has a sampling mask, but this run trains the whole distribution: set rollout_top_p and "
            "rollout_top_k as the sample was sampled"
        )
    response = np.array(sample.tokens[sample.prompt_length :], np.int64)
    is_trained = np.ones(len(response), bool) if sample.loss_mask is None else np.array(sample.loss_mask, bool)
    if len(mask) != len(response):
        raise TrajectoryError(f"{name}: a sampling_mask of {len(mask)} entries; response_length is {len(response)}")
    if limits.vocabulary is not None and len(mask.token_ids) and mask.token_ids.max() >= limits.vocabulary:
        raise TrajectoryError(
            f"{name}: token {mask.token_ids.max()} of its sampling_mask is outside the vocabulary of "
            f"{limits.vocabulary} tokens"
        )
    missing = np.flatnonzero(is_trained & ~mask.keeps(response))
    if len(missing):
        raise TrajectoryError(
            f"{name}: the sampling_mask of response token {missing[0]} does not contain the token itself; set it to "
            "the output_token_sampling_mask that the engine reported with the token"
        )
    if sample.has_trained_tokens and not sample.rollout_log_probs:
        raise TrajectoryError(
            f"{name}: it has a sampling mask without rollout_log_probs, and an engine can compute them only for the "
            "whole vocabulary; set them to the output_token_sampling_logprobs that the engine reported"
        )


def check_stored(samples: Sequence[Sample], limits: SampleLimits, newest_version: int | None) -> None:
    """Check the samples of a group that was read from a file: a recording or a saved rollout."""
    for sample in samples:
        parse(sample, StoredSample, f"sample {sample.index}")
        check_sample(sample, limits, newest_version)


def check_group(group: Group, limits: SampleLimits, newest_version: int) -> None:
    """Check a group that the pipeline generated: its length, its weight versions and its sampling masks."""
    for sample in group:
        name = f"sample {sample.index}"
        if limits.longest is not None and len(sample.tokens) > limits.longest:
            raise TrajectoryError(f"{name}: {too_long(len(sample.tokens), limits.longest)}")
        for span in sample.spans:
            check_version(span.version, newest_version, name)
        check_mask(sample, limits, name)


def check_version(version: int, newest: int, name: str) -> None:
    """Check that a weight version exists in this run. `name` begins the error message."""
    if version > newest:
        raise TrajectoryError(f"{name}: weight version {version} does not exist; the newest version is {newest}")


def check_reward(sample: Sample) -> None:
    """Check the reward that is trained on, and convert numbers of other types, such as NumPy's, to float."""
    reward, key = sample.reward, sample.reward_key
    number = finite_number(reward.get(str(key)) if isinstance(reward, Mapping) else reward)
    if number is None:
        entry = f" under reward_key {key!r}" if isinstance(reward, Mapping) else ""
        raise TrajectoryError(f"sample {sample.index}: reward {shown(reward)} has no finite number{entry}")
    sample.reward = {**reward, str(key): number} if isinstance(reward, Mapping) else number


def too_long(tokens: int, longest: int) -> str:
    """The end of the error message for a sample that does not fit into a micro-batch."""
    return (
        f"{tokens} tokens, and a micro-batch of the learner holds at most {longest}; raise max_tokens_per_gpu, or set "
        "rollout_max_prompt_len and rollout_max_response_len so that every sample fits"
    )
