"""Functions of users that compute the loss, advantages, the off-policy correction or the mean of the policy's part.

The settings that name them, and the arguments of all forms but `fn(args, tokens)`, are those of slime. With context
parallelism slime passes each rank its part of a response; here every rank passes whole responses, so functions need no
communication. docs/how-to/write-a-loss.md documents all arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_async.batching.batch import PackedBatch
from miles_async.config.losses import calls_tis_function, loss_aggregation
from miles_async.config.schema import Algorithm, RunConfig
from miles_async.config.user_functions import load_function, takes_logits
from miles_async.errors import UserError
from miles_async.json_values import shown_error
from miles_async.losses.tokens import LossTokens, TokenColumns
from miles_async.user_code import USER_CODE_ERRORS

log = structlog.get_logger(__name__)


class LossFunction:
    """A function that a setting names. Errors are sentences that begin with the setting and the path."""

    def __init__(self, setting: str, path: str) -> None:
        """Raises UserError if the function cannot be imported or has other parameters."""
        self._function = load_function(path, setting=setting)
        self._name = f"{setting} {path}"
        self.takes_logits = takes_logits(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises UserError if it raises anything."""
        try:
            return self._function(*args, **kwargs)
        except USER_CODE_ERRORS as error:
            raise UserError(f"{self._name} raised {shown_error(error)}: correct the function") from error

    def checked(self, value: Any, what: str, shape: Sequence[int]) -> Tensor:
        """Return `value` if it is a tensor of this shape. `what` is its name in messages.

        Raises UserError otherwise. Values that are not finite are logged; the learner then skips the step.
        """
        if not isinstance(value, Tensor) or list(value.shape) != list(shape):
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{self._name} returned {found} as {what}: return a tensor of shape {list(shape)}")
        if not value.detach().isfinite().all():
            advice = "return finite numbers, or the step is skipped"
            log.warning("a function returned a value that is not finite", function=self._name, of=what, advice=advice)
        return value

    def refused(self, value: Any, expected: str) -> UserError:
        """The error for a result of another form."""
        return UserError(f"{self._name} returned {type(value).__name__}: return {expected}")


def _named(algorithm: Algorithm, setting: str) -> LossFunction | None:
    path: str | None = getattr(algorithm, setting)
    return None if path is None else LossFunction(setting, path)


@dataclass(frozen=True, slots=True)
class LossFunctions:
    """All functions of a run, and the settings that they get as `args`."""

    args: Any = None
    loss: LossFunction | None = None
    advantages: LossFunction | None = None
    tis: LossFunction | None = None
    reducer: LossFunction | None = None
    postprocess: LossFunction | None = None
    per_token: bool = True
    """Whether losses are averaged over all tokens of an optimizer step, instead of over its samples."""

    @classmethod
    def load(cls, config: RunConfig, args: Any) -> LossFunctions:
        """Import the functions that the configuration names. Raises UserError if one cannot be used."""
        algorithm = config.algorithm
        return cls(
            args,
            _named(algorithm, "custom_loss_function_path") if config.learner.loss_type == "custom_loss" else None,
            _named(algorithm, "custom_advantage_function_path"),
            _named(algorithm, "custom_tis_function_path") if calls_tis_function(algorithm) else None,
            _named(algorithm, "custom_pg_loss_reducer_function_path"),
            _named(algorithm, "rollout_data_postprocess_path") if config.learner.loss_type != "sft_loss" else None,
            loss_aggregation(algorithm) == "token_mean",
        )

    @property
    def compute_loss(self) -> bool:
        """Whether a function computes the loss or a part of it."""
        return any(one is not None for one in (self.loss, self.tis, self.reducer))

    @property
    def change_batches(self) -> bool:
        """Whether a function computes or changes values of a batch before its first optimizer step."""
        return self.advantages is not None or self.postprocess is not None


NO_FUNCTIONS = LossFunctions()


