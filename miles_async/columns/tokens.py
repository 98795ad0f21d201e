"""The columns of every sample: its tokens, the log-probabilities of its response, and its loss mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from miles_async.columns.column import Column, SampleLimits
from miles_async.errors import TrajectoryError
from miles_async.token_values import TokenValues
from miles_async.types import Sample


class Tokens(Column):
    """The token ids of prompt and response."""

    name = "tokens"
    dtype, covers, lowest = "int32", "sequence", 0
    # Batches contain all tokens, and not only the trained ones.
    trained = False

    def accept(self, given: Any, name: str) -> Any:
        if given is None:
            raise TrajectoryError(f"{name}: expected array, got null")
        return super().accept(given, name)

    def check(self, sample: Sample, value: Any, limits: SampleLimits, name: str) -> None:
        tokens, response = len(value), sample.response_length
        if response > tokens:
            raise TrajectoryError(f"{name} has {tokens} entries, fewer than response_length {response}")
        if response == tokens:
            raise TrajectoryError(f"{name} contains no prompt; put the prompt first")
        if limits.longest is not None and tokens > limits.longest:
            raise TrajectoryError(f"{name}: {too_long(tokens, limits.longest)}")
        if limits.vocabulary is not None and (greatest := int(np.asarray(value).max())) >= limits.vocabulary:
            raise TrajectoryError(f"{name}: token {greatest} is outside the vocabulary of {limits.vocabulary} tokens")


class RolloutLogProbs(Column):
    """The log-probability of each response token under the weights that sampled it."""

    name = "rollout_log_probs"

    def accept(self, given: Any, name: str) -> Any:
        # slime's samples have None until an engine has answered.
        return super().accept(() if given is None else given, name)

    def check(self, sample: Sample, value: Any, limits: SampleLimits, name: str) -> None:
        # An engine may compute missing ones later.
        if len(value):
            super().check(sample, value, limits, name)
        elif sample.has_trained_tokens and not limits.scores_missing:
            raise TrajectoryError(
                f"{name} is empty, and engines can compute missing log-probabilities only at temperature 1: use "
                "args.turns, copy the engine's output_token_logprobs into it, or set rollout_temperature to 1"
            )


class LossMask(Column):
    """1 for each response token that is trained on, else 0. A sample without a mask is trained on as a whole."""

    name = "loss_mask"
    dtype, lowest, highest = "int8", 0, 1
    # It selects the tokens of a batch.
    trained = False

    def accept(self, given: Any, name: str) -> Any:
        if given is not None and not isinstance(given, TokenValues):
            array = np.asarray(given)
            if array.dtype.kind == "f" and np.isin(array, (0, 1)).all():
                # Functions of users multiply masks by floats.
                given = array.astype(self.dtype)
        return super().accept(given, name)


def too_long(tokens: int, longest: int) -> str:
    """The end of the error message for a sample that does not fit into a micro-batch."""
    return (
        f"{tokens} tokens, and a micro-batch of the learner holds at most {longest}; raise max_tokens_per_gpu, or set "
        "rollout_max_prompt_len and rollout_max_response_len so that every sample fits"
    )
