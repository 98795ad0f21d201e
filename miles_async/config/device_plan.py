"""Assigns the devices that Ray reserved to learner ranks and engines. Pure functions without I/O.

Ray returns the bundles of a placement group in any order. They are sorted by node and device, as in slime, so that
neighbouring ranks get neighbouring devices and every run gets the same assignment. The learner takes the first devices.
Engines take the remaining devices or, if they are colocated, the devices of the learner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from socket import gethostbyname, inet_aton

from miles_async.config.generation import generates
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.planning.plan import FREE_FRACTION, GIB

EQUAL_MEMORY = 0.9
"""Share of the memory of the largest card that the smallest must have for SGLang (`_check_tp_memory_balance`)."""


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU."""

    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One reserved device: a GPU, or a core on a machine without GPUs."""

    index: int
    """Index of the bundle in its placement group."""
    node: str
    """Address of the node."""
    device: int
    """Number of the device on its node."""
    group: int = 0
    """Number of the placement group that the bundle belongs to."""
    card: Card | None = None
    """None on a machine without GPUs, or if the driver does not name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The devices that a run needs."""

    learner: int
    """Number of learner ranks, with one device each; 0 if the run does not train."""
    engines: int
    """Number of engines; 0 if the run does not generate."""
    per_engine: int
    """Devices per engine."""
    colocated: bool = False
    """True if engines share the devices of the learner."""

    @property
    def bundles(self) -> int:
        """Number of devices to reserve."""
        rollout = self.engines * self.per_engine
        return max(self.learner, rollout) if self.colocated else self.learner + rollout


def demand_of(config: RunConfig) -> Demand:
    """Devices that learner and engines need; none for a learner or engines that the run does not start."""
    return Demand(
        learner=0 if config.debug.debug_rollout_only else config.learner.ranks,
        engines=config.engine.count if generates(config) else 0,
        per_engine=config.engine.rollout_num_gpus_per_engine,
        colocated=config.cluster.colocate and not config.debug.debug_rollout_only,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """The devices of each process."""

    learner: tuple[Bundle, ...]
    """Device of each learner rank, in order of ranks."""
    engines: tuple[tuple[Bundle, ...], ...]
    """Devices of each engine, node by node. The server on the first node of an engine receives its requests."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses of all nodes, without duplicates, in order of first use."""
        used = [*self.learner, *(bundle for engine in self.engines for bundle in engine)]
        return tuple(dict.fromkeys(bundle.node for bundle in used))


def plan(bundles: Iterable[Bundle], demand: Demand) -> Plan:
    """Assign devices. Raises UserError if an engine would get different numbers of devices on different nodes."""
    ordered = sorted(bundles, key=sort_key)
    first = 0 if demand.colocated else demand.learner
    size = demand.per_engine
    engines = tuple(tuple(ordered[first + i * size : first + (i + 1) * size]) for i in range(demand.engines))
    for number, engine in enumerate(engines):
        _require_even(number, engine)
    return Plan(tuple(ordered[: demand.learner]), engines)


def by_node(engine: Sequence[Bundle]) -> list[list[Bundle]]:
    """Group the bundles of an engine by node."""
    nodes: dict[str, list[Bundle]] = {}
    for bundle in engine:
        nodes.setdefault(bundle.node, []).append(bundle)
    return list(nodes.values())


def _require_even(number: int, engine: Sequence[Bundle]) -> None:
    counts = Counter(bundle.node for bundle in engine)
    if len(set(counts.values())) > 1:
        split = " and ".join(f"{count} of {node}" for node, count in counts.items())
        raise UserError(
            f"engine {number} would get {split}: SGLang needs the same number of devices on each node; set "
            "rollout_num_gpus_per_engine to a divisor of the devices per node, and let the learner use complete nodes"
        )


def check_cards(plan: Plan, config: RunConfig) -> None:
    """Raise UserError if learner ranks, or the ranks of an engine, would get cards with too different memory.

    Ranks of the learner need equally much memory, so their cards may differ if the memory plan is for the smallest.
    SGLang refuses an engine if one of its cards has less than nine tenths of the memory of another.
    """
    for number, engine in enumerate(plan.engines):
        if _differ(engine):
            size = next(size for size in range(len(engine) // 2, 0, -1) if not any(map(_differ, _parts(engine, size))))
            raise UserError(
                f"engine {number} would get {_described(engine)}: SGLang refuses GPUs whose memory differs; set "
                f"rollout_num_gpus_per_engine to {size}, or actor_num_nodes and actor_num_gpus_per_node so that the "
                "learner takes all GPUs of one kind"
            )
    memory, learner = config.cluster.gpu_memory_gib, config.learner
    smallest = min((bundle.card.memory for bundle in plan.learner if bundle.card), default=None)
    if smallest is None or (memory is None and not _differ(plan.learner)):
        return
    if memory is not None and memory * GIB * (1 - FREE_FRACTION) <= smallest:
        return
    sentence = f"the learner would get {_described(plan.learner)}"
    advice = f"set gpu_memory_gib to {smallest // GIB}"
    if _differ(plan.learner):
        sentence += ", and each of its ranks needs equally much memory"
        equal = next(size for size in range(len(plan.learner), 0, -1) if not _differ(plan.learner[:size]))
        nodes = equal // learner.actor_num_gpus_per_node
        advice += ", the smallest, or " + (
            f"actor_num_nodes to {nodes}" if nodes else f"actor_num_gpus_per_node to {equal}"
        )
    else:
        sentence += f", but gpu_memory_gib is {memory:g}"
    raise UserError(f"{sentence}: {advice}")


def _differ(bundles: Sequence[Bundle]) -> bool:
    sizes = [bundle.card.memory for bundle in bundles if bundle.card]
    return bool(sizes) and min(sizes) < EQUAL_MEMORY * max(sizes)


def _parts(bundles: Sequence[Bundle], size: int) -> list[Sequence[Bundle]]:
    return [bundles[start : start + size] for start in range(0, len(bundles), size)]


def _described(bundles: Sequence[Bundle]) -> str:
    kinds = Counter(bundle.card for bundle in bundles if bundle.card)
    return " and ".join(f"{count} {card.name} with {card.memory / GIB:.1f} GiB" for card, count in kinds.items())


def sort_key(bundle: Bundle) -> tuple[tuple[int, ...], str, int]:
    """Sort nodes by the numbers of their IPv4 addresses (10.0.0.9 before 10.0.0.10), as slime does.

    A host name counts as its address. Names without an address follow, alphabetically.
    """
    return _address(bundle.node), bundle.node, bundle.device


@cache
def _address(node: str) -> tuple[int, ...]:
    """The numbers of an IPv4 address; one number beyond all addresses if there is none."""
    try:
        return tuple(inet_aton(gethostbyname(node)))
    except (OSError, UnicodeError):  # a name that nobody knows, or that is no host name
        return (256,)