class SampleLayout:
    """Where the samples of a micro-batch lie, and how columns [m] of trained tokens become lists of samples.

    A response begins with the first trained token of its sample and ends with the last one. Samples without trained
    tokens are left out. With context parallelism every rank has the whole responses.
    """

    def __init__(self, batch: PackedBatch, device: torch.device, left: Tensor | slice = slice(None)) -> None:
        """`batch` is a micro-batch. The tensors are on `device`.

        Columns have the m trained tokens at `left`, ascending, which are all by default.
        """
        self._device = device
        counts = np.bincount(batch.sequences, minlength=len(batch.lengths))
        starts = np.cumsum(batch.lengths) - batch.lengths
        ends = np.cumsum(counts)
        present = np.flatnonzero(counts)
        begin = starts[present]
        first, end = batch.targets[ends[present] - counts[present]], batch.targets[ends[present] - 1] + 1
        self.total_lengths: list[int] = (end - begin).tolist()
        """[n] tokens of each sample, from its first one to the end of its response."""
        self.response_lengths: list[int] = (end - first).tolist()
        """[n] tokens of each response."""
        offsets = np.cumsum(end - first) - (end - first)
        sample = np.repeat(np.arange(len(present)), counts[present])
        self._trained = self._tensor(batch.targets - first[sample] + offsets[sample])[left]
        self._first_trained = ends[present] - counts[present]
        spans = list(zip(begin.tolist(), end.tolist(), strict=True))
        self.tokens = [self._tensor(batch.tokens[start:stop]) for start, stop in spans]
        """[n] ids of each sample, prompt and response."""
        self.groups: list[int] = batch.sequence_groups[present].tolist()
        """[n] number of the group of each sample in the batch."""
        self.rows: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *(np.arange(*span) for span in spans)])
        """[sum(total_lengths)] indices of all these tokens in the micro-batch."""

    def spread(self, column: Tensor) -> Tensor:
        """[sum(response_lengths), ...] entries of all response tokens: `column` [m, ...], and 0 for tokens without
        training."""
        zeros = column.new_zeros(sum(self.response_lengths), *column.shape[1:])
        return zeros.index_copy(0, self._trained, column)

    def lists(self, column: Tensor) -> list[Tensor]:
        """`spread(column)`, divided into the responses."""
        return list(self.spread(column).split(self.response_lengths))

    def of_samples(self, column: Tensor) -> Tensor:
        """[n] entry of the first trained token of each sample, for a `column` [m] that is constant in each sample."""
        return column[self._tensor(self._first_trained)]

    def trained(self, flat: Tensor) -> Tensor:
        """[m] entries of the trained tokens; `flat` [sum(response_lengths)] has those of all response tokens."""
        return flat[self._trained]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, torch.int64)


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """What the functions of a micro-batch computed."""

    loss: Tensor
    """This micro-batch's part of the loss of the optimizer step."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """This micro-batch's part of each metric. The parts of all micro-batches and ranks add up to the metric."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """The policy's part of the loss after the function of `custom_tis_function_path`."""

    objective: Tensor
    """[m], with its weights."""
    kept: Tensor
    """[m] factors of the function's masks."""
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class FunctionsOfMicroBatch:
    """Calls the functions for one micro-batch."""

    functions: LossFunctions
    layout: SampleLayout
    columns: TokenColumns
    total_tokens: int
    """Trained tokens of the optimizer step over all ranks."""
    trajectories: int
    """Trajectories of the optimizer step over all ranks: what slime counts as samples."""

    def token_loss(self, logprobs: Tensor, entropy: Tensor) -> FunctionResult:
        """The result of a function of the form `fn(args, tokens)`, which returns the loss [m] of each token."""
        assert self.functions.loss is not None
        tokens = LossTokens.of(logprobs, entropy, self.columns)
        result = self.functions.loss(self.functions.args, tokens)
        values, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        values = self.functions.loss.checked(values, "the loss", logprobs.shape)
        parts = {name: self._mean(value) for name, value in self._metrics(self.functions.loss, metrics).items()}
        return FunctionResult(self._mean(values), parts)

    def logits_loss(self, logits: Tensor) -> FunctionResult:
        """The result of a function of the form `fn(args, batch, logits, sum_of_sample_mean)`.

        `logits` [sum(total_lengths), vocabulary] are those of all tokens of the samples.
        """
        function = self.functions.loss
        assert function is not None
        if not self.layout.tokens:
            return FunctionResult(logits.sum() * 0)
        result = function(self.functions.args, self._batch(), logits[None], self._sum_of_sample_mean)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise function.refused(result, "the loss and a dictionary of metrics")
        loss, metrics = result
        scale = self._divisor()
        parts = {str(name): torch.as_tensor(value).detach() / scale for name, value in metrics.items()}
        return FunctionResult(function.checked(loss, "the loss", []) / scale, parts)

    def correct(self, objective: Tensor) -> Corrected:
        """Apply the function of `custom_tis_function_path` to the policy's part [m] of each token."""
        function, layout, columns = self.functions.tis, self.layout, self.columns
        assert function is not None
        if not layout.tokens:
            return Corrected(objective, torch.ones_like(objective), {})
        result = function(
            args=self.functions.args,
            pg_loss=layout.spread(-objective),
            train_log_probs=layout.lists(columns.old_logprobs.detach()),
            rollout_log_probs=layout.lists(columns.rollout_log_probs),
            loss_masks=self._masks(),
            total_lengths=layout.total_lengths,
            response_lengths=layout.response_lengths,
        )
        if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping)):
            raise function.refused(result, "pg_loss, the masks and a dictionary of metrics")
        pg_loss, masks, metrics = result
        flat = [sum(layout.response_lengths)]
        corrected = -layout.trained(function.checked(pg_loss, "pg_loss", flat))
        if not isinstance(masks, Sequence) or len(masks) != len(layout.tokens):
            raise function.refused(masks, f"{len(layout.tokens)} masks, one per sample")
        kept = layout.trained(function.checked(torch.cat(list(masks)), "the masks", flat)).to(corrected.dtype)
        read = {name: layout.trained(function.checked(value, name, flat)) for name, value in metrics.items()}
        # A token that the masks leave out may have an infinite loss.
        return Corrected(
            (corrected * kept).masked_fill(kept == 0, 0.0),
            kept,
            {name: self._mean(value.detach()) for name, value in read.items()},
        )

    def reduce(self, objective: Tensor, kept: Tensor | None) -> Tensor:
        """The policy's part of the loss, averaged by the function of `custom_pg_loss_reducer_function_path`."""
        function, layout = self.functions.reducer, self.layout
        assert function is not None
        if not layout.tokens:
            return objective.sum() * 0
        masks = self._masks() if kept is None else layout.lists(kept)
        reducer = function(layout.total_lengths, layout.response_lengths, masks, self.functions.per_token)
        if not callable(reducer):
            raise function.refused(reducer, "a function of pg_loss")
        return function.checked(reducer(layout.spread(-objective)), "the mean", []) / self._divisor()

    def _divisor(self) -> int:
        """By what slime divides the sum over all micro-batches and ranks."""
        return self.total_tokens if self.functions.per_token else self.trajectories

    def _mean(self, column: Tensor) -> Tensor:
        """This micro-batch's part of the mean of a column [m], which is averaged as the loss."""
        return (column * self.columns.loss_weights).sum() / self.total_tokens

    def _sum_of_sample_mean(self, values: Tensor) -> Tensor:
        """slime's sum over samples of their means over trained tokens; over all tokens if losses are averaged so.

        `values` are [sum(response_lengths)].
        """
        return self._mean(self.layout.trained(values)) * self._divisor()

    def _masks(self) -> list[Tensor]:
        return self.layout.lists((self.columns.loss_weights > 0).to(self.columns.rollout_log_probs.dtype))

    def _metrics(self, function: LossFunction, metrics: Any) -> dict[str, Tensor]:
        if not isinstance(metrics, Mapping):
            raise function.refused(metrics, "the loss, or the loss and a dictionary of metrics")
        shape = self.columns.rollout_log_probs.shape
        return {str(name): function.checked(value, str(name), shape).detach() for name, value in metrics.items()}

    def _batch(self) -> dict[str, Any]:
        """The micro-batch by slime's names."""
        layout, columns = self.layout, self.columns
        # The number of trained tokens by which the mean of a sample is divided; all segments of a trajectory count.
        # All tokens of a sample have one weight, except those that a function has masked.
        weights = torch.stack([one.max() for one in layout.lists(columns.loss_weights)])
        divisors = self.total_tokens / (self._divisor() * weights)
        batch: dict[str, Any] = {
            "unconcat_tokens": layout.tokens,
            "total_lengths": layout.total_lengths,
            "response_lengths": layout.response_lengths,
            "loss_masks": self._masks(),
            "rollout_mask_sums": list(divisors),
            "advantages": layout.lists(columns.advantages),
            "log_probs": layout.lists(columns.old_logprobs.detach()),
            "rollout_log_probs": layout.lists(columns.rollout_log_probs),
        }
        if columns.reference_logprobs is not None:
            batch["ref_log_probs"] = layout.lists(columns.reference_logprobs)
        return {name: layout.lists(entries) for name, entries in columns.columns.items()} | batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageColumns:
    """The columns of a micro-batch from which advantages are computed, [m] each."""

    rewards: Tensor
    """What the advantage estimator made of the reward of the token's sample."""
    old_logprobs: Tensor
    """Under the weights before the first optimizer step on the batch."""
    rollout_log_probs: Tensor
    divergences: Tensor
    """Estimate of the KL divergence from the reference model; zeros without a penalty on rewards."""
    reference_logprobs: Tensor | None
    values: Tensor | None
    """The critic's values before the tokens; None if there is no critic."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[m, ...] the entries of each token column of a plug-in, by name."""


