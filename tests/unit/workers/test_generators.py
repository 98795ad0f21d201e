"""The generators of a run and the endpoint for agents follow their settings."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from miles_async.adapters.agents.trajectories import BufferFullError
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.system.network_ports import free_port
from miles_async.columns.column import NO_LIMITS
from miles_async.errors import InfrastructureError, TrajectoryError, UserError
from miles_async.modes.shipped import External
from miles_async.rollout.contract import flat_args
from miles_async.types import FROM_DATASET, Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.sim.world import DirectJournal, Trace
from tests.unit.byte_tokenizer import Bytes
from workers.functions import evaluation_function
from workers.generators import GeneratorFactory
from workers.specs import ClusterHandles, greedy_of

NOBODY = "http://127.0.0.1:1"


async def hangs(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Named by its path in a test below."""
    await asyncio.Event().wait()
    return sample


@asynccontextmanager
async def generators(*, agent_key: Any = "", **settings: Any) -> AsyncIterator[GeneratorFactory]:
    """`agent_key` is the key that a lost rollout worker has left in the run folder."""
    config = run_config(**settings)
    fleet = SGLangFleet(NOBODY)
    tokenizer: Any = Bytes()
    handles = ClusterHandles(
        checkpoint="",
        router_url=NOBODY,
        router_key="",
        engines=(),
        engine_urls=(),
        engine_actors={},
        router_actor=None,
        learner_ranks=(),
        weight_transports=(),
        began_with=None,
        learner_checkpoint=None,
    )
    with TemporaryDirectory() as folder:
        if agent_key:
            (Path(folder) / "agent_key").write_text(agent_key)
        made = GeneratorFactory(
            config,
            handles,
            fleet,
            tokenizer,
            None,
            journal=DirectJournal(Trace()),
            stored=None,
            live_version=lambda: 0,
            adapters=None,
            limits=NO_LIMITS,
            agent_key_file=Path(folder) / "agent_key",
        )
        try:
            async with made:
                yield made
        finally:
            await fleet.close()


async def test_every_connection_of_a_run_with_evaluations_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async with generators(eval_interval=1, eval_size=1):
        pass
    gc.collect()
    # aiohttp logs the sessions that nobody has closed.
    assert caplog.text == ""


async def test_agents_are_served_at_the_configured_port() -> None:
    port = free_port()
    async with generators(agent_port=port, custom_generate_function_path=f"{__name__}.hangs") as made:
        assert made._endpoint.url == f"http://127.0.0.1:{port}"


