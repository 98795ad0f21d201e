"""The column of the tokens that top-p and top-k sampling kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_async.columns.column import Column, SampleLimits
from miles_async.errors import TrajectoryError
from miles_async.json_values import UnrepresentableError, json_value
from miles_async.parsing import TokenId, parse
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Sample

MASK_IS_MISSING = (
    "no sampling mask, although rollout_top_p or rollout_top_k limits the tokens that are sampled: use args.turns, or "
    "copy the engine's output_token_sampling_mask into sample.sampling_mask and output_token_sampling_logprobs into "
    "sample.rollout_log_probs, or unset rollout_top_p and rollout_top_k"
)
"""The end of the error message for a sample without a sampling mask."""


class KeptTokenIds(Column):
    """The token ids that top-p or top-k kept for each response token: a `SamplingMask`, or None without both."""

    name = "sampling_mask"
    dtype = "int32"

    def accept(self, given: Any, name: str) -> Any:
        mask = given
        if given is not None and not isinstance(given, SamplingMask):
            # The rows that SGLang reports.
            try:
                rows = json_value(given)
            except UnrepresentableError as error:
                raise TrajectoryError(f"{name} {error}") from None
            mask = SamplingMask.from_rows(parse(rows, list[list[TokenId]], name))
        if mask is not None and mask.has_duplicates():
            raise TrajectoryError(f"{name} names a token twice; name each kept token once")
        return mask

    def appended(self, value: Any, count: int, entries: Any, name: str) -> Any:
        before = value if isinstance(value, SamplingMask) else self.accept(value, name)
        return SamplingMask.concatenate([before, SamplingMask.empty(count) if entries is None else entries])

    def check(self, sample: Sample, value: Any, limits: SampleLimits, name: str) -> None:
        mask = value
        if mask is None:
            if limits.sampling_masks and sample.has_trained_tokens:
                raise TrajectoryError(f"sample {sample.index}: {MASK_IS_MISSING}")
            return
        if limits.sampling_masks is False:
            raise TrajectoryError(
                f"{name} is set, but this run trains the whole distribution: set rollout_top_p and rollout_top_k as "
                "the sample was sampled"
            )
        response = np.asarray(sample.tokens, np.int64)[sample.prompt_length :]
        is_trained = np.ones(len(response), bool)
        if sample.loss_mask is not None:
            is_trained = np.asarray(sample.loss_mask, bool)
        if len(mask) != len(response):
            raise TrajectoryError(f"{name} has {len(mask)} entries; response_length is {len(response)}")
        if limits.vocabulary is not None and len(mask.token_ids) and mask.token_ids.max() >= limits.vocabulary:
            raise TrajectoryError(
                f"{name}: token {mask.token_ids.max()} is outside the vocabulary of {limits.vocabulary} tokens"
            )
        missing = np.flatnonzero(is_trained & ~mask.keeps(response))
        if len(missing):
            raise TrajectoryError(
                f"{name}: the mask of response token {missing[0]} does not contain the token itself; set it to the "
                "output_token_sampling_mask that the engine reported with the token"
            )
        if sample.has_trained_tokens and not sample.rollout_log_probs:
            raise TrajectoryError(
                f"{name} is set without rollout_log_probs, and an engine can compute them only for the whole "
                "vocabulary; set them to the output_token_sampling_logprobs that the engine reported"
            )

    def arrays(self, value: Any) -> dict[str, NDArray[Any]]:
        return {"counts": value.counts, "token_ids": value.token_ids}

    def restored(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        return SamplingMask(arrays["counts"], arrays["token_ids"])

    def packed(self, sample: Sample, value: Any, positions: NDArray[np.int64]) -> Any:
        return SamplingMask.empty(len(positions)) if value is None else value.take(positions)

    def joined(self, parts: Sequence[Any]) -> Any:
        return SamplingMask.concatenate(parts)