Micro = tuple[SampleLayout, AdvantageColumns]
"""A micro-batch of this rank."""


def function_advantages(functions: LossFunctions, batch: Sequence[Micro]) -> list[tuple[Tensor, Tensor | None]]:
    """[m] advantages per micro-batch from the function of `custom_advantage_function_path`, and [m] returns.

    `batch` are all micro-batches of this rank. Returns are None if the function sets none.
    """
    function = functions.advantages
    assert function is not None
    data = _rollout_data(batch)
    function(functions.args, data)
    advantages, returns = (_columns(function, data, name, batch) for name in ("advantages", "returns"))
    if advantages is None:
        raise function.refused(None, "nothing, and set rollout_data['advantages'] to a tensor per sample")
    if returns is None:
        return [(one, None) for one in advantages]
    return list(zip(advantages, returns, strict=True))


def postprocess(
    functions: LossFunctions, rollout_id: int, batch: Sequence[Micro], advantages: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """[m] advantages and masks per micro-batch after the function of `rollout_data_postprocess_path`.

    `batch` are all micro-batches of this rank, and `advantages` [m] those that the function may change. A mask is
    the factor of a token's loss.
    """
    function = functions.postprocess
    assert function is not None
    data = _rollout_data(batch)
    data["advantages"] = [
        one for (layout, _), values in zip(batch, advantages, strict=True) for one in layout.lists(values)
    ]
    data["returns"] = list(data["advantages"])
    function(functions.args, rollout_id, data)
    found = []
    for name in ("advantages", "loss_masks"):
        if (columns := _columns(function, data, name, batch)) is None:
            raise function.refused(None, f"nothing, and leave rollout_data[{name!r}] a tensor per sample")
        found.append(columns)
    return list(zip(*found, strict=True))


def _rollout_data(batch: Sequence[Micro]) -> dict[str, Any]:
    """The samples of all micro-batches by slime's names. Only `groups` is a name of this project."""
    data: dict[str, Any] = {
        "tokens": [tokens for layout, _ in batch for tokens in layout.tokens],
        "total_lengths": [length for layout, _ in batch for length in layout.total_lengths],
        "response_lengths": [length for layout, _ in batch for length in layout.response_lengths],
        "groups": [group for layout, _ in batch for group in layout.groups],
        "rewards": [reward for layout, one in batch for reward in layout.of_samples(one.rewards).tolist()],
        "loss_masks": _lists(batch, lambda one: torch.ones_like(one.rewards)),
        "log_probs": _lists(batch, lambda one: one.old_logprobs),
        "rollout_log_probs": _lists(batch, lambda one: one.rollout_log_probs),
        "kl": _lists(batch, lambda one: one.divergences),
        "ref_log_probs": _lists(batch, lambda one: one.reference_logprobs),
        "values": _lists(batch, lambda one: one.values),
    }
    for name in batch[0][1].columns.keys() - data.keys() if batch else ():
        data[name] = [one for layout, columns in batch for one in layout.lists(columns.columns[name])]
    return data


def _lists(batch: Sequence[Micro], column: Callable[[AdvantageColumns], Tensor | None]) -> list[Tensor] | None:
    """The column of all samples; None if the micro-batches do not have it."""
    pairs = [(layout, column(one)) for layout, one in batch]
    known = [(layout, values) for layout, values in pairs if values is not None]
    return [one for layout, values in known for one in layout.lists(values)] if len(known) == len(pairs) else None


def _columns(function: LossFunction, data: dict[str, Any], name: str, batch: Sequence[Micro]) -> list[Tensor] | None:
    """[m] per micro-batch: what the function has set for all samples."""
    if (found := data.get(name)) is None:
        return None
    lengths = data["response_lengths"]
    if not isinstance(found, Sequence) or len(found) != len(lengths):
        raise function.refused(found, f"nothing, and set rollout_data[{name!r}] to {len(lengths)} tensors")
    what = f"rollout_data[{name!r}][N]"
    checked = iter([function.checked(one, what, [length]) for one, length in zip(found, lengths, strict=True)])
    columns = []
    for layout, one in batch:
        flat = [next(checked) for _ in layout.tokens]
        columns.append(layout.trained(torch.cat(flat)).to(one.rewards.dtype) if flat else one.rewards)
    return columns
