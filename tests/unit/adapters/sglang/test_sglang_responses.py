"""What is read from an engine's answer, and which answers are refused."""

from __future__ import annotations

import math
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fake_engine import answer as fake_answer
from miles_async.adapters.sglang.plugin import PACKED, pack_logprobs
from miles_async.adapters.sglang.response import continued_text, extend
from miles_async.adapters.storage.encoding import pack_samples, sample_values, unpack_samples
from miles_async.errors import TrajectoryError
from miles_async.recording import shift_versions
from miles_async.sample_schema import decode_answers
from miles_async.types import Group, Sample, SampleStatus, VersionSpan


def answer(ids: list[int], versions: list[tuple[str, int, int]], finish: str = "stop") -> dict[str, Any]:
    return {
        "text": "engine text",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in versions],
        },
    }


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def test_an_answer_is_appended_with_its_versions() -> None:
    sample = Sample(tokens=[1, 2])
    extend(sample, answer([7, 8, 9], [("3", 0, 2), ("4", 2, 3)], "length"), decode)
    assert sample.tokens == [1, 2, 7, 8, 9]
    assert sample.response_length == 3
    assert sample.prompt_length == 2
    assert sample.rollout_log_probs == [-0.5] * 3
    assert sample.spans == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.response == "engine text"


def test_a_continuation_shifts_its_spans_and_joins_those_of_one_version() -> None:
    sample = Sample(tokens=[1])
    extend(sample, answer([65, 66], [("3", 0, 2)], "abort"), decode)
    aborted = sample.status
    extend(sample, answer([67, 68], [("3", 0, 1), ("5", 1, 2)]), decode)
    assert sample.spans == [VersionSpan(3, 0, 3), VersionSpan(5, 3, 4)]
    assert sample.response == "ABCD"
    assert (aborted, sample.status) == (SampleStatus.ABORTED, SampleStatus.COMPLETED)


def test_an_answer_says_which_tokens_were_sampled_with_keys_of_older_versions() -> None:
    sample = Sample(tokens=[1] * 10)
    kept = answer([65, 66, 67], [("3", 0, 1), ("4", 1, 2), ("5", 2, 3)])
    kept["meta_info"]["weight_versions"][1]["oldest_keys"] = "3"
    extend(sample, kept, decode)
    # The request kept its prompt and one token at the publish of version 4, and was computed again by version 5.
    assert sample.spans == [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2, 3, 11), VersionSpan(5, 2, 3)]

    next_turn = answer([68], [("6", 0, 1)])
    next_turn["meta_info"] |= {"cached_tokens": 9}
    next_turn["meta_info"]["weight_versions"][0]["oldest_keys"] = "5"
    extend(sample, next_turn, decode)
    assert sample.spans[3:] == [VersionSpan(6, 3, 4, 5, 9)]
    group = Group([sample])
    assert group.versions == {3, 4, 5, 6}
    assert unpack_samples(bytes(pack_samples([sample_values(sample)]))) == group
    assert shift_versions(sample.spans, -1)[1:3] == [VersionSpan(3, 1, 2, 2), VersionSpan(4, 2, 3)]


@given(text=st.binary(max_size=100), cut=st.integers(0, 100))
def test_the_text_of_a_continued_response_is_that_of_all_its_tokens(text: bytes, cut: int) -> None:
    def decode(ids: list[int]) -> str:
        # Like some tokenizers, it drops a space at the start.
        return bytes(ids).decode(errors="replace").removeprefix(" ")

    before, ids = list(text[:cut]), list(text[cut:])
    sample = Sample(tokens=[1, *before], response_length=len(before), response=decode(before))
    assert continued_text(sample, ids, decode) == decode([*before, *ids])


@pytest.mark.parametrize("cut_after", [0, 3], ids=["first attempt", "continued attempt"])
def test_a_reward_sees_the_stop_string_as_the_tokens_have_it(cut_after: int) -> None:
    ids = list(b"<answer>7</answer>\n")
    sample = Sample(tokens=[1])
    if cut_after:
        extend(sample, answer(ids[:cut_after], [("3", 0, cut_after)], "abort"), decode)
    rest = answer(ids[cut_after:], [("3", 0, len(ids) - cut_after)])
    rest["meta_info"]["finish_reason"]["matched"] = "</answer>"
    extend(sample, rest, decode)
    assert sample.response == "<answer>7</answer>\n"


