"""What samples have in slime and Miles beyond the fields of `Sample`; `--slime-imports` adds it to the class.

- Names for what a sample has here under other names: `group_index`, `weight_versions`, `effective_response_length`.
- Methods for functions that send their own requests to the router: `append_response_tokens`, `update_from_meta_info`.
- Any other attribute. slime's functions keep values of their own on samples (`sample.tool_call_count = 2`), and clear
  fields that have no counterpart here. The values are in `sample.metadata[ATTRIBUTES]`. They therefore go wherever the
  metadata go: to rewards in other processes, into the store and into recordings. They must be JSON values once the
  reward is computed, and none of them has an effect on the run.

Without `--slime-imports`, a sample refuses attributes that it does not have, so a misspelt name is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from miles_async.adapters.sglang.response import STATUS
from miles_async.types import Sample, VersionSpan

ATTRIBUTES = "slime_attributes"
"""The entry of a sample's metadata that holds the attributes that functions of users have set."""
_UNSET = (
    *("custom_rm_path", "generate_function_path", "session_id", "train_metadata", "routing_key", "reward_spec"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "rollout_indexer_topk"),
    *("multimodal_inputs", "multimodal_train_inputs", "teacher_log_probs", "opd_reverse_kl", "adapter"),
)
"""Fields of slime's and Miles' samples without a counterpart; they are None until a function sets them."""
_FIELDS = frozenset(field.name for field in fields(Sample))
_create = Sample.__init__


def add_names_of_slime() -> None:
    """Add the names of this module to `Sample`, in this process. Later calls change nothing."""
    for name, member in vars(_Names).items():
        if name not in _OF_EACH_CLASS:
            setattr(Sample, name, member)


class _Names:
    """The attributes that `Sample` gets; `self` is a `Sample`."""

    def __init__(self: Any, **values: Any) -> None:
        _create(self, **{name: value for name, value in values.items() if name in _FIELDS})
        for name in values.keys() - _FIELDS:
            setattr(self, name, values[name])

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if hasattr(Sample, name):
            object.__setattr__(self, name, value)
            return
        _set_attribute(self, name, value)

    def __getattr__(self: Any, name: str) -> Any:
        """Called if a sample has neither a field nor a method of this name."""
        if not hasattr(Sample, name) and not name.startswith("__"):
            attributes = self.metadata.get(ATTRIBUTES, {})
            if name in attributes or name in _UNSET:
                return attributes.get(name)
        raise AttributeError(f"sample has no {name!r}, and no function has set it", name=name, obj=self)

    @property
    def group_index(self: Any) -> int | None:
        """The position of the prompt in its data; None if the sample is not from the data of the run."""
        if (given := self.metadata.get(ATTRIBUTES, {}).get("group_index")) is not None:
            return int(given)
        position = str(self.metadata.get("feed_index", "")).rpartition("_")[2]
        return int(position) if position.isdecimal() else None

    @group_index.setter
    def group_index(self: Any, index: int | None) -> None:
        _set_attribute(self, "group_index", index)

    @property
    def weight_versions(self: Any) -> list[str]:
        """The version of each span, as a new list."""
        return [str(span.version) for span in self.spans]

    @weight_versions.setter
    def weight_versions(self: Any, versions: Iterable[Any]) -> None:
        """slime keeps no tokens for its versions, so all tokens get the oldest one."""
        self.spans = _oldest(versions, 0, self.response_length)

    @property
    def effective_response_length(self: Any) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self: Any,
        args: Any = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response, and their entries to its columns.

        Tokens that a model sampled are `trainable`, and have `log_probs` and the `meta_info` of SGLang's answer. Those
        of a tool have neither. The weight version of the tokens, and with `update_terminal_info` the status, come from
        `meta_info`. Lists are extended in place. Raises ValueError for missing or superfluous log-probabilities, and
        for columns of other lengths than the response.
        """
        added, given = _numbers(tokens), None if log_probs is None else _numbers(log_probs)
        before = self.response_length
        if given is not None and len(given) != len(added):
            raise ValueError(f"{len(added)} tokens came with {len(given)} log_probs: pass one per token")
        if added and trainable and (given is None or (before and not self.rollout_log_probs)):
            raise ValueError("sampled tokens need log_probs, also those that the response already has: pass them")
        if added and not trainable and given is not None:
            raise ValueError("tokens that no model sampled have no log_probs: leave them out")
        if added:
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            if not self.rollout_log_probs:
                self.rollout_log_probs = [0.0] * before
            self.spans = _spans(self, len(added), meta_info or {}) if trainable else self.spans
            self.tokens.extend(added)
            self.loss_mask.extend([int(trainable)] * len(added))
            self.rollout_log_probs.extend(given or [0.0] * len(added))
            self.response_length += len(added)
        self.response += text or ""
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)
        self.validate()

    def update_from_meta_info(self: Any, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Set the status to the reason why the engine ended its answer, if `meta_info` has one."""
        kind = meta_info.get("finish_reason", {}).get("type")
        self.status = STATUS.get(kind, self.status)

    def validate(self: Any) -> None:
        """Raises ValueError if a column has another length than the response."""
        if self.response_length > len(self.tokens):
            raise ValueError(f"response_length is {self.response_length}, and there are {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs"):
            column = getattr(self, name)
            # An empty column of log-probabilities stands for a missing one.
            if (column or name == "loss_mask") and column is not None and len(column) != self.response_length:
                raise ValueError(f"{name} has {len(column)} entries; response_length is {self.response_length}")


_OF_EACH_CLASS = frozenset(vars(type("Empty", (), {})))


def _set_attribute(sample: Any, name: str, value: Any) -> None:
    """Set an attribute. None removes one that is None if it is unset."""
    # Copies of the metadata share the dictionary within, so it is replaced.
    attributes = {**sample.metadata.pop(ATTRIBUTES, {}), name: value}
    if value is None and name in (*_UNSET, "group_index"):
        del attributes[name]
    if attributes:
        sample.metadata[ATTRIBUTES] = attributes


def _numbers(values: Any) -> list[Any]:
    """A list, an array or a tensor as a list of numbers."""
    if values is None:
        return []
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _spans(sample: Any, count: int, meta_info: Mapping[str, Any]) -> list[VersionSpan]:
    """The spans of a sample with one for `count` more tokens that a model sampled.

    No spans if the version of a sampled token is unknown. The run then dates the whole response by its beginning.
    """
    before = sample.response_length
    spans = [span for span in sample.spans if span.end <= before]
    if sum(span.end - span.start for span in spans) < sum(sample.loss_mask):
        return []
    reported = meta_info.get("weight_versions") or [{"version": meta_info.get("weight_version")}]
    versions = [one[name] for one in reported for name in ("version", "oldest_keys") if one.get(name) is not None]
    added = _oldest(versions, before, before + count)
    return [*spans, *added] if added else []


def _oldest(versions: Iterable[Any], start: int, end: int) -> list[VersionSpan]:
    """A span with the oldest version, so that no token counts as fresher than it is; none without a version."""
    numbers = [int(version) for version in versions if str(version).isdecimal()]
    return [VersionSpan(min(numbers), start, end)] if numbers and end > start else []
