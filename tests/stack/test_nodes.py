"""An engine that spans nodes: one tensor-parallel rank in each of two servers, at addresses of their own."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from transformers import Qwen3ForCausalLM

from miles_async.adapters.ray.servers import start_engine
from miles_async.adapters.ray.weights import RaySources
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.channel import find_ways
from miles_async.adapters.weights.engine import call_engine
from miles_async.adapters.weights.source import Source
from miles_async.errors import EngineLost
from miles_async.observability.events import EngineChanged, GroupMoved, StepEnded
from tests.stack import engine_stack
from tests.stack.conftest import Played, Stack, settings
from tests.stack.signals import Signals
from workers.engine import Engine
from workers.specs import engine_spec

NODES = ("127.0.0.2", "127.0.0.3")
WAYS = ("memory", "p2p", "broadcast", "disk", "disk_delta")
ROLLOUTS, STOPPED = 6, 3
PROMPT = [(7 * i) % 250 for i in range(20)]


@pytest.fixture(scope="module")
def usual(stack: Stack) -> EngineInfo:
    return stack.cluster.surroundings.engines[0]


@pytest.fixture(scope="module")
def servers(stack: Stack, usual: EngineInfo) -> Iterator[list[EngineInfo]]:
    """The shared cluster, with such an engine in place of its own."""
    before, logs = stack.cluster.surroundings, stack.cluster.logs / "nodes"
    config = settings("train_async.py", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2")
    specs = [
        engine_spec(config, "engine-0", before.checkpoint, logs, host=host, nodes=len(NODES), node_rank=rank)
        for rank, host in enumerate(NODES)
    ]
    parts = [ray.remote(Engine).options(num_cpus=0, max_concurrency=4).remote(spec) for spec in specs]
    sources = RaySources(before.learner_ranks)
    try:
        first = stack.do(start_engine(parts))
        stack.do(withdrawn(before.router_url, usual))
        ways = stack.do(find_ways(sources, "p2p", [first]))
        stack.cluster.surroundings = replace(
            before, engines=[first], engine_actors={"engine-0": parts}, weight_ways=ways
        )
        yield ray.get([part.info.remote() for part in parts])
        stack.do(withdrawn(before.router_url, stack.cluster.surroundings.engines[0]))
    finally:
        ray.get([part.stop.remote() for part in parts])
        stack.cluster.surroundings = before
        stack.do(sources.meet([usual]))


async def withdrawn(router_url: str, engine: EngineInfo) -> None:
    """The router outlives the runs that told it of their engines."""
    fleet = SGLangFleet(router_url)
    fleet.introduce(engine)
    await fleet.admit(engine.name)
    await fleet.fence(engine.name, "another one serves")
    await fleet.close()


def test_each_node_gets_its_part_from_each_source_by_every_way(
    stack: Stack, usual: EngineInfo, servers: list[EngineInfo], tmp_path: Path
) -> None:
    """Two sources, and everything compared."""
    checkpoint = stack.cluster.surroundings.checkpoint
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine = engine_stack.Stack(servers[0], "", Path(checkpoint), model)
    named = [(name, tuple(tensor.shape)) for name, tensor in engine.named_tensors()]
    sources = [Source(named, tmp_path, rank=rank, sources=2, everything=True, timeout=20.0) for rank in range(2)]
    for source in sources:
        source.meet([engine.engine])
    for version, way in enumerate(WAYS, start=1):
        engine.change_weights()
        for source in sources:
            source.stage(version, engine.named_tensors())
        assert [source.write(version, "engine-0", way).error for source in sources] == [None, None], way
        # A prompt that was not cached under the version before.
        assert logprob_error(engine, [version, *PROMPT]) < 1e-4, way
    with pytest.raises(EngineLost, match=r"engine other holds its weights in another layout than engine-0"):
        sources[0].meet([servers[0], replace(usual, name="other")])
    for source in sources:
        source.close()


def logprob_error(stack: engine_stack.Stack, prompt: list[int]) -> float:
    """Of a short answer, asked for directly."""
    request = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = call_engine(stack.engine.url, "/generate", request, timeout=20)
    tokens = prompt + answer["output_ids"]
    with torch.no_grad():
        logits = stack.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    drawn = answer["meta_info"]["output_token_logprobs"]
    return max(
        abs(float(logits[place - 1, tokens[place]]) - drawn[place - len(prompt)][0])
        for place in range(len(prompt), len(tokens))
    )


@pytest.fixture(scope="module")
def run(stack: Stack, servers: list[EngineInfo]) -> Played:
    """The second node hangs while rollout 3 is generated. In turns, so that no publish can be what finds it."""
    stop = Signals(iter([(STOPPED, servers[1].pid, signal.SIGSTOP)]))
    sizes = ("--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "8", "--eval-size", "0")
    return stack.play("train.py", *sizes, "--engine-health-timeout-seconds", "4", watch=stop.watch)


def test_every_batch_is_trained_on_tokens_of_the_weights_that_it_names(run: Played) -> None:
    steps = run.of(StepEnded)
    assert [event.rollout for event in steps] == list(range(ROLLOUTS))
    assert all(event.metrics["grad_norm"] > 0 for event in steps)
    assert max(event.metrics["logprob_gap_max"] for event in steps) < 1e-4
    assert run.violations == []


def test_a_node_that_hangs_is_found_by_a_look_alone_and_the_whole_engine_is_replaced(
    run: Played, stack: Stack, servers: list[EngineInfo]
) -> None:
    changes = run.of(EngineChanged)
    assert [(event.state, event.version) for event in changes] == [
        ("routed", None),
        ("fenced", STOPPED),
        ("routed", STOPPED),
    ]
    assert changes[1].reason.startswith("it drew no token")
    [parts] = stack.cluster.surroundings.engine_actors.values()
    now = ray.get([part.info.remote() for part in parts])
    assert all(after.pid != before.pid for before, after in zip(servers, now, strict=True))


def test_what_it_held_is_given_back_before_it_is_there_again(run: Played) -> None:
    _, fenced, back = run.of(EngineChanged)
    lost = [event for event in run.of(GroupMoved) if event.reason == "engine_lost"]
    assert lost, "nothing was in flight"
    assert all(fenced.time < event.time < back.time for event in lost)
    published = {event.feed_index for event in run.of(GroupMoved) if event.after == "published"}
    assert {event.feed_index for event in lost} <= published


def test_the_router_knows_the_first_node_alone(stack: Stack, run: Played) -> None:
    [engine] = stack.cluster.surroundings.engines
    with urllib.request.urlopen(f"{stack.cluster.surroundings.router_url}/workers") as answer:
        assert [worker["url"] for worker in json.load(answer)["workers"]] == [engine.url]
