"""A link between the nodes of a cluster breaks during a publish and heals: the run continues.

`python -m benchmarks.cluster break` plays many more cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster.broken_links import Cut, play
from benchmarks.cluster.nodes import ENGINES, NODES, LocalCluster, require_namespaces
from miles_async.errors import UserError

TEST_CLUSTER = 1
BATCHES, CUT_AT_BATCH = 6, 2
SMALL = ("--num-rollout", str(BATCHES), "--rollout-batch-size", "8", "--over-sampling-batch-size", "12")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    try:
        require_namespaces()
    except UserError as error:
        pytest.skip(str(error))
    cluster = LocalCluster(TEST_CLUSTER)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def test_a_cluster_that_runs_is_not_started_again(cluster: LocalCluster) -> None:
    before = {node: cluster.processes(node) for node in NODES}
    cluster.up()
    assert {node: cluster.processes(node) for node in NODES} == before


def test_a_publish_waits_for_a_link_that_breaks_while_weights_are_written(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    cut = Cut(node=ENGINES, moment="writing", seconds=5.0, cluster=cluster.number, batch=CUT_AT_BATCH)
    outcome = play(cut, tmp_path, SMALL)
    assert outcome.violations == []
    assert (outcome.code, outcome.batches) == (0, BATCHES)
