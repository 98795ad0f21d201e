"""Which learner rank and which engine gets which device: pure, from the bundles that Ray reserved.

Bundles come in any order; sorted by node and device they give neighbouring ranks neighbouring devices, the same ones
every time (seed `slime-walkthrough`). The learner takes the first ones; engines take the rest, or, colocated, the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles_async.errors import UserError


@dataclass(frozen=True, slots=True)
class Bundle:
    """One reserved device; on a CPU machine, a core."""

    index: int
    """In the placement group."""
    node: str
    """Its node's address."""
    device: int
    """Its number on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How many devices a run asks for."""

    learner: int
    """One per rank; 0 where nothing is trained."""
    engines: int
    """0 where nothing is generated."""
    per_engine: int
    colocated: bool = False
    """Engines share the learner's devices."""

    @property
    def bundles(self) -> int:
        rollout = self.engines * self.per_engine
        return max(self.learner, rollout) if self.colocated else self.learner + rollout


@dataclass(frozen=True, slots=True)
class Plan:
    learner: tuple[Bundle, ...]
    """By rank."""
    engines: tuple[tuple[Bundle, ...], ...]
    """Of each engine, node by node: the first node's server takes its requests."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Each node once, in order of first use."""
        used = [*self.learner, *(bundle for engine in self.engines for bundle in engine)]
        return tuple(dict.fromkeys(bundle.node for bundle in used))


def plan(bundles: Iterable[Bundle], demand: Demand) -> Plan:
    """Raises UserError where an engine would be torn unevenly over nodes."""
    ordered = sorted(bundles, key=_place)
    first = 0 if demand.colocated else demand.learner
    size = demand.per_engine
    engines = tuple(tuple(ordered[first + i * size : first + (i + 1) * size]) for i in range(demand.engines))
    for number, engine in enumerate(engines):
        _require_even(number, engine)
    return Plan(tuple(ordered[: demand.learner]), engines)


def by_node(engine: Sequence[Bundle]) -> list[list[Bundle]]:
    """An engine's bundles, one list per node."""
    nodes: dict[str, list[Bundle]] = {}
    for bundle in engine:
        nodes.setdefault(bundle.node, []).append(bundle)
    return list(nodes.values())


def _require_even(number: int, engine: Sequence[Bundle]) -> None:
    counts = Counter(bundle.node for bundle in engine)
    if len(set(counts.values())) > 1:
        shares = " and ".join(f"{count} of {node}" for node, count in counts.items())
        raise UserError(
            f"engine {number} would get {shares}: SGLang wants as many devices on each node; set "
            "rollout_num_gpus_per_engine to a divisor of a node's devices, and let the learner fill whole nodes"
        )


def _place(bundle: Bundle) -> tuple[tuple[int, ...], str, int]:
    """Addresses in numeric order (10.0.0.9 before 10.0.0.10), names after them in theirs."""
    parts = bundle.node.split(".")
    numeric = len(parts) == 4 and all(part.isdigit() for part in parts)
    return (tuple(map(int, parts)) if numeric else (256,)), bundle.node, bundle.device
