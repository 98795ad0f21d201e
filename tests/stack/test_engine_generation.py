"""A real engine's answers, through a real router, as the generator reads them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import psutil
import pytest

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.launch import EngineServer, EngineSpec
from miles_async.adapters.weights.engine import call_engine
from miles_async.errors import EngineLostError, TrajectoryError, UserError
from miles_async.types import SampleStatus
from tests.stack.engine_stack import Stack, group_of, start_generating, tokens_drawn
from tests.waiting import PATIENCE_SECONDS, wait_until

pytest_plugins = ["tests.stack.engine_fixtures"]

ENDLESS = SamplingParams(max_new_tokens=380)


async def test_a_generated_group_has_tokens_log_probabilities_and_versions(serving: Stack) -> None:
    async with serving.admitted() as (_, generator):
        group = group_of("What is 12 + 34?", samples=4)
        await generator.generate(group)
        version = next(serving.versions) - 1
        for sample in group:
            assert bytes(sample.tokens[: sample.prompt_length]) == b"What is 12 + 34?"
            assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
            assert sample.response_length == len(sample.rollout_log_probs) > 0
            assert serving.error(sample) < 1e-4
            (span,) = sample.spans
            assert (span.version, span.start, span.end) == (version, 0, sample.response_length)
        assert len({tuple(sample.tokens) for sample in group}) > 1
        assert generator.requests.in_flight == 0
        assert generator.requests.busy_seconds > 0


async def test_groups_with_prompts_of_different_lengths_are_generated_together(serving: Stack) -> None:
    async with serving.admitted() as (_, generator):
        groups = [group_of(list(range(length)), samples=4) for length in (1, 5, 40, 41, 150)]
        await asyncio.gather(*[generator.generate(group) for group in groups])
        assert all(serving.error(sample) < 1e-5 for group in groups for sample in group)


def test_samples_of_one_request_with_a_long_prompt_find_it_in_the_prefix_cache(serving: Stack) -> None:
    prompt = [200, *range(250), *range(49)]
    request = {"input_ids": [prompt] * 6, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    answers: Any = call_engine(serving.engine, "/generate", request, timeout=PATIENCE_SECONDS)
    assert sorted(answer["meta_info"]["cached_tokens"] for answer in answers) == [0] + [299] * 5


async def test_evaluation_may_ask_for_greedy_answers(serving: Stack) -> None:
    async with serving.admitted() as (_, generator):
        group = group_of("1 + 1 =", samples=3)
        await generator.generate(group, SamplingParams(max_new_tokens=6, temperature=0))
        assert len({tuple(sample.tokens) for sample in group}) == 1
        assert group[0].response_length <= 6


async def test_a_response_keeps_the_stop_string_that_ended_it_also_if_it_was_continued(serving: Stack) -> None:
    stopping = SamplingParams(max_new_tokens=300, stop=tuple(ascii_lowercase))
    async with serving.admitted() as (_, generator):
        for first_tokens in (0, 2):
            group = group_of("1 + 1 =", samples=8)
            if first_tokens:
                await generator.generate(group, SamplingParams(max_new_tokens=first_tokens))
                for sample in group:
                    sample.status = SampleStatus.ABORTED
            await generator.generate(group, stopping)
            stopped = [sample for sample in group if sample.response[-1:] in stopping.stop]
            assert stopped, "no response reached a letter"
            for sample in stopped:
                assert sample.status is SampleStatus.COMPLETED
                assert sample.response.encode()[-1:] == bytes(sample.tokens[-1:])
    # A generate function of a user, which posts the parameters itself, finds the stop string in the text of the engine.
    request = {"input_ids": [list(b"1 + 1 =")] * 8, "sampling_params": stopping.body(300)}
    answers: Any = call_engine(serving.engine, "/generate", request, timeout=PATIENCE_SECONDS)
    # SGLang also finds a stop string in the name of a special token, which is not part of the text.
    ended = [answer for answer in answers if answer["output_ids"][-1] in map(ord, stopping.stop)]
    assert ended, "no response reached a letter"
    for answer in ended:
        assert answer["meta_info"]["finish_reason"]["matched"] == chr(answer["output_ids"][-1])
        assert answer["text"].endswith(answer["meta_info"]["finish_reason"]["matched"])


async def test_one_group_can_be_aborted_while_the_others_continue(serving: Stack) -> None:
    async with serving.admitted() as (fleet, generator):
        straggler, other = group_of(list(range(60)), samples=4), group_of(list(range(60, 120)), samples=4)
        running = await start_generating(fleet, generator, ENDLESS, straggler, other)
        await generator.abort(straggler)
        await running
        assert any(sample.status is SampleStatus.ABORTED for sample in straggler)
        assert all(sample.status is not SampleStatus.ABORTED for sample in other)


async def test_aborted_samples_keep_their_tokens_and_are_continued(serving: Stack) -> None:
    async with serving.admitted() as (fleet, generator):
        group = group_of(list(range(60)), samples=4)
        running = await start_generating(fleet, generator, ENDLESS, group)
        await generator.abort()
        await running
        cut = [sample for sample in group if sample.status is SampleStatus.ABORTED]
        assert cut, "every sample ended by itself before the abort"
        before = [list(sample.tokens) for sample in cut]
        assert all(0 < sample.response_length < 380 for sample in cut)

        await serving.commit_when_idle(fleet)
        await generator.generate(group, ENDLESS)
        for sample, tokens in zip(cut, before, strict=True):
            assert sample.status is not SampleStatus.ABORTED
            assert sample.tokens[: len(tokens)] == tokens
            assert [span.start for span in sample.spans] == [0, len(tokens) - 60]
            assert sample.spans[0].version < sample.spans[1].version
            assert sample.spans[-1].end == sample.response_length <= 380
            assert serving.error(sample) < 1e-4


async def test_groups_beyond_the_limit_wait(serving: Stack) -> None:
    async with serving.admitted(limit=4) as (_, generator):
        seen = 0

        async def look() -> None:
            nonlocal seen
            while True:
                seen = max(seen, generator.requests.in_flight)
                await asyncio.sleep(0.002)

        looking = asyncio.create_task(look())
        groups = [group_of(f"{n} + {n} =", samples=5) for n in range(4)]
        await asyncio.gather(*[generator.generate(group) for group in groups])
        looking.cancel()
        assert 0 < seen <= 4
        assert all(sample.response_length > 0 for group in groups for sample in group)


def test_the_configured_environment_of_the_engine_overrides_the_inherited_one(serving: Stack) -> None:
    values = psutil.Process(serving.engine.pid).environ()
    assert {"SGLANG_TIMEOUT_KEEP_ALIVE": "601", "OF_THE_ENGINE": "yes"}.items() <= values.items()


async def test_a_request_that_the_engine_refuses_fails_the_trajectory(serving: Stack) -> None:
    async with serving.admitted() as (_, generator):
        with pytest.raises(TrajectoryError, match="answered 400"):
            await generator.generate(group_of([1] * 600))


async def test_a_prompt_without_tokens_never_reaches_the_engine_because_it_would_crash_it(serving: Stack) -> None:
    async with serving.admitted() as (_, generator):
        with pytest.raises(TrajectoryError, match=r"sample \d+ of group .* has no tokens"):
            await generator.generate(group_of("", samples=2))
        await generator.generate(group_of("1+1=", samples=2))


async def test_a_new_version_does_not_affect_requests_in_flight(serving: Stack) -> None:
    async with serving.admitted() as (fleet, generator):
        group = group_of(list(range(50)), samples=8)

        async def publish(mode: str) -> None:
            await fleet.pause(mode)
            await fleet.commit("e0", next(serving.versions))
            await fleet.resume()

        running = await start_generating(fleet, generator, ENDLESS, group)
        await publish("retract")
        while not await tokens_drawn(fleet, running):
            # All responses were complete before this process saw new tokens.
            group.reset()
            running = await start_generating(fleet, generator, ENDLESS, group)
            await publish("retract")
        await publish("in_place")
        await running
        assert all(sample.status is not SampleStatus.ABORTED for sample in group)
        assert max(len(sample.spans) for sample in group) == 3
        assert all(serving.error(sample) < 1e-4 for sample in group)


async def test_a_fenced_engine_gets_no_requests_until_it_is_admitted(serving: Stack) -> None:
    async with serving.admitted() as (fleet, generator):
        await fleet.fence("e0", "the test wants it out")
        assert fleet.routed() == ()
        with pytest.raises(EngineLostError, match="answered 503"):
            await generator.generate(group_of("1 + 1 ="))
        await fleet.admit("e0")
        assert fleet.routed() == ("e0",)
        await generator.generate(group_of("1 + 1 ="))


def test_a_folder_that_is_no_checkpoint_is_a_user_error(tmp_path: Path) -> None:
    spec = EngineSpec(name="e1", model_path=str(tmp_path / "nowhere"), log_path=tmp_path / "engine.log")
    with pytest.raises(UserError, match="it has no config"):
        EngineServer(spec).start()


def test_an_engine_may_end_a_response_at_its_context(checkpoint: Path, tmp_path: Path) -> None:
    """As vLLM does, but for two tokens. Without `allow_auto_truncate` SGLang refuses the request."""
    arguments = {"context-length": 64, "allow-auto-truncate": True}
    log = tmp_path / "engine.log"
    engine = EngineServer(EngineSpec(name="e1", model_path=str(checkpoint), log_path=log, server_args=arguments))
    request = {"input_ids": [*range(40)], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    try:
        answer: Any = call_engine(engine.start(), "/generate", request, timeout=PATIENCE_SECONDS)
    finally:
        engine.stop()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == 64 - 2 - 40


def test_an_engine_ends_when_its_owner_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from miles_async.adapters.sglang.launch import EngineServer, EngineSpec\n"
            "EngineServer(EngineSpec(name='e1', model_path=sys.argv[1], log_path=Path(sys.argv[2]))).start()",
            str(checkpoint),
            str(tmp_path / "engine.log"),
        ]
    )
    (server,) = wait_until(lambda: _children(owner.pid), "the owner started its server")
    assert _alive(server)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not _alive(server), "the server ended with its owner")


def _children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def _alive(pid: int) -> bool:
    """A process that ended but was not yet waited for does not count."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