async def says_whether(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Sample:
    """Named by its path in a test below."""
    sample.tokens, sample.response_length = [1, 2], 1
    sample.rollout_log_probs, sample.spans = [-0.5], [VersionSpan(0, 0, 1)]
    sample.metadata["evaluation"] = evaluation
    sample.status = SampleStatus.COMPLETED
    return sample


async def test_a_generate_function_that_takes_evaluation_is_told_whether_it_generates_for_one() -> None:
    settings = {"custom_generate_function_path": f"{__name__}.says_whether"}
    seen = []
    async with generators(eval_interval=1, eval_size=1, **settings) as made:
        for generator in made.training(), made.evaluation(greedy_of(made.config)):
            group = Group([Sample(index=0, prompt="a")])
            await generator.generate(group)
            seen.append(group[0].metadata["evaluation"])
    assert seen == [False, True]


async def opens(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Named by its path in a test below."""
    async with args.agents.session(sample, sampling_params):
        pass
    return sample


async def test_an_agent_is_not_started_on_a_prompt_that_is_a_rendered_chat() -> None:
    settings = {"custom_generate_function_path": f"{__name__}.opens", "hf_checkpoint": "any"}
    group = Group([Sample(index=0, prompt="<|user|>Q<|assistant|>")])
    async with generators(apply_chat_template=True, **settings) as made:
        with pytest.raises(UserError, match=r"unset apply_chat_template, and let the agent send sample\.messages"):
            await made.training().generate(group)
    async with generators(**settings) as made:
        with pytest.raises(TrajectoryError, match="no request"):
            await made.training().generate(group)


async def test_no_port_is_opened_in_a_run_without_agents() -> None:
    async with generators() as made:
        assert made._endpoint.url == ""


async def test_an_external_generator_finds_the_key_of_the_endpoint_in_a_file_of_the_user_alone() -> None:
    async with generators(rollout_function_path=External.function) as made:
        assert made.agent_key_file.read_text() == made._endpoint.key
        assert made.agent_key_file.stat().st_mode & 0o777 == 0o600
    async with generators(custom_generate_function_path=f"{__name__}.hangs") as made:
        assert not made.agent_key_file.exists()


async def test_the_key_of_the_endpoint_stays_the_same_when_the_rollout_worker_is_replaced() -> None:
    async with generators(agent_key="left", rollout_function_path=External.function) as made:
        assert (made._endpoint.key, made.agent_key_file.read_text()) == ("left", "left")


async def test_a_user_defined_generate_function_has_the_configured_timeout() -> None:
    settings = {"custom_generate_function_path": f"{__name__}.hangs", "generate_timeout_seconds": 0.05}
    async with generators(**settings) as made:
        with pytest.raises(TrajectoryError, match=r"longer than 0\.05 s \(generate_timeout_seconds\)"):
            await made.training().generate(Group([Sample(prompt="Q")]))


async def test_posted_trajectories_wait_up_to_the_capacity_of_the_queue() -> None:
    posted = {
        "tokens": [1, 2],
        "response_length": 1,
        "rollout_log_probs": [-0.1],
        "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        "reward": 1,
    }
    async with generators(queue_capacity=2, n_samples_per_prompt=1) as made:
        trajectories = made.args.trajectories
        for _ in range(2):
            await trajectories.add([posted], lookup=lambda session: Sample(), claim=lambda session: Sample())
        with pytest.raises(BufferFullError):
            await trajectories.add([posted], lookup=lambda session: Sample(), claim=lambda session: Sample())


async def scores(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Named by its path in the test below."""
    return {"mine": {"rewards": [float(rollout_id)]}}


async def test_a_user_defined_evaluation_is_loaded_by_its_path() -> None:
    config = run_config(eval_function_path=f"{__name__}.scores")
    evaluate = evaluation_function(config, flat_args(config))
    assert evaluate is not None
    source: Any = None
    assert await evaluate(3, source) == {"mine": {"rewards": [3.0]}}


async def answers(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Answers all samples but the one with index 2."""
    if sample.index == 2:
        raise ValueError("no answer")
    sample.tokens, sample.response_length, sample.response = [1, 2], 1, "A"
    sample.rollout_log_probs, sample.spans = [-0.1], [VersionSpan(0, 0, 1)]
    sample.status = SampleStatus.COMPLETED
    return sample


def shouts(args: Any, sample: Sample, *, evaluation: bool = False) -> None:
    sample.response += "?" if evaluation else "!"


async def copies(args: Any, sample: Sample, **others: Any) -> Sample:
    return replace(sample, response=f"{sample.response} copied", index=None, metadata=others)


def fails(args: Any, sample: Sample) -> None:
    raise KeyError("score")


def fails_without_metadata(args: Any, sample: Sample) -> None:
    sample.metadata = 5  # type: ignore[assignment]
    raise KeyError("score")


def returns_text(args: Any, sample: Sample) -> str:
    return sample.response


HOOKED = {"custom_generate_function_path": f"{__name__}.answers"}


async def test_hooks_change_and_replace_each_finished_sample_in_turn() -> None:
    hooks = [f"{__name__}.shouts", f"{__name__}.copies"]
    async with generators(rollout_sample_hook_path=hooks, **HOOKED) as made:
        group = Group([Sample(index=0, prompt="Q"), Sample(index=1, prompt="Q")])
        await made.training().generate(group)
        await made.training().generate(group)
        assert [(sample.response, sample.index) for sample in group] == [("A! copied", 0), ("A! copied", 1)]
        assert group[0].metadata == {"rollout_id": None, "evaluation": False}
        greedy = Group([Sample(index=0, prompt="Q")])
        await made.evaluation(greedy_of(run_config())).generate(greedy)
        assert greedy[0].response == "A? copied"


async def test_a_sample_that_takes_the_place_of_another_is_of_the_same_data_set() -> None:
    async with generators(rollout_sample_hook_path=[f"{__name__}.copies"], **HOOKED) as made:
        origin = {"name": "sums", "row": 3, "epochs": 0.5}
        group = Group([Sample(index=0, prompt="Q", metadata={FROM_DATASET: origin})])
        await made.training().generate(group)
        assert (group.dataset, group[0].metadata["evaluation"]) == ("sums", False)


async def test_a_sample_whose_hook_replaces_the_metadata_and_fails_is_of_the_same_data_set() -> None:
    async with generators(rollout_sample_hook_path=[f"{__name__}.fails_without_metadata"], **HOOKED) as made:
        origin = {"name": "sums", "row": 3, "epochs": 0.5}
        group = Group([Sample(index=0, prompt="Q", metadata={FROM_DATASET: origin})])
        with pytest.raises(TrajectoryError, match="raised KeyError"):
            await made.training().generate(group)
        assert group[0].metadata == {FROM_DATASET: origin}


async def test_hooks_are_called_with_the_finished_samples_of_a_group_that_fails() -> None:
    async with generators(rollout_sample_hook_path=[f"{__name__}.shouts"], **HOOKED) as made:
        group = Group([Sample(index=1, prompt="Q"), Sample(index=2, prompt="Q")])
        with pytest.raises(TrajectoryError, match="no answer"):
            await made.training().generate(group)
        assert group[0].response == "A!"


@pytest.mark.parametrize(
    "hook, failure",
    [("fails", r"raised KeyError\('score'\)"), ("returns_text", "returned an object of class str: return a sample or")],
)
async def test_a_hook_that_cannot_be_used_fails_its_sample(hook: str, failure: str) -> None:
    sentence = f"sample 0: rollout_sample_hook_path {__name__}.{hook} {failure}"
    async with generators(rollout_sample_hook_path=[f"{__name__}.{hook}"], **HOOKED) as made:
        group = Group([Sample(index=0, prompt="Q")])
        with pytest.raises(TrajectoryError, match=sentence) as raised:
            await made.training().generate(group)
        assert raised.value.samples == [group[0]]


async def waits(args: Any, sample: Sample) -> None:
    await asyncio.Event().wait()


def blocks(args: Any, sample: Sample) -> None:
    threading.Event().wait()


class Answering:
    """Finishes samples at once, however slow the machine is."""

    async def generate(self, group: Group, sampling: object) -> None:
        for sample in group:
            sample.status = SampleStatus.COMPLETED


@pytest.mark.parametrize("hook", ["waits", "blocks"])
async def test_a_hook_has_the_time_limit_of_generate_functions(hook: str) -> None:
    path = f"{__name__}.{hook}"
    sentence = rf"sample 0: rollout_sample_hook_path {path} took longer than 0\.05 s \(generate_timeout_seconds\)"
    async with generators(rollout_sample_hook_path=[path], generate_timeout_seconds=0.05) as made:
        hooked: Any = made.training()
        hooked._generator = Answering()
        group = Group([Sample(index=index, prompt="Q") for index in range(50)])
        with pytest.raises(InfrastructureError, match=sentence) as late:
            await hooked.generate(group)
        assert late.value.samples == [group[0]]
        assert await asyncio.to_thread(int) == 0, "hooks that block leave threads to the other work of the run"
