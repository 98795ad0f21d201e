"""Invalid samples, answers and posts are refused by name, and the run continues."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from miles_async.adapters.agents.endpoint import AgentEndpoint
from miles_async.adapters.agents.trajectories import TrajectoryBuffer
from miles_async.adapters.sglang.client import Decode
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.response import extend
from miles_async.batching.layout import longest_sequence
from miles_async.columns.column import SampleLimits
from miles_async.config.fields import with_settings
from miles_async.config.schema import Learner, Rollout, RunConfig
from miles_async.config.schema.data import TrainDataset
from miles_async.errors import PromptTooLongError, TrajectoryError, UserError
from miles_async.rollout.contract import RolloutFunctionAdapter, flat_args
from miles_async.sample_schema import check_group, check_sample, decode_answers
from miles_async.types import FROM_DATASET, Group, Prompt, Sample, VersionSpan
from tests.configuration import run_config
from tests.sim.world import DirectJournal, Trace
from workers.specs import sample_limits

LIMITS = SampleLimits(vocabulary=100, longest=8)
NEWEST = 4
HUGE = 10**10


def finished(**fields: Any) -> Sample:
    values: dict[str, Any] = {
        "index": 6,
        "tokens": [1, 2, 3],
        "response_length": 2,
        "rollout_log_probs": [-0.1, -0.2],
        "spans": [VersionSpan(NEWEST, 0, 2)],
        "reward": 1.0,
    }
    return Sample(**(values | fields))


INVALID = [
    ({"tokens": [1, 2, "a"]}, "tokens[2]: expected int, got str"),
    ({"tokens": [1, 2, -3]}, "tokens[2]: -3 is not between 0 and 2147483647"),
    ({"tokens": [1, 2, 100]}, "token 100 is outside the vocabulary of 100 tokens"),
    ({"tokens": None}, "tokens: expected array, got null"),
    ({"tokens": [1] * 9}, "9 tokens, and a micro-batch of the learner holds at most 8; raise max_tokens_per_gpu"),
    ({"response_length": HUGE}, f"tokens has 3 entries, fewer than response_length {HUGE}"),
    ({"response_length": 3}, "tokens contains no prompt"),
    ({"response_length": "2"}, "response_length: expected int, got str"),
    ({"rollout_log_probs": [-0.1, None]}, "rollout_log_probs[1]: expected float, got null"),
    ({"rollout_log_probs": [-0.1, float("nan")]}, "rollout_log_probs[1] is not finite"),
    ({"loss_mask": [1]}, "loss_mask has 1 entries; response_length is 2"),
    ({"loss_mask": [1, 2]}, "loss_mask[1]: 2 is not between 0 and 1"),
    ({"spans": [VersionSpan(NEWEST + 1, 0, 2)]}, "weight version 5 does not exist; the newest version is 4"),
    ({"spans": [VersionSpan(NEWEST, 0, 3)]}, "one covers [0, 3) of 2 tokens"),
]


@pytest.mark.parametrize("fields, complaint", INVALID)
def test_an_invalid_sample_is_refused_with_the_name_of_the_field(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TrajectoryError) as error:
        check_sample(finished(**fields), LIMITS, NEWEST)
    assert str(error.value).startswith("sample 6: ")
    assert complaint in str(error.value)


def test_arrays_and_flags_are_converted() -> None:
    sample = finished(tokens=np.array([1, 2, 3]), rollout_log_probs=np.array([-0.1, -0.2]), loss_mask=[True, 0.0])
    check_sample(sample, LIMITS, NEWEST)
    assert (sample.tokens, sample.rollout_log_probs, sample.loss_mask) == ([1, 2, 3], [-0.1, -0.2], [1, 0])
    assert type(sample.tokens[0]) is int


@pytest.mark.parametrize(
    "settings, is_refused",
    [
        ({"rollout_temperature": 1.0}, False),
        ({"rollout_temperature": 0.0}, False),
        ({"rollout_temperature": 0.7, "loss_type": "sft_loss"}, False),
        ({"rollout_temperature": 0.7}, True),
    ],
)
def test_missing_log_probabilities_are_refused_at_a_temperature_at_which_engines_cannot_compute_them(
    tmp_path: Path, settings: dict[str, Any], is_refused: bool
) -> None:
    limits = sample_limits(run_config(**settings), str(tmp_path))
    check_sample(finished(), limits, NEWEST)
    check_sample(finished(rollout_log_probs=[], loss_mask=[0, 0]), limits, NEWEST)
    refusal: Any = pytest.raises(TrajectoryError, match=r"at temperature 1: use args\.turns")
    with refusal if is_refused else nullcontext():
        check_sample(finished(rollout_log_probs=[]), limits, NEWEST)


def test_a_generated_group_of_a_future_version_or_of_too_many_tokens_is_refused() -> None:
    check_group(Group([finished()]), LIMITS, NEWEST)
    with pytest.raises(TrajectoryError, match="weight version 4 does not exist"):
        check_group(Group([finished()]), LIMITS, NEWEST - 1)
    with pytest.raises(TrajectoryError, match="a micro-batch of the learner holds at most 2"):
        check_group(Group([finished()]), SampleLimits(longest=2), NEWEST)


@pytest.mark.parametrize(
    "learner, longest",
    [
        (Learner(max_tokens_per_gpu=100), 100),
        (Learner(max_tokens_per_gpu=101, context_parallel_size=2, actor_num_gpus_per_node=2), 200),
        (
            Learner(
                max_tokens_per_gpu=500,
                use_dynamic_batching_in_train=True,
                max_tokens_per_microbatch_in_train=300,
                sequence_length_round_in_train=128,
            ),
            256,
        ),
    ],
)
def test_the_longest_sequence_is_the_capacity_of_a_micro_batch(learner: Learner, longest: int) -> None:
    assert longest_sequence(learner) == longest


def reported(**meta: Any) -> dict[str, Any]:
    return {
        "text": "ab",
        "output_ids": [7, 8],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None]],
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
            **meta,
        },
    }


@pytest.mark.parametrize(
    "answer, complaint",
    [
        (reported(output_token_logprobs=[[-0.5, 7, None], [None, 8, None]]), r"output_token_logprobs\[1\]\[0\]"),
        (reported(output_token_logprobs=None), "output_token_logprobs: expected bytes | array, got null"),
        (reported(finish_reason=None), "finish_reason: expected object, got null"),
        (reported() | {"output_ids": [7, "8"]}, r"output_ids\[1\]: expected int, got str"),
        ({"error": "no"}, "object missing required field output_ids"),
        ("no", "expected object, got str"),
    ],
)
def test_an_invalid_answer_of_an_engine_fails_only_its_group(answer: Any, complaint: str) -> None:
    sample = Sample(index=6, tokens=[1])
    with pytest.raises(TrajectoryError, match=f"sample 6: the engine's answer: .*{complaint}"):
        extend(sample, answer, lambda ids: "")
    assert sample == Sample(index=6, tokens=[1])


def test_reading_an_answer_in_one_pass_or_in_two_gives_the_same_sample() -> None:
    answer = reported(output_token_logprobs=[[-0.5, 7, None], [-1, 8, "b"]])
    in_one_pass = decode_answers(orjson.dumps([answer]))
    assert in_one_pass is not None
    samples = Sample(index=6, tokens=[1]), Sample(index=6, tokens=[1])
    for sample, given in zip(samples, (in_one_pass[0], answer), strict=True):
        extend(sample, given, lambda ids: "")
    assert samples[0] == samples[1]
    assert samples[0].rollout_log_probs == [-0.5, -1.0]


@pytest.mark.parametrize(
    "content", [b"[", b"{}", b"[{}]", orjson.dumps([reported(), reported(output_token_logprobs=None)])]
)
def test_invalid_answers_are_left_to_the_check_that_names_the_sample(content: bytes) -> None:
    assert decode_answers(content) is None


class Tokenizer:
    """One token per byte."""

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        return list(str(prompt).encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode()


class Answers:
    """A connection to an engine that gives one answer to every request."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def post(self, url: str, body: Any, *, key: str, within: float, decode: Decode | None = None) -> Any:
        decoded = None if decode is None else decode(orjson.dumps(self.answer))
        return self.answer if decoded is None else decoded

    async def close(self) -> None:
        pass


