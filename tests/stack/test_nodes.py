"""The only engine spans two nodes: weights reach both; one of them is killed, then the router, and the run goes on.

The nodes are two addresses of this machine, with a server at each.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray

from miles_async.adapters.null import NullEngines, NullLearner
from miles_async.adapters.ray.learner import RayRanks
from miles_async.adapters.ray.servers import start_engine
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.server_key import authorization
from miles_async.adapters.weights.channel import find_transports
from miles_async.events import EngineChanged, Event, GroupGenerated, GroupMoved, StepEnded
from miles_async.pipeline.devices import SharedDevices
from tests.stack.conftest import Played, Stack, settings
from tests.stack.listeners import is_reachable, listeners_of
from workers.engine import Engine
from workers.specs import ClusterHandles, engine_spec

NODES = ("127.0.0.2", "127.0.0.3")
TRANSPORTS = ("disk", "broadcast", "p2p")
"""That reach both nodes; the run takes the last."""
ROLLOUTS, NODE_KILLED, ROUTER_KILLED = 14, 2, 4
"""The engine dies some time after its node, so a group can be lost twice. Such groups are tried one at a time."""


@pytest.fixture(scope="module")
def servers(stack: Stack) -> Iterator[list[EngineInfo]]:
    """The shared cluster, with such an engine instead of the usual one."""
    before, logs = stack.cluster.handles, stack.cluster.logs / "nodes"
    [usual] = before.engines
    config = settings("train_async.py", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2")
    specs = [
        engine_spec(config, "engine-0", before.checkpoint, logs, host=host, nodes=len(NODES), node_rank=rank)
        for rank, host in enumerate(NODES)
    ]
    parts: list[Any] = [ray.remote(Engine).options(num_cpus=0, max_concurrency=4).remote(spec) for spec in specs]
    ranks = RayRanks(before.learner_ranks)
    try:
        first = stack.do(start_engine(parts))
        stack.do(withdrawn(before, usual))
        apart = SharedDevices(NullLearner(), NullEngines(), colocated=False)
        transports = [stack.do(find_transports(ranks, transport, [first], apart)) for transport in TRANSPORTS]
        stack.cluster.handles = replace(
            before, engines=[first], engine_actors={"engine-0": parts}, weight_transports=transports[-1]
        )
        yield ray.get([part.info.remote() for part in parts])
        stack.do(withdrawn(before, stack.cluster.handles.engines[0]))
    finally:
        ray.get([part.stop.remote() for part in parts])
        stack.cluster.handles = before
        stack.do(ranks.on_all("connect", [usual], {}))


async def withdrawn(handles: ClusterHandles, engine: EngineInfo) -> None:
    """The router outlives the runs that registered engines with it."""
    fleet = SGLangFleet(handles.router_url, router_key=handles.router_key)
    fleet.register_engine(engine)
    await fleet.admit(engine.name)
    await fleet.fence(engine.name, "another one serves")
    await fleet.close()


@pytest.fixture(scope="module")
def killed(stack: Stack, servers: list[EngineInfo]) -> Played:
    """The run is synchronous, so each step starts from the weights that sampled."""
    router = ray.get(stack.cluster.handles.router_actor.pid.remote())
    kills = iter([(NODE_KILLED, servers[1].pid), (ROUTER_KILLED, router)])
    sizes = ("--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "8", "--eval-size", "0")
    return stack.play("train.py", *sizes, watch=Killer(kills).watch)


class Killer:
    """Kills process groups, each when the first group of its rollout has gone to the engines."""

    def __init__(self, kills: Iterator[tuple[int, int]]) -> None:
        self._kills = kills
        self._next = next(kills, None)
        self._steps = 0

    def watch(self, event: Event) -> None:
        self._steps += isinstance(event, StepEnded)
        at_the_engines = isinstance(event, GroupMoved) and event.after == "in_flight"
        if self._next is not None and at_the_engines and self._steps == self._next[0]:
            os.killpg(self._next[1], signal.SIGKILL)
            self._next = next(self._kills, None)


def test_an_engine_at_addresses_of_its_nodes_is_reachable_there_only(servers: list[EngineInfo]) -> None:
    """The ranks of the engine have registered at these addresses too."""
    for host, server in zip(NODES, servers, strict=True):
        listeners = list(listeners_of(psutil.Process(server.pid)))
        assert host in {found.address for found in listeners}
        assert [found for found in listeners if found.address != host and is_reachable(found)] == []


def test_every_batch_is_trained_and_no_group_is_lost(killed: Played) -> None:
    assert [event.rollout for event in killed.of(StepEnded)] == list(range(ROLLOUTS))
    assert killed.violations == []
    moves = killed.of(GroupMoved)
    lost = {event.feed_index for event in moves if event.reason == "engine_lost"}
    assert lost, "nothing was in flight when the node was killed"
    assert lost <= {event.feed_index for event in moves if event.after == "published"}
    assert not (killed.folder.path / "dead_letters.jsonl").exists()


def test_an_engine_that_spans_nodes_is_restarted_with_the_current_weights(
    killed: Played, stack: Stack, servers: list[EngineInfo]
) -> None:
    changes = [(event.state, event.version) for event in killed.of(EngineChanged)]
    assert changes == [("routed", None), ("fenced", NODE_KILLED), ("routed", NODE_KILLED)]
    [parts] = stack.cluster.handles.engine_actors.values()
    now = ray.get([part.info.remote() for part in parts])
    assert all(after.pid != before.pid for before, after in zip(servers, now, strict=True))


def test_only_the_first_node_receives_requests(killed: Played, stack: Stack) -> None:
    [engine] = stack.cluster.handles.engines
    handles = stack.cluster.handles
    request = urllib.request.Request(f"{handles.router_url}/workers", headers=authorization(handles.router_key))
    with urllib.request.urlopen(request) as answer:
        assert [worker["url"] for worker in json.load(answer)["workers"]] == [engine.url]
    assert engine.url.startswith(f"http://{NODES[0]}:")


def test_every_token_was_sampled_from_the_weights_that_its_version_names(killed: Played) -> None:
    """The weights of the engine's start are others: a step at `lr` moves log-probabilities by more than this."""
    assert all(event.metrics["grad_norm"] > 0 for event in killed.of(StepEnded))
    assert max(event.metrics["logprob_gap_max"] for event in killed.of(StepEnded)) < 1e-4


def test_generation_continues_as_soon_as_the_engine_is_back(killed: Played) -> None:
    fenced, back = [event.time for event in killed.of(EngineChanged)][1:]
    after = next(event for event in killed.of(GroupGenerated) if event.time > fenced)
    # The answer to a request that waited for the router's time limit would come later.
    assert back < after.time < back + killed.config.engine.sglang_router_request_timeout_secs
