"""The tokens that top-p and top-k kept travel from the engine's answer to the learner's batch, or are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.plugin import request_sampling_masks
from miles_async.adapters.sglang.response import extend
from miles_async.adapters.storage.recording_store import RecordingStore
from miles_async.adapters.storage.rollout_file import load_groups, save_groups
from miles_async.batching.batch import policy_steps, repack_for_forward
from miles_async.columns.column import SampleLimits
from miles_async.errors import TrajectoryError
from miles_async.recording import GroupRecord, Recording
from miles_async.sample_schema import check_group, check_sample, check_stored
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Group, Sample, VersionSpan
from tests.configuration import run_config
from tests.unit.byte_tokenizer import Bytes
from workers.specs import greedy_of, sampling_of

REQUIRED = SampleLimits(vocabulary=256, sampling_masks=True)


def mask_of(*rows: list[int]) -> SamplingMask:
    return SamplingMask.from_rows(rows)


def sample(index: int = 0, **fields: Any) -> Sample:
    values: dict[str, Any] = {
        "index": index,
        "tokens": [1, 7, 8, 9],
        "response_length": 3,
        "rollout_log_probs": [-0.1, 0.0, -0.3],
        "loss_mask": [1, 0, 1],
        "sampling_mask": mask_of([7, 3], [], [2, 9, 4]),
        "spans": [VersionSpan(0, 0, 1), VersionSpan(0, 2, 3)],
        "reward": float(index),
    }
    return Sample(**(values | fields))


def answer(ids: list[int], **meta: Any) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-9.0, token, None] for token in ids],
            "output_token_sampling_logprobs": [-0.5] * len(ids),
            "output_token_sampling_mask": [[token, 3] for token in ids],
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
            **meta,
        },
    }


def decode(ids: list[int]) -> str:
    return ""


# --- the mask itself -------------------------------------------------------------------------------------------------


def test_a_mask_gives_back_its_rows_and_those_of_chosen_tokens() -> None:
    mask = mask_of([7, 3], [], [2, 9, 4])
    assert mask.rows() == [[7, 3], [], [2, 9, 4]]
    assert mask.take(np.array([2, 0])) == mask_of([2, 9, 4], [7, 3])
    assert mask.take(np.array([], np.int64)) == SamplingMask.empty(0)
    assert SamplingMask.concatenate([mask, SamplingMask.empty(1), mask_of([1])]).rows() == [*mask.rows(), [], [1]]
    assert mask.keeps(np.array([3, 3, 3])).tolist() == [True, False, False]
    assert mask != mask_of([7, 3])


# --- what an engine answers ------------------------------------------------------------------------------------------


def test_the_mask_and_the_renormalized_log_probabilities_of_an_answer_are_kept() -> None:
    grown = Sample(tokens=[1])
    extend(grown, answer([7, 8]), decode, sampling_mask=True)
    extend(grown, answer([9]), decode, sampling_mask=True)
    assert grown.sampling_mask == mask_of([7, 3], [8, 3], [9, 3])
    assert grown.rollout_log_probs == [-0.5] * 3


def test_an_evaluation_ignores_the_mask() -> None:
    evaluated = Sample(tokens=[1])
    extend(evaluated, answer([7]), decode)
    assert (evaluated.sampling_mask, evaluated.rollout_log_probs) == (None, [-9.0])


@pytest.mark.parametrize(
    "meta, complaint",
    [
        ({"output_token_sampling_mask": None}, "the engine returned no sampling mask"),
        ({"output_token_sampling_logprobs": None}, "the engine returned no sampling mask"),
        ({"output_token_sampling_mask": [[7]]}, "2 tokens came with 1 sampling masks"),
        ({"output_token_sampling_logprobs": [-0.5]}, "2 tokens came with 1 log-probabilities"),
        ({"output_token_sampling_mask": [[7], None]}, r"output_token_sampling_mask\[1\]: expected array, got null"),
    ],
)
def test_an_answer_without_a_whole_mask_is_refused_and_the_sample_is_unchanged(
    meta: dict[str, Any], complaint: str
) -> None:
    asked = Sample(index=6, tokens=[1])
    with pytest.raises(TrajectoryError, match=f"sample 6: .*{complaint}"):
        extend(asked, answer([7, 8], **meta), decode, sampling_mask=True)
    assert asked == Sample(index=6, tokens=[1])


def test_an_answer_that_was_aborted_before_its_first_token_needs_no_mask() -> None:
    aborted = Sample(tokens=[1])
    missing = {"output_token_sampling_mask": None, "output_token_sampling_logprobs": None}
    extend(aborted, answer([], **missing, finish_reason={"type": "abort"}), decode, sampling_mask=True)
    assert aborted.sampling_mask == SamplingMask.empty(0)


def test_tool_output_has_no_kept_tokens() -> None:
    turn = Sample(tokens=[1])
    extend(turn, answer([7]), decode, sampling_mask=True)
    engine: Any = SimpleNamespace(sampling=SamplingParams(max_new_tokens=9))
    MultiTurnSampler(engine, Bytes()).observe_ids(turn, [65, 66])
    extend(turn, answer([8]), decode, sampling_mask=True)
    assert turn.sampling_mask == mask_of([7, 3], [], [], [8, 3])
    check_group(Group([turn]), REQUIRED, 0)


class Arguments:
    sampling_mask_max_tokens = 4096
    speculative_algorithm: str | None = None


class Manager:
    def __init__(self) -> None:
        self.server_args = Arguments()


class Request:
    def __init__(self, params: Any) -> None:
        self.sampling_params, self.return_sampling_mask = params, None


@pytest.mark.parametrize(
    "params, is_requested",
    [
        ({"top_k": 2}, True),
        ([{"top_k": 4096}, {"top_k": 20}], True),
        ([{"top_k": 4096}, {}], False),
        ({"top_k": 4097}, False),
        ({"top_k": 1}, False),
        ({"top_k": -1, "top_p": 0.9}, False),
        (None, False),
    ],
)
def test_engines_return_masks_only_for_requests_that_sglang_accepts(params: Any, is_requested: bool) -> None:
    manager, request = Manager(), Request(params)
    request_sampling_masks(manager, request)
    assert request.return_sampling_mask is (True if is_requested else None)


def test_engines_with_speculative_decoding_return_no_masks() -> None:
    manager, request = Manager(), Request({"top_k": 20})
    manager.server_args.speculative_algorithm = "EAGLE"
    request_sampling_masks(manager, request)
    assert request.return_sampling_mask is None


def test_engines_of_older_versions_are_not_asked_for_masks() -> None:
    request = Request({"top_k": 20})
    request_sampling_masks(SimpleNamespace(server_args=SimpleNamespace()), request)
    assert request.return_sampling_mask is None


# --- which samples are refused ---------------------------------------------------------------------------------------


def test_a_mask_of_lists_is_converted() -> None:
    posted = sample(sampling_mask=[[7, 3], [], [2, 9, 4]])
    check_sample(posted, REQUIRED, None)
    assert posted == sample()


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"sampling_mask": None}, "no sampling mask, although rollout_top_p or rollout_top_k limits"),
        ({"sampling_mask": [[7], []]}, "sampling_mask has 2 entries; response_length is 3"),
        ({"sampling_mask": [[7], [], [8]]}, "of response token 2 does not contain the token itself"),
        ({"sampling_mask": [[7], [], []]}, "of response token 2 does not contain the token itself"),
        ({"sampling_mask": [[7], [], [9, 256]]}, "sampling_mask: token 256 is outside the vocabulary of 256"),
        ({"sampling_mask": [[7], [], [9, -1]]}, r"sampling_mask\[2\]\[1\]: expected int >= 0"),
        ({"sampling_mask": [[7], [], [9, 9]]}, "names a token twice"),
        ({"rollout_log_probs": []}, "sampling_mask is set without rollout_log_probs"),
    ],
)
def test_an_invalid_mask_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TrajectoryError, match=f"sample 0: .*{complaint}"):
        check_sample(sample(**fields), REQUIRED, None)


def test_generated_and_stored_samples_are_checked_too() -> None:
    unmasked = sample(sampling_mask=None)
    with pytest.raises(TrajectoryError, match="no sampling mask"):
        check_group(Group([unmasked]), REQUIRED, 0)
    with pytest.raises(TrajectoryError, match="no sampling mask"):
        check_stored([unmasked], REQUIRED, 0)


def test_a_mask_is_refused_by_a_run_that_trains_the_whole_distribution() -> None:
    with pytest.raises(TrajectoryError, match="set rollout_top_p and rollout_top_k as the sample was sampled"):
        check_sample(sample(), replace(REQUIRED, sampling_masks=False), None)
    check_sample(sample(), replace(REQUIRED, sampling_masks=None), None)


def test_a_sample_without_trained_tokens_needs_no_mask() -> None:
    check_sample(sample(sampling_mask=None, loss_mask=[0, 0, 0]), REQUIRED, None)


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_saved_batches_and_recordings_keep_the_mask(tmp_path: Path) -> None:
    members = [sample(), sample(1, sampling_mask=None), sample(2, sampling_mask=mask_of([7], [], [9]))]
    save_groups(tmp_path / "0", 0, [Group(members)])
    assert load_groups(tmp_path / "0") == (0, [Group(members)])
    for member in members:
        member.reward = None  # recordings hold no rewards
    group = GroupRecord(feed_index="a", prompt="hash", version=0, seconds=1.0, samples=members)
    RecordingStore(tmp_path / "skip").save(0, Recording(groups=[group]), {})
    [loaded] = RecordingStore(tmp_path / "skip").load(0).recording.groups
    assert list(loaded.samples) == members
    replayed = Group([Sample(tokens=[1]) for _ in members])
    loaded.replay_into(replayed, 0)
    assert [one.sampling_mask for one in replayed] == [one.sampling_mask for one in members]


def test_a_sample_as_plain_data_keeps_the_mask() -> None:
    assert Sample.from_dict(sample().to_dict()) == sample()
    without = {name: value for name, value in sample().to_dict().items() if name != "sampling_mask"}
    assert Sample.from_dict(without).sampling_mask is None


def test_a_reset_discards_the_mask() -> None:
    discarded = sample()
    discarded.reset()
    assert discarded.sampling_mask is None


# --- what the learner is handed --------------------------------------------------------------------------------------


def test_each_trained_token_has_its_kept_tokens_also_in_rows() -> None:
    group = Group([sample(i, sampling_mask=mask_of([7, 10 + i], [], [9, 20 + i, 30 + i])) for i in range(5)])
    config = run_config(max_tokens_per_gpu=9)
    [[step]] = policy_steps([group], config, ranks=1)
    assert len(step.micro_batches) > 1
    kept = []
    for batch in step.micro_batches:
        mask = batch.columns["sampling_mask"]
        assert mask.keeps(batch.tokens[batch.targets]).all()
        kept += mask.rows()
    rows = config.learner.model_copy(
        update={"use_dynamic_batching_in_infer": True, "sequence_length_round_in_infer": 3}
    )
    for part in repack_for_forward(step.micro_batches, rows):
        assert part.batch.columns["sampling_mask"].rows() == [kept[i] for i in part.target_indices]


def test_samples_with_and_without_a_mask_are_not_trained_together() -> None:
    with pytest.raises(TrajectoryError, match="sample 1 has no sampling mask, but other samples of the batch have one"):
        policy_steps([Group([sample(), sample(1, sampling_mask=None)])], run_config(), ranks=1)
    removed = sample(1, sampling_mask=None, remove_sample=True)
    [[step]] = policy_steps([Group([sample(), removed])], run_config(), ranks=1)
    assert len(step.micro_batches[0].targets) == 2


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, top_k",
    [
        ({"rollout_top_p": 0.9}, 2048),
        ({"rollout_top_p": 0.9, "sglang_server_args": {"sampling-mask-max-tokens": 100}}, 50),
        ({"rollout_top_p": 0.9, "rollout_top_k": 20}, 20),
        ({"rollout_top_k": 20}, 20),
        ({}, -1),
        ({"rollout_top_p": 0.9, "rollout_temperature": 0.0}, -1),
    ],
)
def test_top_p_alone_is_sampled_with_the_top_k_that_a_mask_needs(settings: dict[str, Any], top_k: int) -> None:
    config = run_config(**settings)
    assert sampling_of(config).top_k == top_k
    assert greedy_of(config).top_k == -1
