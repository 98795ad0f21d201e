"""The assignment of devices to the learner and the engines."""

from __future__ import annotations

import random

import pytest

from miles_async.config.device_plan import Bundle, Demand, by_node, demand_of, plan
from miles_async.errors import UserError
from tests.configuration import run_config


def cluster(*nodes: tuple[str, int], seed: int = 0) -> list[Bundle]:
    """Bundles of `(address, devices)`, as Ray returns them: in no order."""
    devices_of_nodes = [(address, device) for address, devices in nodes for device in range(devices)]
    random.Random(seed).shuffle(devices_of_nodes)
    return [Bundle(index, node, device) for index, (node, device) in enumerate(devices_of_nodes)]


def devices(bundles: tuple[Bundle, ...]) -> list[tuple[str, int]]:
    return [(bundle.node, bundle.device) for bundle in bundles]


def demand(**settings: object) -> Demand:
    return demand_of(run_config(**settings))


def test_neighbouring_ranks_get_neighbouring_devices_in_any_order_of_the_nodes_of_ray() -> None:
    wanted = Demand(learner=4, engines=2, per_engine=2)
    for seed in range(5):
        found = plan(cluster(("10.0.0.10", 4), ("10.0.0.9", 4), seed=seed), wanted)
        assert devices(found.learner) == [("10.0.0.9", device) for device in range(4)]
        assert [devices(engine) for engine in found.engines] == [
            [("10.0.0.10", 0), ("10.0.0.10", 1)],
            [("10.0.0.10", 2), ("10.0.0.10", 3)],
        ]


def test_colocated_engines_share_the_learners_devices() -> None:
    found = plan(cluster(("a", 4)), Demand(learner=4, engines=2, per_engine=2, colocated=True))
    assert [bundle for engine in found.engines for bundle in engine] == list(found.learner)


def test_an_engine_larger_than_a_node_spans_nodes_evenly_and_answers_on_the_first() -> None:
    [engine] = plan(cluster(("10.0.0.2", 8), ("10.0.0.1", 8)), Demand(learner=0, engines=1, per_engine=16)).engines
    first, second = by_node(engine)
    assert ({bundle.node for bundle in first}, len(first)) == ({"10.0.0.1"}, 8)
    assert ({bundle.node for bundle in second}, len(second)) == ({"10.0.0.2"}, 8)


def test_an_engine_that_cannot_be_split_evenly_over_nodes_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"engine 0 would get 1 of a and 3 of b: SGLang needs the same number of devices"
    ):
        plan(cluster(("a", 4), ("b", 4)), Demand(learner=3, engines=1, per_engine=4))


def test_debug_modes_and_colocation_need_fewer_devices() -> None:
    sizes = {
        "actor_num_nodes": 2,
        "actor_num_gpus_per_node": 4,
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 2,
    }
    assert demand(**sizes) == Demand(learner=8, engines=4, per_engine=2)
    assert demand(**sizes).bundles == 16
    assert demand(**sizes, colocate=True).bundles == 8
    assert demand(**sizes, debug_rollout_only=True).bundles == 8
    assert demand(**sizes, debug_train_only=True, load_debug_rollout_data="x").engines == 0
