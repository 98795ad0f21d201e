"""Reserves devices from Ray as a placement group. `config/device_plan.py` assigns them to processes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles_async.config.device_plan import Bundle, Demand, Plan, plan
from miles_async.errors import UserError

RESERVE_SECONDS = 60.0
"""How long to wait for devices that are in use by others."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Placement:
    """Reserved devices, and the process that each device is for."""

    plan: Plan
    group: PlacementGroup
    unit: str
    """`GPU`, or `CPU` on machines without GPUs. A CPU bundle is one core; processes may use further cores together."""
    local: bool
    """True if all devices are on the node of the driver, so that all servers can listen on loopback."""

    def actor_options(self, bundle: Bundle, gpu_fraction: float) -> dict[str, Any]:
        """Return the Ray options that place an actor on a bundle.

        On a GPU, the actor reserves `gpu_fraction` of it, so that a learner rank and an engine can share the GPU.
        """
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=bundle.index, placement_group_capture_child_tasks=False
        )
        return {"scheduling_strategy": strategy, "num_cpus": 0, "num_gpus": gpu_fraction if self.unit == "GPU" else 0}

    def host(self, bundle: Bundle) -> str:
        """Return the address on which a server on this bundle listens."""
        return LOOPBACK if self.local else bundle.node

    def devices(self, bundles: list[Bundle]) -> tuple[int, ...]:
        """Return the numbers of the GPUs; empty on machines without GPUs."""
        return tuple(bundle.device for bundle in bundles) if self.unit == "GPU" else ()

    def release(self) -> None:
        """Give the devices back to Ray."""
        remove_placement_group(self.group)


def on_driver_node() -> dict[str, Any]:
    """Return the Ray options of an actor on the node of the driver, where it reaches the router over loopback."""
    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False), "num_cpus": 0}


def reserve(demand: Demand, within: float = RESERVE_SECONDS) -> Placement:
    """Reserve devices; blocks until they are free.

    Raises UserError if the cluster has too few devices, or if they are not free `within` seconds.
    """
    total = ray.cluster_resources()
    unit = "GPU" if total.get("GPU", 0) else "CPU"
    if demand.bundles > total.get(unit, 0):
        raise UserError(f"{_describe(demand, unit)}, but the Ray cluster has {total.get(unit, 0):.0f}: {_ADVICE}")
    bundle = {"GPU": 1.0, "CPU": 1.0} if unit == "GPU" else {"CPU": 1.0}
    group = placement_group([bundle] * demand.bundles, strategy="PACK")
    if not group.wait(within):
        remove_placement_group(group)
        free = ray.available_resources().get(unit, 0)
        raise UserError(
            f"{_describe(demand, unit)}, but only {free:.0f} became free within {within:.0f} s: wait until other jobs "
            f"have ended, or {_ADVICE}"
        )
    bundles = _locate(group, unit)
    try:
        planned = plan(bundles, demand)
    except UserError:
        remove_placement_group(group)
        raise
    return Placement(planned, group, unit, local=planned.nodes == (_node_addresses()[_driver_node()],))


_ADVICE = "set actor_num_nodes, actor_num_gpus_per_node or rollout_num_gpus lower, or join a larger cluster"


def _describe(demand: Demand, unit: str) -> str:
    rollout = demand.engines * demand.per_engine
    engines = "shared with" if demand.colocated else f"{rollout} for"
    split = f"{demand.learner} for the learner, {engines} {demand.engines} engines"
    return f"the run needs {demand.bundles} {unit}s ({split})"


def _locate(group: PlacementGroup, unit: str) -> list[Bundle]:
    """Find the node and the device number of each bundle."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = _node_addresses()
    if unit == "GPU":
        # Ray reveals the number of a GPU only to a process that runs on the bundle.
        calls = [_gpu_of_bundle.options(**_inside(group, index)).remote() for index in nodes]
        devices = dict(zip(nodes, ray.get(calls, timeout=RESERVE_SECONDS), strict=True))
    else:
        # Cores are interchangeable, so they are numbered in order on each node.
        counters: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        devices = {index: next(counters[node]) for index, node in nodes.items()}
    return [Bundle(index, addresses[node], devices[index]) for index, node in nodes.items()]


def _inside(group: PlacementGroup, index: int) -> dict[str, Any]:
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}


@ray.remote(num_gpus=1, num_cpus=0)
def _gpu_of_bundle() -> int:
    return int(ray.get_gpu_ids()[0])


def _node_addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _driver_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node
