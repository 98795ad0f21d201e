"""Agents with several segments, from their requests over HTTP to the samples of a group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_async.adapters.agents.endpoint import Agents
from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.time_limit import TimeLimit, innermost_limit
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.unit.adapters.agents.test_agent_endpoint import OWN, PARAMS, USER, Agent, connected_agent, played, said

OTHER = {"role": "user", "content": "Another question."}


async def generated(agent: Agent, function: Any, samples: int = 2) -> Group:
    generator = FunctionGenerator(
        function,
        flat_args(run_config()).with_values(turns=agent.turns, agents=Agents(agent.endpoint, agent.turns)),
        SamplingParams(max_new_tokens=200),
        agent.engine,
        agent.turns,
        live_version=lambda: 7,
        timeout_seconds=60,
        max_attempts=1,
    )
    group = Group([Sample(index=6 + i, prompt="Q") for i in range(samples)], feed_index="sample_0_3")
    await generator.generate(group)
    return group


async def test_the_segments_of_a_session_become_samples_of_the_group_when_the_function_returns_its_sample() -> None:
    async with connected_agent("a", "b", "c") as agent:

        async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
            async with args.agents.session(sample, sampling_params) as url:
                first = said(await agent.ask(url, USER))
                said(await agent.ask(url, OTHER))
                said(await agent.ask(url, USER, first, OTHER))
            sample.reward, sample.metadata["solved"] = 0.5, True
            assert [one.response[-1] for one in args.agents.segments(sample)] == ["b", "c"]
            return sample

        group = await generated(agent, mine, samples=1)
        group.share_rewards()
        assert [(one.index, one.trajectory, one.reward, one.metadata) for one in group] == [
            (6, 0, 0.5, {"solved": True}),
            (6, 0, 0.5, {"solved": True}),
        ]
        assert not agent.turns._trajectories, "nothing is kept of a trajectory that has ended"


async def test_the_requests_of_an_agent_run_under_the_time_limit_of_its_sample() -> None:
    async with connected_agent("a", "b") as agent:
        limits: list[TimeLimit | None] = []
        answer = agent.engine.generate

        async def observed(
            group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
        ) -> None:
            limits.append(innermost_limit.get())
            await answer(group, sampling, pin)

        agent.engine.generate = observed  # type: ignore[method-assign]

        async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
            limits.append(innermost_limit.get())
            async with args.agents.session(sample, sampling_params) as url:
                said(await agent.ask(url, USER))
            return sample

        await generated(agent, mine, samples=2)
        first, second = limits[:2]
        assert first is not second
        assert sorted(map(id, limits)) == sorted(map(id, [first, first, second, second]))
        assert None not in limits


async def test_a_function_may_choose_the_segments_that_it_returns_and_their_rewards() -> None:
    async with connected_agent("a", "b", "a", "b") as agent:

        async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
            async with args.agents.session(sample, sampling_params) as url:
                said(await agent.ask(url, USER))
                said(await agent.ask(url, OTHER))
            segments = args.agents.segments(sample)
            for reward, segment in enumerate(segments):
                segment.reward = float(reward)
            return segments if sample.index == 6 else segments[1:]

        group = await generated(agent, mine)
        assert [(one.index, one.trajectory, one.reward) for one in group] == [(6, 0, 0.0), (6, 0, 1.0), (7, 1, 1.0)]


async def test_a_function_may_open_segments_itself() -> None:
    async with connected_agent("a", "b") as agent:

        async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
            await args.turns.sample(sample, sampling_params)
            check = args.turns.open_segment(sample)
            check.tokens = list(f"Is {sample.response} right?".encode())
            await args.turns.sample(check, sampling_params)
            return sample

        group = await generated(agent, mine, samples=1)
        assert [(one.trajectory, bytes(one.tokens)) for one in group] == [(0, b"Qa"), (0, b"Is a right?b")]


async def test_a_failed_attempt_leaves_no_segment_behind() -> None:
    async with connected_agent("a", "b", "a") as agent:
        attempts: list[list[int]] = []

        async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
            attempts.append(list(sample.tokens))
            async with args.agents.session(sample, sampling_params) as url:
                said(await agent.ask(url, USER))
                if len(attempts) == 1:
                    said(await agent.ask(url, OTHER))
                    raise KeyError("no tools")
            return sample

        with pytest.raises(Exception, match="no tools"):
            await generated(agent, mine, samples=1)
        [sample] = await generated(agent, mine, samples=1)
        assert (sample.response, sample.trajectory) == ("a", None)
        assert attempts == [list(b"Q")] * 2


async def posted_session(agent: Agent) -> str:
    """A session of two segments."""
    session = await played(agent)
    said(await agent.ask(f"{agent.endpoint.url}/sessions/{session}/v1", OTHER))
    return session


async def test_a_posted_session_contributes_all_its_segments() -> None:
    async with connected_agent("a", "b", "c", size=2) as agent:
        session = await posted_session(agent)
        samples = [
            {"session": session, "reward": 1, "metadata": {"k": 1}},
            {"session": await played(agent), "reward": 0},
        ]
        assert (await agent.trajectory(samples))[0] == 200
        group = await agent.trajectories.take()
        assert [(one.index, one.trajectory, one.reward, one.response) for one in group] == [
            (0, 0, 1.0, "a"),
            (0, 0, 1.0, "b"),
            (1, None, 0.0, "c"),
        ]
        assert [one.metadata for one in group[:2]] == [{"k": 1, "feed_index": "external_0"}] * 2
        assert not agent.turns._trajectories


async def test_a_list_of_segments_may_be_posted_in_place_of_a_sample() -> None:
    async with connected_agent("a", "b", "c") as agent:
        unrewarded = {**OWN, "reward": None}
        parts = [unrewarded, {"session": await posted_session(agent)}, {"session": await played(agent), "reward": 0.25}]
        assert (await agent.trajectory([parts]))[0] == 200
        group = await agent.trajectories.take()
        assert [(one.index, one.trajectory, one.reward) for one in group] == [(0, 0, 0.25)] * 4
        status, body = await agent.trajectory([[unrewarded, unrewarded]])
        assert (status, body["error"]["message"]) == (400, "sample 0: it has no reward; add the field reward")


async def test_a_session_that_is_posted_twice_in_one_trajectory_is_refused_and_stays_open() -> None:
    async with connected_agent("a", "b") as agent:
        part = {"session": await posted_session(agent), "reward": 1}
        status, body = await agent.trajectory([[part, part]])
        assert (status, "a session is posted twice" in body["error"]["message"]) == (400, True)
        assert (await agent.trajectory([part]))[0] == 200


async def test_a_repeated_request_takes_over_when_the_client_of_the_first_one_disconnects() -> None:
    async with connected_agent(None, "2") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            lost = asyncio.create_task(agent.ask(url, USER))
            await agent.engine.begun.wait()
            repeated = asyncio.create_task(agent.ask(url, USER))
            await asyncio.sleep(0.02)
            lost.cancel()
            assert said(await repeated)["content"] == "2"
        assert sample.response == "2"
        assert len(agent.turns.segments(sample)) == 1


async def test_agents_that_disconnect_again_and_again_leave_no_segments() -> None:
    async with connected_agent("2", *[None] * 3, "3") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            said(await agent.ask(url, USER))
            for _ in range(3):
                agent.engine.begun.clear()
                asking = asyncio.create_task(agent.ask(url, {"role": "user", "content": "another question"}))
                await agent.engine.begun.wait()
                asking.cancel()
            said(await agent.ask(url, {"role": "user", "content": "1+2?"}))
        assert [segment.response for segment in agent.turns.segments(sample)] == ["2", "3"]
