"""What happens to a run of `make chaos`, and when: a process is killed or stopped, a call or a disk fails, or another
run is started in the same folder. A seed draws it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from miles_async.config.schema.faults import Kind, RunProcess

StrikeKind = Kind | Literal["fill", "make_read_only", "start", "fail"]
PARTS: tuple[RunProcess, ...] = get_args(RunProcess)
Part = RunProcess | Literal["store_disk", "second_run"]
"""A process of the run, the file system of its store, or another run in the same folder."""
Target = Part | Literal["calls"]
"""A part, or the calls of the rollout worker (`_FAILING_CALLS`)."""
TARGETS: tuple[Target, ...] = (*PARTS, "store_disk", "second_run", "calls")
KINDS: dict[Target, tuple[StrikeKind, ...]] = {
    **dict.fromkeys(PARTS, ("kill", "stop")),
    "store_disk": ("fill", "make_read_only"),
    "second_run": ("start",),
    "calls": ("fail", "fail"),
}
REPLACED = frozenset({"rollout_worker", "learner", "engine_actor", "engine_server", "router_actor", "router_server"})
"""Parts that are replaced while the run goes on. The loss of another part may end the run, which is then resumed."""
ROLLOUTS = 12
"""Batches of a run."""
RANKS = 2
"""Ranks of the learner in a run that is struck while its ranks are called. Other runs have one."""
SAVE_INTERVAL = 3
"""Batches between two checkpoints."""
DETECTION_SECONDS = 15.0
"""A lost part is noticed within this time."""

_EACH_BATCH = (
    "learner.train",
    "channel.stage",
    "channel.send",
    "fleet.pause",
    "fleet.commit",
    "fleet.resume",
)
"""Methods that are called once per batch; the weights of the last batch are not published."""
_EACH_CHECKPOINT = ("learner.copy_state", "learner.write_state")
_OFTEN = (
    "clock.sleep",
    "store.write",
    "outbox.put",
    "data.get_samples",
    "generator.generate",
    "rewarder.score",
)
"""Methods that each run calls at least ten times."""
_EVERY_SECOND = ("fleet.check", "fleet.check_router")
"""Methods that are called once a second."""
_CALLS = {
    **dict.fromkeys(_EACH_BATCH, ROLLOUTS - 2),
    **dict.fromkeys(_EACH_CHECKPOINT, ROLLOUTS // SAVE_INTERVAL - 1),
    **dict.fromkeys(_OFTEN, 10),
    **dict.fromkeys(_EVERY_SECOND, 4),
    "ranks.give_batch": RANKS * (ROLLOUTS - 2),
    "learner.work_seconds": 1,  # called every few seconds
}
"""The latest call at which a strike is drawn, by method. Other methods are called after a failure, or under other
settings."""


_FAILING_CALLS: tuple[tuple[Kind, str, int, float], ...] = (
    ("delay", "store.write.before", 20, 2.0),  # a slow disk
    ("delay", "learner.train.before", 1, 10.0),
    ("delay", "fleet.pause.after", 1, 10.0),
    ("delay", "generator.generate.after", 40, 3.0),
    ("error", "generator.generate.before", 5, 0.0),
    ("error", "rewarder.score.before", 5, 0.0),
    ("error", "fleet.check.before", 1, 0.0),
    ("disk_full", "store.write.before", 50, 0.0),
    ("clock_jump", "store.write.after", 1, 3600.0),
    ("clock_jump", "store.write.after", 1, -3600.0),
    ("poison", "generator.generate.after", 1, 0.0),
    ("poison", "rewarder.score.after", 1, 0.0),
)
"""Kind, point, times and seconds of faults that a run survives."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One thing that goes wrong in a run.

    `kill` and `stop` send SIGKILL and SIGSTOP to a process. `fill` leaves no space on the file system of the store for
    a while, and `make_read_only` makes it read-only until the run has refused to start. `start` starts a second run in
    the same folder. The other kinds are those of `Fault`.
    """

    part: Part
    kind: StrikeKind
    point: str | None
    """The fault point at which this happens; None if it happens some time after a batch."""
    call: int
    """At which call of the point, or after how many batches."""
    delay: float
    """Seconds between the end of the batch and the strike."""
    times: int = 1
    """Calls in a row that fail."""
    seconds: float = 0.0
    """`Fault.seconds`."""
    earlier_ends: int = 0
    """How often the run has ended, and was continued, before this happens. Batches are counted from the last start."""

    @property
    def fault(self) -> dict[str, object]:
        """The entry of `inject_faults` for a strike at a fault point."""
        entry = {"kind": self.kind, "point": self.point, "call": self.call, "process": self.part}
        return {**entry, "times": self.times, "seconds": self.seconds}

    @property
    def is_between_ranks(self) -> bool:
        """Whether this happens while the ranks of the learner are called, one after the other."""
        return self.point is not None and self.point.startswith("ranks.")

    @property
    def may_end_run(self) -> bool:
        """Whether the run may end with an error, after which it has to be resumed."""
        return self.part not in REPLACED and self.kind not in ("fill", "start")


def draw(seed: int, number: int, targets: Sequence[Target] = TARGETS, *, warm: bool = False) -> list[Strike]:
    """Draw the strikes of run `number` of the series `seed`: one, or with a probability of 0.3 two.

    The first strikes of consecutive runs go through all kinds of all targets, in an order that is drawn for each round.
    `warm` is whether the run joins a Ray that stays up.
    """
    rng = random.Random(f"chaos {seed} {number}")
    all_kinds = [(target, kind) for target in targets for kind in KINDS[target]]
    turn, position = divmod(number, len(all_kinds))
    order = random.Random(f"chaos {seed} round {turn}").sample(all_kinds, len(all_kinds))
    strikes = [_strike(rng, *order[position], warm)]
    if rng.random() < 0.3:
        strikes.append(
            _strike(rng, *rng.choice([each for each in all_kinds if each[0] in REPLACED] or all_kinds), warm)
        )
    return strikes


def _strike(rng: random.Random, target: Target, kind: StrikeKind, warm: bool) -> Strike:
    delay = round(rng.uniform(0.0, 1.0), 2)
    if target == "calls":
        failing, at, times, seconds = rng.choice(_FAILING_CALLS)
        call = rng.randint(1, _CALLS[at.rpartition(".")[0]])
        return Strike(part="rollout_worker", kind=failing, point=at, call=call, delay=0.0, times=times, seconds=seconds)
    if target in ("store_disk", "second_run"):
        # A second run needs some seconds until it finds the first one, which must not have ended by then.
        return Strike(part=target, kind=kind, point=None, call=rng.randint(0, 3), delay=delay)
    # The rollout worker does not find the other processes of a Ray that the run joins, and only `play` lets a stopped
    # driver continue.
    at_point = not (warm and target != "rollout_worker") and (target, kind) != ("driver", "stop")
    if rng.random() < 0.5 and at_point:
        method = rng.choice([*_CALLS])
        point = f"{method}.{rng.choice(('before', 'after'))}"
        return Strike(part=target, kind=kind, point=point, call=rng.randint(1, _CALLS[method]), delay=0.0)
    return Strike(part=target, kind=kind, point=None, call=rng.randint(1, ROLLOUTS * 2 // 3), delay=delay)
