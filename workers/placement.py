"""Reserves devices from Ray as placement groups. `config/device_plan.py` assigns them to processes.

The learner has a placement group, and so has each engine, because Ray takes back only whole groups: a removed engine
gives its devices back while the run goes on. Ray would spread separate groups over the nodes, so the devices of all are
reserved as one group first. The groups of learner and engines are then bound to the nodes that Ray chose for it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles_async.adapters.system.machine import fact, read_gpus
from miles_async.config.device_plan import Bundle, Card, Demand, Plan, plan, sort_key
from miles_async.doctor.facts import known
from miles_async.errors import UserError

RESERVE_SECONDS = 60.0
"""How long to wait for devices that are in use by others."""
LOOPBACK = "127.0.0.1"
NODE_SHARE = 0.001
"""Ray gives each node a resource of size 1 with the node's name. A bundle that takes a share of it is bound to it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Reserved devices, and the process that each device is for."""

    plan: Plan
    groups: tuple[PlacementGroup, ...]
    """`Bundle.group` is an index into this tuple. Colocated engines are in the group of the learner."""
    unit: str
    """`GPU`, or `CPU` on machines without GPUs. A CPU bundle is one core; processes may use further cores together."""
    local: bool
    """True if all devices are on the node of the driver, so that all servers can listen on loopback."""

    def actor_options(self, bundle: Bundle, gpu_fraction: float) -> dict[str, Any]:
        """Return the Ray options that place an actor on a bundle.

        On a GPU, the actor reserves `gpu_fraction` of it, so that a learner rank and an engine can share the GPU.
        """
        strategy = PlacementGroupSchedulingStrategy(
            self.groups[bundle.group],
            placement_group_bundle_index=bundle.index,
            placement_group_capture_child_tasks=False,
        )
        return {"scheduling_strategy": strategy, "num_cpus": 0, "num_gpus": gpu_fraction if self.unit == "GPU" else 0}

    def host(self, bundle: Bundle) -> str:
        """Return the address on which a server on this bundle listens."""
        return LOOPBACK if self.local else bundle.node

    def devices(self, bundles: list[Bundle]) -> tuple[int, ...]:
        """Return the numbers of the GPUs; empty on machines without GPUs."""
        return tuple(bundle.device for bundle in bundles) if self.unit == "GPU" else ()

    def release(self) -> None:
        """Give all devices back to Ray."""
        for group in self.groups:
            remove_placement_group(group)

    def release_engine(self, bundles: Sequence[Bundle]) -> None:
        """Give the devices of one engine back to Ray. Not for colocated engines, whose devices the learner needs."""
        remove_placement_group(self.groups[bundles[0].group])


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
    device = {"GPU": 1.0, "CPU": 1.0} if unit == "GPU" else {"CPU": 1.0}
    separate = not demand.colocated and bool(demand.learner) + demand.engines > 1
    group = _reserve_group([device] * demand.bundles, demand, unit, within)
    try:
        # The numbers of GPUs are not needed yet if other groups will hold the devices.
        planned = plan(_locate(group, "CPU" if separate else unit), demand)
    except UserError:
        remove_placement_group(group)
        raise
    local = planned.nodes == (_node_addresses()[_driver_node()],)
    if not separate:
        return Placement(planned, (group,), unit, local)
    remove_placement_group(group)
    groups: list[PlacementGroup] = []
    shares: list[tuple[Bundle, ...]] = []
    try:
        for share in filter(None, (planned.learner, *planned.engines)):
            bundles = [{**device, _node_resource(bundle.node): NODE_SHARE} for bundle in share]
            groups.append(_reserve_group(bundles, demand, unit, within))
            located = [replace(bundle, group=len(shares)) for bundle in _locate(groups[-1], unit)]
            shares.append(tuple(sorted(located, key=sort_key)))
    except UserError:
        for group in groups:
            remove_placement_group(group)
        raise
    learner = shares.pop(0) if demand.learner else ()
    return Placement(Plan(learner, tuple(shares)), tuple(groups), unit, local)


def _reserve_group(bundles: list[dict[str, float]], demand: Demand, unit: str, within: float) -> PlacementGroup:
    """Reserve one placement group. Raises UserError if its devices are not free `within` seconds."""
    group = placement_group(bundles, strategy="PACK")
    if group.wait(within):
        return group
    remove_placement_group(group)
    free = ray.available_resources().get(unit, 0)
    raise UserError(
        f"{_describe(demand, unit)}, but only {free:.0f} became free within {within:.0f} s: wait until other jobs "
        f"have ended, or {_ADVICE}"
    )


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
        gpus = zip(nodes.items(), ray.get(calls, timeout=RESERVE_SECONDS), strict=True)
        return [Bundle(index, addresses[node], device, card=card) for (index, node), (device, card) in gpus]
    # Cores are interchangeable, so they are numbered in order on each node.
    counters: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
    return [Bundle(index, addresses[node], next(counters[node])) for index, node in nodes.items()]


def _inside(group: PlacementGroup, index: int) -> dict[str, Any]:
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}


@ray.remote(num_gpus=1, num_cpus=0)
def _gpu_of_bundle() -> tuple[int, Card | None]:
    device, gpus = int(ray.get_gpu_ids()[0]), known(fact(read_gpus)) or ()
    card = Card(gpus[device].name, gpus[device].memory) if device < len(gpus) else None
    return device, card


def _node_resource(address: str) -> str:
    """Return the name of the resource that only the node with this address has."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == address]
    return next(name for name in nodes[0]["Resources"] if name.startswith("node:") and not name.startswith("node:__"))


def _node_addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _driver_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node
