from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.sim.cluster import CHECKS, KNOBS, SCALES, SENSITIVITIES
from tests.sim.cluster_model import (
    LONGEST,
    MODELS,
    PARALLEL_SENDS,
    Cluster,
    Costs,
    demand_of,
    predict,
    workers_needed,
)
from workers.learner import MAX_PARALLEL_SENDS

FREE = Costs(**{one.name: 0.0 for one in fields(Costs)})
SMALL, LARGE = Cluster(gpus=64), Cluster(gpus=512)


def test_the_measured_costs_are_positive() -> None:
    assert all(getattr(Costs.measured(), one.name) > 0 for one in fields(Costs))


def test_a_rank_of_the_model_sends_to_as_many_engines_at_once_as_a_real_one() -> None:
    assert PARALLEL_SENDS == MAX_PARALLEL_SENDS


@pytest.mark.parametrize("name", [*SCALES, *SENSITIVITIES, *KNOBS, *CHECKS])
def test_one_part_is_saturated_and_no_other_one_is_overloaded_except_the_driver_that_nothing_waits_for(
    name: str,
) -> None:
    cluster = (SCALES | SENSITIVITIES | KNOBS | CHECKS)[name]
    prediction = predict(cluster, Costs.measured())
    assert prediction.utilisation[prediction.first] == pytest.approx(1)
    assert all(share <= 1 + 1e-9 for part, share in prediction.utilisation.items() if part != "driver")
    assert 0 < prediction.of_gpus <= 1
    assert 0 <= prediction.staleness <= cluster.staleness


def test_messages_that_cost_nothing_leave_the_gpus_to_limit_the_run() -> None:
    prediction = predict(SMALL, FREE)
    assert prediction.first == "training loop"
    assert prediction.of_gpus > 0.99
    assert prediction.utilisation["rollout worker"] == 0


def test_an_event_loop_that_limits_the_run_makes_half_the_groups_at_twice_the_cost() -> None:
    costs = replace(FREE, worker_per_token=1e-4)
    slow, slower = predict(SMALL, costs), predict(SMALL, replace(FREE, worker_per_token=2e-4))
    assert slow.first == "rollout worker"
    assert slower.groups_per_second == pytest.approx(slow.groups_per_second / 2)


def test_the_event_loop_is_late_by_the_waiting_time_of_a_queue_with_constant_service() -> None:
    service = 0.1
    prediction = predict(SMALL, replace(FREE, worker_per_group=service))
    load = prediction.utilisation["rollout worker"]
    assert load == pytest.approx(prediction.groups_per_second * service)
    assert prediction.loop_lag == pytest.approx(load * service / (2 * (1 - load)))


def test_the_calls_of_a_publish_grow_with_the_square_of_the_cluster() -> None:
    costs = replace(FREE, ray_per_call=1e-4)
    assert demand_of(LARGE, costs).control == pytest.approx(64 * demand_of(SMALL, costs).control)


def test_a_rank_sends_at_least_one_whole_tensor_to_every_engine() -> None:
    def written(cluster: Cluster) -> float:
        return demand_of(cluster, replace(FREE, copy_overhead=1.0)).write

    # With 128 ranks, the embedding is more than a rank's equal share, so twice the engines take twice the time.
    assert MODELS["4B"].largest_tensor > MODELS["4B"].parameters / LARGE.ranks
    assert written(replace(LARGE, gpus=1024)) == pytest.approx(2 * written(LARGE))
    # With 16 ranks, each rank has more than one tensor, and twice the ranks share the work for twice the engines.
    assert written(replace(SMALL, gpus=32)) == pytest.approx(written(replace(SMALL, gpus=16)))


def test_rollout_workers_share_everything_but_the_gpus_and_the_driver() -> None:
    one, four = (demand_of(replace(LARGE, workers=workers), Costs.measured()) for workers in (1, 4))
    shared = ("per_group", "control", "distribute", "background", "store", "router", "connections")
    assert [getattr(four, name) for name in shared] == [pytest.approx(getattr(one, name) / 4) for name in shared]
    alike = ("train", "stage", "write", "driver", "driver_background")
    assert [getattr(four, name) for name in alike] == [getattr(one, name) for name in alike]


def test_more_rollout_workers_are_needed_for_more_gpus_and_for_agents() -> None:
    costs = Costs.measured()
    assert workers_needed(SMALL, costs) == 1
    assert workers_needed(replace(SMALL, turns=50), costs) > 1
    assert workers_needed(Cluster(gpus=4096), costs) > workers_needed(LARGE, costs)


def test_the_longest_of_more_samples_is_longer_up_to_the_token_limit() -> None:
    lengths = [SMALL.longest_of(samples) for samples in (1, 8, 64, 10**6)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 1
    assert lengths[-1] == LONGEST
