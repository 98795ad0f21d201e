"""The closed form of a cluster beside simulated runs, at a size that takes seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.cluster import CHECKS, disagreements, simulate
from tests.sim.cluster_model import Cluster, Costs, predict

TINY = Cluster(gpus=8, streams=16, group=4, prompt=64, response=512)
SLOW_LOOP = replace(Costs.measured(), worker_per_group=1.0)


@pytest.mark.parametrize(
    "cluster, costs, first",
    [
        (TINY, Costs.measured(), "training loop"),
        (replace(TINY, engine_share=0.5), Costs.measured(), "engines"),
        (TINY, SLOW_LOOP, "rollout worker"),
    ],
)
def test_a_simulated_run_is_as_fast_as_the_part_that_the_model_names(
    cluster: Cluster, costs: Costs, first: str
) -> None:
    predicted, simulated = predict(cluster, costs), simulate(cluster, costs)
    assert predicted.first == first
    assert disagreements({"a tiny cluster": (predicted, simulated)}) == []
    assert simulated.rollout_worker == pytest.approx(predicted.utilisation["rollout worker"], abs=0.05)
    assert simulated.learner_waits == pytest.approx(predicted.learner_waits, abs=0.1)
    assert simulated.staleness == pytest.approx(predicted.staleness, abs=0.5)


def test_a_run_that_the_model_does_not_describe_is_reported() -> None:
    cluster, costs = CHECKS["8 GPUs"], Costs.measured()
    simulated = simulate(TINY, costs)
    pairs = {"a tiny cluster": (predict(cluster, costs), replace(simulated, violations=1))}
    assert [sentence.partition(":")[0] for sentence in disagreements(pairs)] == ["a tiny cluster"] * 2


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(TINY, SLOW_LOOP, seed=1) == simulate(TINY, SLOW_LOOP, seed=1)
    assert simulate(TINY, SLOW_LOOP, seed=1) != simulate(TINY, SLOW_LOOP, seed=2)