def with_engine(answer: Any, use: Any, **settings: Any) -> None:
    async def story() -> None:
        engine = SGLangGenerator(
            "http://127.0.0.1:1",
            Tokenizer(),
            SamplingParams(max_new_tokens=9),
            limit=lambda: 4,
            engines=list,
            **settings,
        )
        await engine.close()
        engine._client = Answers(answer)  # type: ignore[assignment]
        await use(engine)

    asyncio.run(story())


@pytest.mark.parametrize("answer", [{"error": "no"}, [], [reported(), reported()]])
def test_an_answer_with_another_number_of_samples_fails_only_its_group(answer: Any) -> None:
    async def use(engine: SGLangGenerator) -> None:
        with pytest.raises(TrajectoryError, match="did not answer with a list of 1 samples"):
            await engine.generate(Group([Sample(index=6, prompt="Q")]))

    with_engine(answer, use)


def test_scored_tokens_without_a_log_probability_are_refused() -> None:
    async def use(engine: SGLangGenerator) -> None:
        with pytest.raises(TrajectoryError, match="the engine scored 1 of 2 response tokens"):
            await engine.score_logprobs(finished(rollout_log_probs=[]))

    with_engine({"meta_info": {"input_token_logprobs": [[None, 2, None], [-0.5, 3, None]]}}, use)


def test_a_prompt_that_leaves_no_room_for_a_response_is_too_long() -> None:
    async def use(engine: SGLangGenerator) -> None:
        with pytest.raises(PromptTooLongError, match=r"its prompt alone has 9 tokens, .* holds at most 9; raise"):
            await engine.generate(Group([Sample(index=6, prompt="Q" * 9)]))

    with_engine([], use, longest_sample=9)


