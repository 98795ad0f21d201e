"""How many tokens a sample of several turns may have, as in Miles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.types import Sample


def limits_of(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> tuple[int, int]:
    """The most tokens of the whole response of a sample, and of one answer in it.

    `sample` has the tokens of its prompt. With `max_seq_len`, the limit of an evaluation is that of one answer.
    """
    limit: int = sampling_params["max_new_tokens"]
    if args.max_seq_len is None:
        return limit, min(limit, args.max_answer_len or limit)
    answer = limit if limit != args.rollout_max_response_len else args.max_answer_len or limit
    return max(1, args.max_seq_len - sample.prompt_length), answer