def test_the_token_that_ended_a_response_leaves_the_text_of_the_engine() -> None:
    sample = Sample(tokens=[1])
    ended = answer([7, 2], [("3", 0, 2)])
    ended["meta_info"]["finish_reason"]["matched"] = 2
    extend(sample, ended, decode)
    assert sample.response == "engine text"


def test_a_sample_aborted_before_its_first_token_has_no_span() -> None:
    sample = Sample(tokens=[1])
    extend(sample, answer([], [("3", 0, 0)], "abort"), decode)
    assert sample.spans == []
    assert sample.tokens == [1]
    assert sample.status is SampleStatus.ABORTED


@pytest.mark.parametrize(
    "versions",
    [
        pytest.param([("default", 0, 3)], id="an engine that was never given a version"),
        pytest.param([], id="no versions at all"),
        pytest.param([("3", 0, 2)], id="a token without a version"),
        pytest.param([("3", 0, 1), ("4", 2, 3)], id="a gap between versions"),
    ],
)
def test_tokens_of_unknown_age_are_refused_and_the_sample_is_unchanged(versions: list[tuple[str, int, int]]) -> None:
    sample = Sample(tokens=[1, 2])
    with pytest.raises(TrajectoryError, match="integer version"):
        extend(sample, answer([7, 8, 9], versions), decode)
    assert sample == Sample(tokens=[1, 2])


def test_tokens_without_log_probabilities_are_refused() -> None:
    short = answer([7, 8], [("3", 0, 2)])
    short["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(TrajectoryError, match="2 tokens came with 1 log-probabilities"):
        extend(Sample(tokens=[1]), short, decode)


def packed(logprobs: list[float | None]) -> dict[str, Any]:
    """An answer whose log-probabilities the engine's hook has packed."""
    ids = list(range(7, 7 + len(logprobs)))
    reported = answer(ids, [("3", 0, len(ids))])
    reported["meta_info"]["id"] = f"{PACKED}1-0"
    state = SimpleNamespace(output_token_logprobs_val=logprobs)
    pack_logprobs(lambda *_: None, None, reported["meta_info"], state, 0, None, False)
    return reported


def test_packed_log_probabilities_are_those_of_the_engine() -> None:
    sample = Sample(tokens=[1])
    values = [-0.1, -12.345678, 0.0]
    [reported] = decode_answers(orjson.dumps([packed([*values])])) or []
    extend(sample, reported, decode)
    assert sample.rollout_log_probs == np.array(values, np.float32).tolist()
    sample.rollout_log_probs[0] = -1.0


@pytest.mark.parametrize("missing", [None, math.nan, -math.inf])
def test_a_packed_token_without_a_log_probability_is_refused(missing: float | None) -> None:
    with pytest.raises(TrajectoryError, match="sampled a token without a log-probability"):
        extend(Sample(tokens=[1]), packed([-0.5, missing]), decode)


def test_packed_log_probabilities_that_are_cut_off_are_refused() -> None:
    reported = packed([-0.5, -0.25])
    reported["meta_info"]["output_token_logprobs"] = b64encode(b"123456").decode()
    with pytest.raises(TrajectoryError, match="2 tokens came with 1 log-probabilities"):
        extend(Sample(tokens=[1]), reported, decode)


def test_only_the_log_probabilities_of_requests_that_ask_for_it_are_packed() -> None:
    meta: dict[str, Any] = {"id": "another-program"}
    pack_logprobs(lambda _, meta, *__: meta.update(output_token_logprobs=[(-0.5, 7, None)]), None, meta, None)
    assert meta["output_token_logprobs"] == [(-0.5, 7, None)]


def test_an_answer_after_tool_output_is_trained_and_has_a_separate_span() -> None:
    sample = Sample(
        tokens=[1, 7, 8],
        response_length=2,
        rollout_log_probs=[-0.1, 0.0],
        loss_mask=[1, 0],
        spans=[VersionSpan(3, 0, 1)],
    )
    extend(sample, answer([65, 66], [("3", 0, 2)]), decode)
    assert sample.loss_mask == [1, 0, 1, 1]
    assert sample.spans == [VersionSpan(3, 0, 1), VersionSpan(3, 2, 4)]


def test_the_fake_engine_of_the_benchmarks_returns_all_fields_that_are_read() -> None:
    sample = Sample(tokens=[1])
    extend(sample, fake_answer("a", 1, 5), decode)
    assert (sample.response_length, sample.status, sample.spans[0].version) == (5, SampleStatus.TRUNCATED, 0)
