"""The assignment of devices to the learner and the engines."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from miles_async.config.device_plan import Bundle, Card, Demand, by_node, check_cards, demand_of, plan
from miles_async.errors import UserError
from tests.configuration import run_config


def cluster(*nodes: tuple[str, int], seed: int = 0) -> list[Bundle]:
    """Bundles of `(address, devices)`, as Ray returns them: in no order."""
    devices_of_nodes = [(address, device) for address, devices in nodes for device in range(devices)]
    random.Random(seed).shuffle(devices_of_nodes)
    return [Bundle(index, node, device) for index, (node, device) in enumerate(devices_of_nodes)]


def devices(bundles: tuple[Bundle, ...]) -> list[tuple[str, int]]:
    return [(bundle.node, bundle.device) for bundle in bundles]


H100, A100 = Card("NVIDIA H100 80GB HBM3", 85_520_809_984), Card("NVIDIA A100-SXM4-40GB", 42_298_834_944)


def with_cards(*nodes: tuple[str, Card]) -> list[Bundle]:
    """Eight devices of each node, all with the same card."""
    kinds = dict(nodes)
    return [replace(bundle, card=kinds[bundle.node]) for bundle in cluster(*((name, 8) for name in kinds))]


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


def test_host_names_are_ordered_by_their_addresses_and_unknown_names_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"rack-b": "10.0.0.9", "rack-a": "10.0.0.10", "10.0.0.11": "10.0.0.11"}

    def resolve(node: str) -> str:
        if node not in addresses:
            raise OSError("unknown")
        return addresses[node]

    monkeypatch.setattr("miles_async.config.device_plan.gethostbyname", resolve)
    nodes = ("unknown-b", "rack-a", "unknown-a", "10.0.0.11", "rack-b")
    found = plan(cluster(*((node, 1) for node in nodes)), Demand(learner=5, engines=0, per_engine=1))
    assert [bundle.node for bundle in found.learner] == ["rack-b", "rack-a", "10.0.0.11", "unknown-a", "unknown-b"]


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


MIXED = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}


def test_a_learner_on_cards_with_different_memory_is_refused() -> None:
    config = run_config(**MIXED)
    with pytest.raises(UserError) as refusal:
        check_cards(plan(with_cards(("a", H100), ("b", A100), ("c", A100)), demand_of(config)), config)
    assert str(refusal.value) == (
        "the learner would get 8 NVIDIA H100 80GB HBM3 with 79.6 GiB and 8 NVIDIA A100-SXM4-40GB with 39.4 GiB, and "
        "each of its ranks needs equally much memory: set gpu_memory_gib to 39, the smallest, or actor_num_nodes to 1"
    )


@pytest.mark.parametrize("settings", [{"gpu_memory_gib": 39}, {"actor_num_nodes": 1}])
def test_the_advice_to_a_learner_on_different_cards_works(settings: dict[str, int]) -> None:
    config = run_config(**MIXED | settings)
    check_cards(plan(with_cards(("a", H100), ("b", A100), ("c", A100)), demand_of(config)), config)


def test_a_memory_plan_for_more_memory_than_the_cards_have_is_refused() -> None:
    config = run_config(actor_num_gpus_per_node=8, gpu_memory_gib=80)
    check_cards(plan(with_cards(("a", H100), ("b", H100)), demand_of(config)), config)
    with pytest.raises(UserError, match="but gpu_memory_gib is 80: set gpu_memory_gib to 39"):
        check_cards(plan(with_cards(("a", A100), ("b", A100)), demand_of(config)), config)


def test_an_engine_on_cards_with_different_memory_is_refused_and_separate_engines_are_not() -> None:
    cards, one = with_cards(("a", H100), ("b", A100)), Demand(learner=0, engines=1, per_engine=16)
    with pytest.raises(UserError, match=r"engine 0 would get 8 .* and 8 .* set rollout_num_gpus_per_engine to 8, or"):
        check_cards(plan(cards, one), run_config())
    check_cards(plan(cards, replace(one, engines=2, per_engine=8)), run_config())


def test_cards_whose_memory_is_nearly_equal_may_be_mixed() -> None:
    config = run_config(**MIXED)
    others = Card("NVIDIA A100-SXM4-80GB", 85_899_345_920)
    check_cards(plan(with_cards(("a", H100), ("b", others), ("c", others)), demand_of(config)), config)
