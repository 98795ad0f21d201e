"""Devices reserved from Ray, and where on them each process goes. The planning itself is `config/device_plan.py`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles_async.config.device_plan import Bundle, Demand, Plan, plan
from miles_async.errors import UserError

RESERVE_SECONDS = 60.0
"""How long others may hold what this run asks for, before it gives up."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Placement:
    plan: Plan
    group: PlacementGroup
    unit: str
    """`GPU`, or `CPU` on a machine without: one core per rank, which ranks may share beyond that."""
    local: bool
    """Everything is on the driver's own node, so that nothing needs to be reached from outside it."""

    def on(self, bundle: Bundle, share: float) -> dict[str, Any]:
        """Options of an actor there; of a GPU it takes a `share`, so that a learner rank and an engine fit on one."""
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=bundle.index, placement_group_capture_child_tasks=False
        )
        return {"scheduling_strategy": strategy, "num_cpus": 0, "num_gpus": share if self.unit == "GPU" else 0}

    def host(self, bundle: Bundle) -> str:
        """The address at which a server there listens."""
        return LOOPBACK if self.local else bundle.node

    def devices(self, bundles: list[Bundle]) -> tuple[int, ...]:
        """The GPUs of a server; none on a CPU machine."""
        return tuple(bundle.device for bundle in bundles) if self.unit == "GPU" else ()

    def release(self) -> None:
        remove_placement_group(self.group)


def on_driver_node() -> dict[str, Any]:
    """Options of an actor on the driver's own node, where it reaches the router over loopback."""
    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False), "num_cpus": 0}


def reserve(demand: Demand, within: float = RESERVE_SECONDS) -> Placement:
    """Blocks until Ray has the devices. Raises UserError when it cannot have them, or not `within` seconds."""
    there = ray.cluster_resources()
    unit = "GPU" if there.get("GPU", 0) else "CPU"
    if demand.bundles > there.get(unit, 0):
        raise UserError(f"{_needs(demand, unit)}, and the Ray cluster has {there.get(unit, 0):.0f}: {_ADVICE}")
    bundle = {"GPU": 1.0, "CPU": 1.0} if unit == "GPU" else {"CPU": 1.0}
    group = placement_group([bundle] * demand.bundles, strategy="PACK")
    if not group.wait(within):
        remove_placement_group(group)
        free = ray.available_resources().get(unit, 0)
        raise UserError(
            f"{_needs(demand, unit)}, of which others left only {free:.0f} free for {within:.0f} s: wait for them, or "
            f"{_ADVICE}"
        )
    bundles = _probe(group, unit)
    try:
        planned = plan(bundles, demand)
    except UserError:
        remove_placement_group(group)
        raise
    return Placement(planned, group, unit, local=planned.nodes == (_addresses()[_our_node()],))


_ADVICE = "set actor_num_nodes, actor_num_gpus_per_node or rollout_num_gpus lower, or join a larger cluster"


def _needs(demand: Demand, unit: str) -> str:
    rollout = demand.engines * demand.per_engine
    shared = "shared with" if demand.colocated else f"{rollout} for"
    shares = f"{demand.learner} for the learner, {shared} {demand.engines} engines"
    return f"the run needs {demand.bundles} {unit}s ({shares})"


def _probe(group: PlacementGroup, unit: str) -> list[Bundle]:
    """Where each bundle is. Only a process inside one can say which GPU it is; cores are interchangeable."""
    places = placement_group_table(group)["bundles_to_node_id"]
    addresses = _addresses()
    if unit == "GPU":
        asked = [_gpu_of_bundle.options(**_inside(group, index)).remote() for index in places]
        devices = dict(zip(places, ray.get(asked, timeout=RESERVE_SECONDS), strict=True))
    else:
        devices = _numbered(places)
    return [Bundle(index, addresses[node], devices[index]) for index, node in places.items()]


def _numbered(places: dict[int, str]) -> dict[int, int]:
    taken: defaultdict[str, int] = defaultdict(int)
    numbers = {}
    for index, node in places.items():
        numbers[index] = taken[node]
        taken[node] += 1
    return numbers


def _inside(group: PlacementGroup, index: int) -> dict[str, Any]:
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}


@ray.remote(num_gpus=1, num_cpus=0)
def _gpu_of_bundle() -> int:
    return int(ray.get_gpu_ids()[0])


def _addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _our_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node
