"""Run as a process of its own, since a process knows one Ray: a run's placement on three nodes with logical GPUs."""

from __future__ import annotations

import json

import ray
from ray.cluster_utils import Cluster

from miles_async.core.placement import Demand, Plan
from miles_async.errors import UserError
from workers.placement import reserve

NODES, GPUS = 3, 2


def described(plan: Plan) -> dict[str, object]:
    return {
        "learner": [(bundle.node, bundle.device) for bundle in plan.learner],
        "engines": [[(bundle.node, bundle.device) for bundle in engine] for engine in plan.engines],
    }


def refusal(demand: Demand, within: float) -> str:
    try:
        reserve(demand, within)
    except UserError as error:
        return str(error)
    return ""


@ray.remote
class Settler:
    """What a learner rank or an engine finds where it was put."""

    def where(self) -> tuple[str, list[int]]:
        return ray.util.get_node_ip_address(), ray.get_gpu_ids()


def tell() -> dict[str, object]:
    wanted = Demand(learner=2, engines=2, per_engine=2)
    placement = reserve(wanted)
    story = described(placement.plan) | {"unit": placement.unit, "local": placement.local}
    settlers = [Settler.options(**placement.on(bundle, 0.4)).remote() for bundle in placement.plan.learner]
    story["settled"] = ray.get([settler.where.remote() for settler in settlers])
    story["too_many"] = refusal(Demand(learner=4, engines=2, per_engine=2), 1)
    story["taken"] = refusal(Demand(learner=1, engines=0, per_engine=1), 1)
    placement.give_back()
    return story


if __name__ == "__main__":
    cluster = Cluster()
    for number in range(NODES):
        # Each node on an address of its own, as on a real network; the last one given is the lowest.
        address = f"127.0.0.{NODES + 1 - number}"
        cluster.add_node(num_cpus=GPUS, num_gpus=GPUS, node_ip_address=address, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False, logging_level="error")
    try:
        print(json.dumps(tell()))
    finally:
        ray.shutdown()
        cluster.shutdown()
