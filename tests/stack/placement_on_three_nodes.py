"""Places a run on a Ray of three nodes with logical GPUs, in a process that has joined no other Ray."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

from miles_async.config.device_plan import Demand, Plan
from miles_async.errors import UserError
from tests.configuration import run_config
from workers.placement import reserve
from workers.specs import ray_arguments

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


class Settler:
    """Returns the node and the devices that a learner rank or an engine sees."""

    def where(self) -> tuple[Any, Any]:
        return ray.util.get_node_ip_address(), ray.get_gpu_ids()

    def surroundings(self) -> tuple[str, str | None]:
        return os.getcwd(), os.environ.get("HF_HUB_OFFLINE")


def placed() -> dict[str, object]:
    wanted = Demand(learner=2, engines=2, per_engine=2)
    placement = reserve(wanted)
    found = described(placement.plan) | {"unit": placement.unit, "local": placement.local}
    settler_of: Any = ray.remote(Settler)
    settlers = [
        settler_of.options(**placement.actor_options(bundle, 0.4)).remote() for bundle in placement.plan.learner
    ]
    found["settled"] = ray.get([settler.where.remote() for settler in settlers])
    found["surroundings"] = ray.get([settler.surroundings.remote() for settler in settlers])
    found["too_many"] = refusal(Demand(learner=4, engines=2, per_engine=2), 1)
    found["taken"] = refusal(Demand(learner=1, engines=0, per_engine=1), 1)
    placement.release_engine(placement.plan.engines[1])
    another = reserve(Demand(learner=0, engines=1, per_engine=2))
    found["given_back"] = described(another.plan)["engines"]
    found["learner_remains"] = ray.get([settler.where.remote() for settler in settlers]) == found["settled"]
    placement.release()
    another.release()
    return found


if __name__ == "__main__":
    os.environ.pop("HF_HUB_OFFLINE", None)
    cluster = Cluster()
    for number in range(NODES):
        # Each node has its own address, as on a real network; the last one given is the lowest.
        address = f"127.0.0.{NODES + 1 - number}"
        cluster.add_node(num_cpus=GPUS, num_gpus=GPUS, node_ip_address=address, include_dashboard=False)
    # The nodes were started in another folder than the run is.
    os.chdir(sys.argv[1])
    ray.init(**ray_arguments(run_config(ray_address=cluster.address)), logging_level=logging.ERROR)
    try:
        print(json.dumps(placed()))
    finally:
        ray.shutdown()
        cluster.shutdown()
