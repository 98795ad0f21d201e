"""Generate functions with slime's signature, on an engine whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.config.user_functions import load_function
from miles_async.errors import EngineLostError, TemplateError, TrajectoryError, UserError
from miles_async.rollout import tool_use
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.rollout.sample_service import SampleService
from miles_async.rollout.tools.calculator import calculate
from miles_async.rollout.tools.search import SearchIndex
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.types import FROM_DATASET, Group, Prompt, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.unit.byte_tokenizer import Bytes

LIVE = 7


class Script(SGLangGenerator):
    """An engine that answers with the lines of a script, one per turn, then with `ok`. A line of None never ends."""

    def __init__(self, *lines: str | None) -> None:
        sampling = SamplingParams(max_new_tokens=200)
        super().__init__("http://127.0.0.1:1", Bytes(), sampling, limit=lambda: 64, engines=list)
        self.lines = list(lines)
        self.asked: list[SamplingParams] = []
        self.rated: list[Sample] = []
        self._ended = asyncio.Event()
        self.cancelled = 0
        self.begun = asyncio.Event()
        """A request has arrived."""
        self.discarded: list[tuple[int | None, str, int]] = []
        """Index, reason and tokens of discarded responses."""

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        assert sampling is not None
        self.asked.append(sampling)
        self.begun.set()
        [sample] = group
        line = self.lines.pop(0) if self.lines else "ok"
        if line is None:
            try:
                await self._ended.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            sample.status = SampleStatus.ABORTED
            return
        said = line.encode()
        sample.spans.append(VersionSpan(LIVE, sample.response_length, sample.response_length + len(said)))
        sample.tokens += said
        sample.response_length += len(said)
        sample.rollout_log_probs += [-0.5] * len(said)
        if sample.loss_mask is not None:
            sample.loss_mask += [1] * len(said)
        sample.response = bytes(sample.tokens[sample.prompt_length :]).decode()
        sample.status = SampleStatus.COMPLETED

    def note_discarded(self, group: Group, sample: Sample, reason: str, tokens: int, error: str) -> None:
        self.discarded.append((sample.index, reason, tokens))

    async def abort(self, group: Group | None = None) -> None:
        self._ended.set()

    async def score_logprobs(self, sample: Sample) -> None:
        self.rated.append(sample)
        sample.rollout_log_probs = [-1.0] * sample.response_length


@asynccontextmanager
async def generating_with(
    function: Any,
    *lines: str | None,
    timeout_seconds: float = 60.0,
    max_attempts: int = 3,
    seed: int | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[FunctionGenerator, Script]]:
    """A generator that calls `function`, and its engine, which answers with `lines`."""
    engine = Script(*lines)
    turns = MultiTurnSampler(engine, Bytes())
    sampling = SamplingParams(max_new_tokens=200)
    service = SampleService(sampling, max_attempts=max_attempts)
    generator = FunctionGenerator(
        function,
        flat_args(run_config(**settings), turns=turns, sample_service=service),
        sampling,
        engine,
        turns,
        live_version=lambda: LIVE,
        timeout_seconds=timeout_seconds,
        max_attempts=max_attempts,
        seed=seed,
        on_discarded=engine.note_discarded,
    )
    try:
        yield generator, engine
    finally:
        await engine.close()


def one(prompt: str = "Q") -> Group:
    return Group([Sample(index=3, prompt=prompt)], feed_index="sample_0_0")


def masked(sample: Sample, entry: int) -> str:
    response = sample.tokens[sample.prompt_length :]
    return bytes(t for t, m in zip(response, sample.loss_mask or [], strict=True) if m == entry).decode()


async def test_each_sample_goes_through_the_function() -> None:
    seen: list[tuple[int | None, int]] = []

    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        seen.append((sample.index, sampling_params["max_new_tokens"]))
        return await args.turns.sample(sample, sampling_params)

    async with generating_with(mine) as (generator, _):
        group = Group([Sample(index=i, prompt="Q") for i in range(3)])
        await generator.generate(group)
        assert [sample.response for sample in group] == ["ok"] * 3
    assert seen == [(0, 200), (1, 200), (2, 200)]


@pytest.mark.parametrize("segments", [1, 2])
async def test_new_samples_of_a_function_are_of_the_prompt_that_it_was_called_with(segments: int) -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
        made = [
            Sample(tokens=[*b"Qa"], response="a", response_length=1, metadata={"own": 1}, status=SampleStatus.COMPLETED)
            for _ in range(segments)
        ]
        return made[0] if segments == 1 else made

    origin = {"name": "tests", "adapter": "code", "row": 5, "epochs": 0.5}
    group = one()
    group[0].label, group[0].metadata = "the answer", {FROM_DATASET: origin, "rm_type": "math", "own": 0}
    group.track_prompt()
    async with generating_with(mine) as (generator, _):
        await generator.generate(group)
    for sample in group:
        assert (sample.prompt, sample.label, sample.dataset, sample.adapter) == ("Q", "the answer", "tests", "code")
        assert (sample.metadata["rm_type"], sample.metadata["own"]) == ("math", 1)
    group.reset()
    assert [(sample.index, sample.prompt, sample.label) for sample in group] == [(3, "Q", "the answer")]
    assert group.adapter == "code", "its next attempt is the same prompt"


async def test_a_sample_whose_function_replaces_the_metadata_and_raises_is_of_the_same_data_set() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        sample.metadata = {"own": 1}
        raise ValueError("no answer")

    group = one()
    group[0].metadata = {FROM_DATASET: {"name": "tests", "epochs": 0.5}}
    async with generating_with(mine) as (generator, _):
        with pytest.raises(TrajectoryError, match="no answer"):
            await generator.generate(group)
    assert group.dataset == "tests"


async def test_tool_output_is_masked_and_has_no_version() -> None:
    async with generating_with(tool_use.generate, "<python>6*7</python>", "It is 42.") as (generator, engine):
        group = one()
        await generator.generate(group)
        [sample] = group
        assert sample.response == "<python>6*7</python><result>42</result>It is 42."
        assert masked(sample, 0) == "<result>42</result>"
        assert masked(sample, 1) == "<python>6*7</python>It is 42."
        assert [(span.start, span.end) for span in sample.spans] == [(0, 20), (39, 48)]
        assert sample.turns == [(0, 20, True), (20, 39, False), (39, 48, True)]
        assert len(sample.rollout_log_probs) == sample.response_length == 48
        assert sample.metadata["tool_calls"] == 1
        assert sample.status is SampleStatus.COMPLETED
        assert engine.asked[0].stop == ("</python>", "</search>")


async def test_a_response_ends_after_the_maximum_number_of_tool_calls() -> None:
    async with generating_with(tool_use.generate, *["<python>1+1</python>"] * 9, tool_max_turns=2) as (
        generator,
        engine,
    ):
        group = one()
        await generator.generate(group)
        assert group[0].status is SampleStatus.TRUNCATED
        assert group[0].metadata["tool_calls"] == 2
        assert len(engine.asked) == 2


async def test_tool_output_never_makes_a_response_longer_than_allowed() -> None:
    async with generating_with(tool_use.generate, "x" * 170 + "<python>2**90</python>") as (generator, _):
        group = one()
        await generator.generate(group)
        assert group[0].response_length == 200
        assert group[0].status is SampleStatus.TRUNCATED


async def test_a_search_answers_from_the_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "documents.jsonl"
    texts = ["Paris is the capital of France.", "Berlin is the capital of Germany.", "Rivers flow."]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    async with generating_with(
        tool_use.generate, "<search>the capital of Germany</search>", tool_search_corpus=str(corpus)
    ) as (generator, _):
        group = one()
        await generator.generate(group)
        assert masked(group[0], 0).startswith("<result>Berlin is the capital of Germany.")


def test_a_broken_corpus_line_is_reported(tmp_path: Path) -> None:
    corpus = tmp_path / "documents.jsonl"
    corpus.write_text('{"text": "a"}\n{"words": "b"}\n')
    with pytest.raises(UserError, match=r"documents\.jsonl, line 2: expected an object with a text"):
        SearchIndex.from_file(str(corpus))


@pytest.mark.parametrize(
    "expression, value",
    [
        ("12 * (3 + 4) // 5", "16"),
        ("round(sqrt(2), 3)", "1.414"),
        ("2**10 - 1", "1023"),
        ("1 / 0", "error: division by zero"),
        ("9**9**9**9", "error: the power is too large"),
        ("__import__('os').getcwd()", "error: \"__import__('os').getcwd()\" is not arithmetic"),
        ("", "error: "),
    ],
)
def test_the_calculator_only_does_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression).startswith(value)


async def test_a_function_that_hangs_fails_its_group() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        await asyncio.Event().wait()
        return sample

    async with generating_with(mine, timeout_seconds=0.05) as (generator, _):
        with pytest.raises(TrajectoryError, match=r"sample 3: .* longer than 0\.05 s \(generate_timeout_seconds\)"):
            await generator.generate(one())


async def test_a_function_that_raises_fails_its_group_with_its_message() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        raise KeyError("page")

    async with generating_with(mine) as (generator, _):
        with pytest.raises(TrajectoryError, match=r"sample 3: the generate function raised KeyError\('page'\)"):
            await generator.generate(one())


async def test_a_function_that_sets_no_status_fails_its_group() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        return sample

    async with generating_with(mine) as (generator, _):
        with pytest.raises(TrajectoryError, match="sample 3: the generate function left it unfinished; set its status"):
            await generator.generate(one())


def half_filled(sample: Sample) -> None:
    sample.tokens = [*sample.tokens, 65, 66]
    sample.loss_mask = [1, 0]


async def test_the_next_attempt_does_not_see_the_tokens_of_a_failed_function() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        half_filled(sample)
        raise KeyError("page")

    async with generating_with(mine) as (generator, _):
        group = one()
        with pytest.raises(TrajectoryError):
            await generator.generate(group)
        [sample] = group
        assert (bytes(sample.tokens), sample.response_length, sample.loss_mask) == (b"Q", 0, None)


async def test_the_next_attempt_does_not_see_the_tokens_of_an_aborted_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.rollout.generate.ABORT_GRACE_SECONDS", 0.01)
    reached = asyncio.Event()

    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        half_filled(sample)
        reached.set()
        await asyncio.Event().wait()
        return sample

    async with generating_with(mine) as (generator, _):
        group = one()
        running = asyncio.create_task(generator.generate(group))
        await reached.wait()
        await generator.abort()
        await running
        assert (bytes(group[0].tokens), group[0].status) == (b"Q", SampleStatus.ABORTED)


async def test_columns_that_do_not_fit_fail_the_group() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        await args.turns.sample(sample, sampling_params)
        sample.loss_mask = [1]
        return sample

    async with generating_with(mine) as (generator, _):
        with pytest.raises(TrajectoryError, match="sample 3: loss_mask has 1 entries; response_length is 2"):
            await generator.generate(one())


async def test_a_function_written_for_slime_gets_versions_and_log_probabilities_afterwards() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        sample.tokens = [*sample.tokens, 65, 66]
        sample.response, sample.response_length = "AB", 2
        sample.status = Sample.Status.COMPLETED
        return sample

    async with generating_with(mine) as (generator, engine):
        group = one()
        await generator.generate(group)
        assert engine.rated == list(group)
        assert group[0].spans == [VersionSpan(LIVE, 0, 2)]
        assert group.oldest_version == LIVE


async def test_a_function_gets_the_seed_of_its_sample_if_engines_sample_with_a_seed_per_request() -> None:
    seeds: list[int | None] = []

    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        seeds.append(sampling_params.get("sampling_seed"))
        return await tool_use.generate(args, sample, sampling_params)

    for seed in (None, 40):
        async with generating_with(mine, seed=seed) as (generator, _):
            await generator.generate(Group([Sample(index=7, prompt="1 + 1 ="), Sample(index=8, prompt="1 + 1 =")]))
    assert seeds == [None, None, 47, 48]


async def test_a_request_that_no_engine_can_serve_fails_before_it_is_sent() -> None:
    engine = SGLangGenerator(
        "http://127.0.0.1:1", Bytes(), SamplingParams(max_new_tokens=9), limit=lambda: 4, engines=list
    )
    try:
        with pytest.raises(TrajectoryError, match="sample 3 of group sample_0_0: its prompt has no tokens"):
            await engine.generate(one(""))
        with pytest.raises(TrajectoryError, match="sample 4: its tokens contain no prompt"):
            await engine.score_logprobs(Sample(index=4, tokens=[65], response_length=1))
    finally:
        await engine.close()


async def test_an_abort_ends_the_current_turn_and_all_later_ones() -> None:
    async with generating_with(tool_use.generate, None) as (generator, engine):
        group = one()
        running = asyncio.create_task(generator.generate(group))
        await engine.begun.wait()
        await generator.abort(group)
        await running
        assert group[0].status is SampleStatus.ABORTED


async def test_a_function_that_ignores_an_abort_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.rollout.generate.ABORT_GRACE_SECONDS", 0.05)

    begun = asyncio.Event()

    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        begun.set()
        await asyncio.Event().wait()
        return sample

    async with generating_with(mine) as (generator, _):
        group = one()
        running = asyncio.create_task(generator.generate(group))
        await begun.wait()
        await generator.abort()
        await running
        assert group[0].status is SampleStatus.ABORTED
        assert group[0].response_length == 0


async def test_an_abort_that_the_engine_does_not_answer_ends_the_attempt_and_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("miles_async.rollout.generate.ABORT_GRACE_SECONDS", 0.01)

    async def unanswered(group: Group | None = None) -> None:
        raise EngineLostError("1 requests did not end within 30 s of an abort")

    async with generating_with(tool_use.generate, None, "ok") as (generator, engine):
        engine.abort = unanswered  # type: ignore[method-assign]
        group = one()
        running = asyncio.create_task(generator.generate(group))
        await engine.begun.wait()
        await generator.abort(group)
        await running
        assert (group[0].status, engine.cancelled) == (SampleStatus.ABORTED, 1)
        await generator.generate(group)
        assert (group[0].status, group[0].response) == (SampleStatus.COMPLETED, "ok")


async def test_a_cancelled_abort_does_not_stop_a_later_attempt() -> None:
    waits, answered = asyncio.Event(), asyncio.Event()

    async def slow(group: Group | None = None) -> None:
        waits.set()
        await answered.wait()

    async with generating_with(tool_use.generate, None, "ok") as (generator, engine):
        engine.abort = slow  # type: ignore[method-assign]
        group = one()
        running = asyncio.create_task(generator.generate(group))
        await engine.begun.wait()
        aborting = asyncio.create_task(generator.abort(group))
        await waits.wait()
        aborting.cancel()
        await asyncio.wait([aborting])
        engine._ended.set()
        await running
        assert group[0].status is SampleStatus.ABORTED
        await generator.generate(group)
        assert (group[0].status, group[0].response) == (SampleStatus.COMPLETED, "ok")


def test_a_plain_function_is_refused_at_start() -> None:
    with pytest.raises(UserError, match="is not an async function: define it with async def"):
        load_function("json.dumps", setting="custom_generate_function_path")


CHAT = [{"role": "user", "content": "Q"}]


async def test_an_agent_that_appends_to_its_messages_does_not_change_the_prompt() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        assert isinstance(sample.prompt, list)
        sample.prompt.append({"role": "assistant", "content": "an answer"})
        sample.prompt[0]["content"] = "changed"
        if sample.index == 1:
            raise ValueError("broken")
        return await args.turns.sample(sample, sampling_params)

    chat = [dict(message) for message in CHAT]
    group = Group([Sample(index=index, prompt=chat) for index in range(2)])
    async with generating_with(mine) as (generator, _):
        with pytest.raises(TrajectoryError, match="broken"):
            await generator.generate(group)
    assert chat == CHAT
    assert [sample.prompt for sample in group] == [CHAT, CHAT]


class Refusing(Bytes):
    """A tokenizer whose chat template refuses all messages."""

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        raise TemplateError("roles must alternate")


async def test_messages_that_the_template_refuses_are_for_the_function_to_change() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        sample.tokens = list(b"my own text")
        return await args.turns.sample(sample, sampling_params)

    group = Group([Sample(index=0, prompt=[{"role": "system", "content": "S"}])])
    async with generating_with(mine, "fine") as (generator, engine):
        engine._tokenizer = Refusing()
        await generator.generate(group)
    assert group[0].response == "fine"


async def test_tools_of_a_row_are_rendered_with_its_messages() -> None:
    seen: list[Any] = []

    class Seeing(Bytes):
        def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
            seen.append((prompt, tools))
            return [1]

    async with generating_with(None) as (_, engine):
        engine._tokenizer = Seeing()
        engine.tokenize(Group([Sample(prompt=CHAT, metadata={"tools": [{"name": "t"}]}) for _ in range(2)]))
    assert seen == [(CHAT, [{"name": "t"}])]