POSTED: dict[str, Any] = {
    "tokens": [1, 2, 3],
    "response_length": 2,
    "rollout_log_probs": [-0.1, -0.2],
    "weight_versions": [{"version": "4", "start": 0, "end": 2}],
    "reward": 1,
}


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"response_length": HUGE}, f"3 tokens, {HUGE} of them response"),
        ({"tokens": ["a", "b", "c"]}, "tokens[0]: expected int, got str"),
        ({"tokens": [1, 2, 100]}, "outside the vocabulary"),
        ({"tokens": [1] * 9}, "holds at most 8"),
        ({"weight_versions": [{"version": "5", "start": 0, "end": 2}]}, "weight version 5 does not exist"),
        ({"weight_versions": [{"version": "new", "start": 0, "end": 2}]}, "a weight version is not a number"),
        ({"rollout_log_probs": [-0.1, None]}, "rollout_log_probs[1]: expected float, got null"),
        ({"session": [1]}, "session: expected str | null, got array"),
    ],
)
def test_an_invalid_post_is_answered_with_an_error_and_changes_nothing(fields: dict[str, Any], complaint: str) -> None:
    async def story() -> None:
        buffer = TrajectoryBuffer(2, 1, log=DirectJournal(Trace()), limits=LIMITS, newest_version=lambda: NEWEST)
        endpoint = AgentEndpoint(buffer)
        await endpoint.start()
        try:
            async with aiohttp.ClientSession() as http:

                async def post(sample: dict[str, Any]) -> tuple[int, str]:
                    body, key = {"samples": [sample]}, {"Authorization": f"Bearer {endpoint.key}"}
                    async with http.post(f"{endpoint.url}/trajectories", json=body, headers=key) as response:
                        return response.status, await response.text()

                status, body = await post(POSTED | fields)
                assert status == 400
                assert complaint in body
                assert (await post(POSTED))[0] == 200
        finally:
            await endpoint.close()
        assert (await buffer.take())[0].tokens == [1, 2, 3]

    asyncio.run(story())


class Source:
    """Collects the groups that are refused."""

    trainer_version = live_version = NEWEST

    def __init__(self) -> None:
        self.refused: list[str] = []

    def version_when_taken(self, sample: Sample) -> int | None:
        return None

    def refuse(self, group: Group, error: str) -> None:
        self.refused.append(error)


def collect(function: Any, **values: Any) -> tuple[list[Group], list[str]]:
    """Call a rollout function for batches of two groups of one sample."""
    settings = with_settings(RunConfig(rollout=Rollout(rollout_batch_size=2, n_samples_per_prompt=1)), **values)
    source = Source()

    async def score(sample: Sample) -> None:
        sample.rollout_log_probs = [-1.0] * sample.response_length

    adapter = RolloutFunctionAdapter(function, flat_args(settings), settings, score_tokens=score, limits=LIMITS)
    return asyncio.run(adapter(0, source, settings.rollout.rollout_batch_size)), source.refused  # type: ignore[arg-type]


@pytest.mark.parametrize("fields, complaint", [*INVALID, ({"reward": None}, "reward None has no finite number")])
def test_an_invalid_group_of_a_rollout_function_is_replaced(fields: dict[str, Any], complaint: str) -> None:
    asked = []

    async def function(args: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
        asked.append(args.rollout_batch_size)
        if len(asked) == 1:
            return [[finished(**fields)], [finished()]]
        return [[finished(index=7)]]

    groups, [refused] = collect(function)
    assert asked == [2, 1]
    assert [group[0].index for group in groups] == [6, 7]
    assert complaint in refused


def test_the_entry_of_a_reward_that_counts_is_that_of_the_data_set_of_the_prompt() -> None:
    async def function(args: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
        rewards = {"format": 1.0, "tests": 0.25}
        names = "code", "math"
        return [[finished(reward=rewards, metadata={FROM_DATASET: {"name": name, "epochs": 0.0}})] for name in names]

    code = TrainDataset(prompt_data="code.jsonl", reward_key="tests")
    sets = {"code": code, "math": TrainDataset(prompt_data="math.jsonl")}
    groups, refused = collect(function, datasets=sets, reward_key="format")
    assert refused == []
    assert [group.rewards for group in groups] == [[0.25], [1.0]]


def test_a_function_that_only_returns_invalid_groups_ends_the_run_with_a_user_error() -> None:
    async def function(args: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
        return [[finished(response_length=HUGE)]] * args.rollout_batch_size

    with pytest.raises(UserError, match=r"fewer than response_length .* 3 calls in a row returned no valid group"):
        collect(function)


def test_rewards_of_numpy_become_plain_numbers() -> None:
    async def function(args: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
        return [[finished(reward=np.float32(0.5))], [finished(reward={"acc": np.int64(1)}, reward_key="acc")]]

    groups, _ = collect(function)
    assert [type(group[0].scalar_reward) for group in groups] == [float, float]
    assert groups[1][0].reward == {"acc": 1.0}
