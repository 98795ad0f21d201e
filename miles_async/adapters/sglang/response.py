"""Reads SGLang's answer for one sample into the sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles_async.columns.column import append_tokens
from miles_async.errors import TrajectoryError
from miles_async.parsing import parse
from miles_async.sample_schema import AnswerMeta, EngineAnswer
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Sample, SampleStatus, VersionSpan

DECODED_AGAIN = 32
"""Tokens at the end of a response that are decoded again when it is continued."""
STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
"""By the type of the reason why a response ended."""


def extend(sample: Sample, reported: Any, decode: Callable[[list[int]], str], *, sampling_mask: bool = False) -> None:
    """Append the answer's tokens, log-probabilities and version spans to the sample, and set its text and status.

    `reported` is an `EngineAnswer`, or a JSON value that is checked against that schema. With `sampling_mask` the
    answer's sampling mask is appended too, and the log-probabilities are those of the distribution over kept tokens.

    Raises TrajectoryError, without changing the sample, if the answer lacks a field, or if a token has no
    log-probability, no integer weight version or no sampling mask: without a version the staleness of the token is
    unknown.
    """
    answer = reported
    if not isinstance(answer, EngineAnswer):
        answer = parse(reported, EngineAnswer, f"sample {sample.index}: the engine's answer")
    meta, ids = answer.meta_info, answer.output_ids
    log_probs, mask = meta.log_probs, None
    if sampling_mask:
        log_probs, mask = _mask(sample, meta, len(ids))
    if len(log_probs) != len(ids):
        raise TrajectoryError(f"sample {sample.index}: {len(ids)} tokens came with {len(log_probs)} log-probabilities")
    if isinstance(log_probs, np.ndarray) and not np.isfinite(log_probs).all():
        raise TrajectoryError(f"sample {sample.index}: the engine sampled a token without a log-probability")
    status = STATUS.get(meta.finish_reason.type)
    if status is None:
        raise TrajectoryError(f"sample {sample.index}: unknown finish reason {meta.finish_reason.type!r}")
    spans = _spans(sample, meta, len(ids))

    # SGLang cuts its text behind a stop string, even if the last token has more characters. Rewards see the text of the
    # tokens, so that a response has the same text whether or not it was interrupted.
    if sample.response_length > 0 or isinstance(meta.finish_reason.matched, str):
        sample.response = continued_text(sample, ids, decode)
    else:
        sample.response = answer.text
    if mask is not None and sample.sampling_mask is None:
        sample.sampling_mask = SamplingMask.empty(sample.response_length)
    ones = None if sample.loss_mask is None else np.ones(len(ids), np.int8)
    append_tokens(sample, ids, rollout_log_probs=log_probs, loss_mask=ones, sampling_mask=mask, spans=spans)
    sample.status = status


def continued_text(sample: Sample, ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Return the text of the response followed by `ids`.

    Only the last tokens of the response are decoded again: they may end within a character, and some tokenizers drop a
    space at the start of a text. The time does not grow with the length of the response.
    """
    last = list(sample.tokens[max(sample.prompt_length, len(sample.tokens) - DECODED_AGAIN) :])
    text = decode(last) if last else ""
    if text and sample.response.endswith(text):
        return sample.response.removesuffix(text) + decode([*last, *ids])
    return decode([*sample.tokens[sample.prompt_length :], *ids])


def _mask(sample: Sample, meta: AnswerMeta, tokens: int) -> tuple[list[float], SamplingMask]:
    """Return log-probabilities over the kept tokens of `tokens` new tokens, and the sampling mask of these tokens."""
    rows, log_probs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if rows is None or log_probs is None:
        if tokens:
            raise TrajectoryError(
                f"sample {sample.index}: the engine returned no sampling mask, without which tokens that were sampled "
                "with top-p or top-k cannot be trained; use SGLang 0.5.20 or later, or unset rollout_top_p and "
                "rollout_top_k"
            )
        rows, log_probs = [], []
    if len(rows) != tokens:
        raise TrajectoryError(f"sample {sample.index}: {tokens} tokens came with {len(rows)} sampling masks")
    return log_probs, SamplingMask.from_rows(rows)


def _spans(sample: Sample, meta: AnswerMeta, tokens: int) -> list[VersionSpan]:
    """Return the sample's spans followed by those of `tokens` new tokens.

    Adjacent spans of the same weights and keys are merged.
    """
    spans = list(sample.spans)
    covered, before = 0, None
    for entry in meta.weight_versions or ():
        version, start, end = entry.version, entry.start, entry.end
        if start == end:
            continue
        if not version.isdecimal() or start != covered:
            break
        keys = None if entry.oldest_keys is None else int(entry.oldest_keys)
        reused = 0
        if keys is not None and version != before:
            # A request that was running at the publish kept all of its tokens, a new one those that it found cached.
            reused = meta.cached_tokens if before is None else len(sample.tokens) + start
        covered, before = end, version
        # SGLang counts from the start of its answer; spans count from the start of the response.
        start, end = start + sample.response_length, end + sample.response_length
        if spans and (spans[-1].version, spans[-1].oldest_keys, spans[-1].end) == (int(version), keys, start):
            start, reused = spans[-1].start, spans.pop().reused + reused
        spans.append(VersionSpan(int(version), start, end, keys, reused))
    if covered != tokens:
        raise TrajectoryError(
            f"sample {sample.index}: weight versions {meta.weight_versions} do not name an integer version for "
            f"each of its {tokens} tokens; commit a version on the engine before admitting requests"
        )
    return spans
