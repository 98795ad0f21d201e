"""Samples have the attributes of slime's and Miles' samples if `--slime-imports` is set."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from miles_async.columns.column import NO_LIMITS
from miles_async.compat.slime.samples import ATTRIBUTES
from miles_async.sample_schema import accept_values, check_sample
from miles_async.types import Sample, SampleStatus, VersionSpan
from tests.unit.compat.slime_names import names_of_slime


@pytest.fixture
def names() -> Iterator[None]:
    with names_of_slime():
        yield


def pending(**values: Any) -> Any:
    sample = Sample(index=0, prompt="What?", tokens=[1, 2], **values)
    sample.use_lists()
    return sample


def answer(count: int, version: str = "7", reason: str = "stop", **values: Any) -> dict[str, Any]:
    """SGLang's `meta_info` of an answer with this many tokens."""
    spans = [{"version": version, "start": 0, "end": count}]
    return {"finish_reason": {"type": reason}, "weight_version": version, "weight_versions": spans, **values}


def test_a_sample_refuses_attributes_without_the_names_of_slime() -> None:
    with pytest.raises(AttributeError):
        pending().tool_call_count = 2


@pytest.mark.usefixtures("names")
def test_an_attribute_that_a_function_sets_is_kept_with_the_metadata() -> None:
    sample = pending(metadata={"tools": ["search"]})
    sample.tool_call_count = 2
    assert sample.tool_call_count == 2
    assert sample.metadata == {"tools": ["search"], ATTRIBUTES: {"tool_call_count": 2}}
    for copied in (replace(sample), deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert copied.tool_call_count == 2
    accept_values(sample)
    assert Sample.from_dict(sample.to_dict()).tool_call_count == 2  # type: ignore[attr-defined]


@pytest.mark.usefixtures("names")
def test_an_attribute_of_a_copy_is_its_own() -> None:
    sample = pending()
    sample.turns_taken = 1
    copied: Any = replace(sample, metadata=dict(sample.metadata))
    copied.turns_taken = 2
    assert (sample.turns_taken, copied.turns_taken) == (1, 2)


@pytest.mark.usefixtures("names")
def test_a_field_of_slime_without_a_counterpart_is_none_until_a_function_sets_it() -> None:
    sample = pending()
    assert sample.session_id is sample.train_metadata is sample.custom_rm_path is sample.generate_function_path is None
    sample.rollout_top_p_token_ids = None
    assert sample.metadata == {}
    sample.session_id = "a session"
    assert sample.session_id == "a session"
    sample.session_id = None
    assert sample.metadata == {}


@pytest.mark.usefixtures("names")
def test_a_name_that_neither_slime_nor_a_function_has_set_is_an_error() -> None:
    sample = pending()
    with pytest.raises(AttributeError, match="sample has no 'tool_calls', and no function has set it"):
        _ = sample.tool_calls
    with pytest.raises(AttributeError):
        sample.prompt_length = 3


@pytest.mark.usefixtures("names")
def test_the_fields_of_a_sample_stay_its_fields() -> None:
    create: Any = Sample
    sample = create(index=3, prompt="What?", group_index=1, rollout_id=4, session_id="a session")
    assert (sample.index, sample.group_index, sample.trajectory, sample.session_id) == (3, 1, 4, "a session")
    sample.response = "text"
    assert "response" not in sample.metadata.get(ATTRIBUTES, {})


@pytest.mark.usefixtures("names")
def test_the_position_of_the_prompt_in_the_data_is_the_group_index() -> None:
    assert pending(metadata={"feed_index": "sample_2_14"}).group_index == 14
    assert pending().group_index is None


@pytest.mark.usefixtures("names")
def test_weight_versions_are_those_of_the_spans() -> None:
    sample = pending(response_length=2, spans=[VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)])
    assert sample.weight_versions == ["3", "4"]
    sample.weight_versions = ["5", "4"]
    assert sample.spans == [VersionSpan(4, 0, 2)]
    sample.weight_versions = []
    assert sample.spans == []


@pytest.mark.usefixtures("names")
def test_the_effective_length_is_the_number_of_trained_tokens() -> None:
    assert pending(response_length=3).effective_response_length == 3
    assert pending(response_length=3, loss_mask=[1, 0, 1]).effective_response_length == 2


@pytest.mark.usefixtures("names")
def test_a_response_of_two_turns_and_a_tool_is_appended() -> None:
    sample = pending()
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.1, -0.2], meta_info=answer(2), text="ab")
    assert sample.status == "completed"
    sample.append_response_tokens(tokens=[8], trainable=False, text="!")
    sample.append_response_tokens(tokens=[9], log_probs=[-0.3], meta_info=answer(1, "8", "length"), text="c")
    assert sample.tokens == [1, 2, 5, 6, 8, 9]
    assert (sample.response, sample.response_length, sample.loss_mask) == ("ab!c", 4, [1, 1, 0, 1])
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, -0.3]
    assert sample.spans == [VersionSpan(7, 0, 2), VersionSpan(8, 3, 4)]
    assert sample.status is SampleStatus.TRUNCATED
    check_sample(sample, NO_LIMITS, newest_version=8)


@pytest.mark.usefixtures("names")
def test_the_lists_of_a_function_are_extended_in_place() -> None:
    sample = pending()
    mask: list[int] = []
    sample.loss_mask = mask
    sample.rollout_log_probs = None
    sample.append_response_tokens(tokens=[5], log_probs=[-0.1], meta_info=answer(1))
    assert mask == [1]


@pytest.mark.usefixtures("names")
def test_tokens_have_the_oldest_version_of_weights_or_keys_that_the_engine_reports() -> None:
    sample = pending()
    spans = [{"version": "8", "start": 0, "end": 1, "oldest_keys": "6"}, {"version": "9", "start": 1, "end": 2}]
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.1, -0.1], meta_info=answer(2, weight_versions=spans))
    assert sample.spans == [VersionSpan(6, 0, 2)]


@pytest.mark.usefixtures("names")
def test_a_response_with_a_token_of_unknown_version_has_no_spans_so_that_its_beginning_dates_it() -> None:
    sample = pending()
    sample.append_response_tokens(tokens=[5], log_probs=[-0.1], meta_info={})
    sample.append_response_tokens(tokens=[6], log_probs=[-0.1], meta_info=answer(1))
    assert sample.spans == []


@pytest.mark.usefixtures("names")
def test_spans_of_a_response_that_a_function_has_discarded_are_forgotten() -> None:
    sample = pending()
    sample.append_response_tokens(tokens=[5], log_probs=[-0.1], meta_info=answer(1, "3"))
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [1, 2], 0, [], None
    sample.append_response_tokens(tokens=[6, 7], log_probs=[-0.1, -0.1], meta_info=answer(2, "4"))
    assert sample.spans == [VersionSpan(4, 0, 2)]


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"tokens": [5]}, "need log_probs"),
        ({"tokens": [5], "log_probs": [-0.1, -0.2]}, "1 tokens came with 2 log_probs"),
        ({"tokens": [5], "log_probs": [0.0], "trainable": False}, "no log_probs: leave them out"),
    ],
)
def test_tokens_without_the_log_probabilities_that_they_need_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        pending().append_response_tokens(**given)


@pytest.mark.usefixtures("names")
def test_a_column_of_another_length_than_the_response_is_refused() -> None:
    sample = pending(response_length=1, loss_mask=[1, 1])
    with pytest.raises(ValueError, match="loss_mask has 2 entries; response_length is 1"):
        sample.validate()
