"""The runs of the study: which there are, how one is started, and what is kept of it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import yaml

from benchmarks.records import RESULTS, machine_load, stamp
from miles_async.atomic_files import write_atomically
from miles_async.events import CollapseRiskChanged, Evaluated, RunEnded, StepEnded, StepStarted
from miles_async.observability.trace.event_log import read_events

MAIN = Path("configs/arithmetic-cpu.yaml")
SLOW_TOOLS = Path("configs/slow-tools-cpu.yaml")
FULLY_ASYNC = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
STORE = RESULTS / "study"
SEEDS = (42, 1, 2, 3, 4, 5, 6, 7, 8, 9)
REPEATS = 10
"""Runs of the first seed in each of two schedules, the one of `seeds` among them."""
EVAL_INTERVALS = {MAIN: 30, SLOW_TOOLS: 4}
"""Rollouts between two evaluations."""
WINDOW = 10
"""Optimizer steps that one stored point of a metric averages."""
CORRECTIONS = {
    "none": ("--off-policy-correction", "none"),
    "default": (),
    "recommended": ("--off-policy-correction", "sequence"),
}
TOKEN_MEAN = ("--loss-aggregation", "token_mean")
"""So that the objectives differ in nothing else. A batch is one step, so clip ranges have no effect."""
CLAIM = {
    "naive": ("--off-policy-correction", "none", "--use-rollout-logprobs"),
    "decoupled": ("--off-policy-correction", "decoupled"),
}
"""The two objectives that AReaL (arXiv 2505.24298) compares. The naive one clips around the policy that sampled."""
LOSSES = {
    "none": CORRECTIONS["none"],
    "decoupled": CLAIM["decoupled"],
    "icepop": ("--off-policy-correction", "icepop"),
    "gspo": ("--policy-objective", "gspo", *TOKEN_MEAN, "--off-policy-correction", "sequence"),
    "gspo, tis": ("--policy-objective", "gspo", *TOKEN_MEAN, "--off-policy-correction", "tis"),
    "gspo, geometric": ("--policy-objective", "gspo", *TOKEN_MEAN, "--off-policy-correction", "geometric"),
    "cispo": ("--policy-objective", "cispo"),
    "gmpo": ("--policy-objective", "gmpo", *TOKEN_MEAN, "--off-policy-correction", "sequence"),
    "gmpo, tis": ("--policy-objective", "gmpo", *TOKEN_MEAN, "--off-policy-correction", "tis"),
    "sapo": ("--policy-objective", "sapo", *TOKEN_MEAN),
    "dppo": ("--policy-objective", "dppo", "--off-policy-correction", "none"),
    "m2po": ("--policy-objective", "m2po", "--off-policy-correction", "none"),
}
STALE = "stale "
"""The beginning of the variants in which samples are really stale."""
AGAIN = ("default", "default, again")
"""Runs in turns. Warm starts and times may differ between machines, so another machine repeats these runs."""
FRESH = tuple(STALE + name for name in AGAIN)
"""Those that are compared with runs on really stale samples."""
STALE_GROUPS = {1: 64, 2: 96, 4: 192, 8: 448, 16: 896}
"""Groups in flight by staleness limit, in batches of 64. See `slow_grader.py`."""
STALE_RATIO = {8: 0.1, 16: 0.1}
"""A narrow window where the slots would otherwise not suffice for so many groups in flight."""
LEAST_SHARE = 0.6
"""Of the staleness limit, the mean age of the samples that are really stale."""
RATES = {"a third of the rate": ("--lr", "1e-4"), "three times the rate": ("--lr", "9e-4")}
STALE_FLAGS = CORRECTIONS | CLAIM | LOSSES | RATES
"""What is compared with really stale samples."""
KEY_LIMITS = (0, 1, 2, -1)
"""Values of `--max-kv-staleness` that are compared. -1 needs a run without a staleness limit."""
METRICS = ("ess", "importance_weight", "logprob_gap_mean", "grad_norm", "entropy")


def limit_of(schedule: str) -> int:
    """The staleness limit of a schedule; 0 in turns."""
    return 0 if schedule == "in turns" else int(schedule.removeprefix("limit "))


@dataclass(frozen=True)
class Cell:
    """One run of the study."""

    schedule: str
    """`in turns` or `limit N`."""
    variant: str
    """A key of CORRECTIONS or LOSSES, `shuffled`, `K = N`, or `repeat N` and one of FRESH, which have the settings of
    `default`."""
    seed: int
    flags: tuple[str, ...] = ()
    """Flags in addition to the configuration, the schedule and the seed."""
    config: Path = MAIN

    @property
    def path(self) -> Path:
        job = "" if self.config == MAIN else f"{self.config.stem} "
        return STORE / f"{job}{self.schedule} {self.variant} seed {self.seed}.json".replace(",", "").replace(" ", "-")

    def is_too_fresh(self, outcome: Outcome) -> bool:
        """Whether samples should have been really stale and were not."""
        return self.variant.startswith(STALE) and outcome.staleness < LEAST_SHARE * limit_of(self.schedule)

    def command(self, run_dir: Path) -> list[str]:
        entry, schedule = ("train.py", []) if self.schedule == "in turns" else ("train_async.py", self._asynchronous())
        shared = [
            "--config",
            str(self.config),
            "--seed",
            str(self.seed),
            "--rollout-seed",
            str(self.seed),
            "--eval-interval",
            str(EVAL_INTERVALS[self.config]),
        ]
        return [sys.executable, entry, *shared, *schedule, *self.flags, "--run-dir", str(run_dir)]

    def _asynchronous(self) -> list[str]:
        return ["--rollout-function-path", FULLY_ASYNC, "--max-weight-staleness", self.schedule.removeprefix("limit ")]

    def key(self) -> str:
        """A hash of all settings. A stored run with another hash is run again."""
        settings = [yaml.safe_load(self.config.read_text()), *self.command(Path())[1:]]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Outcome:
    """What the study keeps of a run."""

    key: str
    before: float
    """Greedy accuracy on held-out problems before training, 0 to 1."""
    after: float
    """The same after training."""
    curve: list[tuple[int, float, float]]
    """Trained groups, seconds since the first batch was requested until the evaluation ended, and greedy held-out
    accuracy."""
    seconds: float
    """From the first batch to the last optimizer step. In turns, evaluations before the last step are part of it."""
    load: float
    """Load of the machine at the start of the run, in processes that want a core."""
    staleness: float
    """Mean over the trained groups, in weight versions."""
    points: list[dict[str, float]]
    """Means of the reward, the staleness and METRICS over WINDOW optimizer steps each."""
    by_age: dict[int, dict[str, float]]
    """Means of `ess`, `logprob_gap_mean` and `token_share` over the steps, by staleness in weight versions.

    The highest age also covers all greater ones."""
    max_staleness: int = 0
    """The greatest age of a trained group, in weight versions."""
    evaluation_seconds: list[float] = field(default_factory=list)
    """The length of each evaluation in `curve`. In turns, training waits for them."""
    announced: list[int] = field(default_factory=list)
    """The rollouts after which the run announced that its policy may collapse soon."""
    stamp: dict[str, Any] = field(default_factory=stamp)


def cells(parts: Sequence[str], seeds: int) -> Iterator[Cell]:
    """The runs of `parts`, in an order in which an interrupted study is useful: all schedules of one seed together."""
    if "seeds" in parts:
        for seed in SEEDS:
            yield Cell("in turns", "default", seed)
            yield Cell("limit 2", "default", seed)
    if "repeats" in parts:
        for number in range(2, REPEATS + 1):
            for schedule in ("in turns", "limit 2"):
                yield Cell(schedule, f"repeat {number}", SEEDS[0])
    if "control" in parts:
        for seed in SEEDS[:seeds]:
            yield Cell("limit 2", "shuffled", seed, ("--shuffle-rewards",))
    if "limits" in parts:
        for seed in SEEDS[:seeds]:
            for limit in (1, 2, 4, 8, 16):
                for name, flags in CORRECTIONS.items():
                    yield Cell(f"limit {limit}", name, seed, flags)
    if "stale" in parts:
        main = ("default", "recommended")
        # A limit of 0: without over-sampling, no batch trains the surplus of the batch before.
        fresh = ("--over-sampling-batch-size", "64")
        for seed in SEEDS[:seeds]:
            yield Cell("in turns", FRESH[0], seed, fresh)
            yield from (_stale(limit, name, seed) for limit in (4, 16) for name in main)
        yield from (Cell("in turns", FRESH[1], seed, fresh) for seed in SEEDS[:seeds])
        for limits, names in (((1, 2, 8), main), ((16, 4), CLAIM), ((16, 4), LOSSES), ((4,), RATES)):
            for seed in SEEDS[:seeds]:
                for limit in limits:
                    for name in names:
                        yield _stale(limit, name, seed)
        for seed in SEEDS[:seeds]:
            for name, flags in RATES.items():
                yield Cell("in turns", STALE + name, seed, (*fresh, *flags))
    if "waits" in parts:
        # With over-sampling, the next batch would train the surplus of a batch, one version late.
        fresh = ("--over-sampling-batch-size", "16")
        for seed in SEEDS:
            yield Cell("in turns", AGAIN[0], seed, fresh, SLOW_TOOLS)
            for limit in (2, 8):
                yield Cell(f"limit {limit}", "default", seed, (), SLOW_TOOLS)
        for seed in SEEDS[:seeds]:
            yield Cell("in turns", AGAIN[1], seed, fresh, SLOW_TOOLS)
            for limit in (1, 4, 16):
                yield Cell(f"limit {limit}", "default", seed, (), SLOW_TOOLS)
    if "keys" in parts:
        for seed in SEEDS[:seeds]:
            for limit in KEY_LIMITS:
                flags = ("--max-kv-staleness", str(limit), *(("--max-weight-staleness", "null") if limit < 0 else ()))
                yield Cell("limit 8", f"K = {limit}", seed, flags, SLOW_TOOLS)
    if "losses" in parts:
        for seed in SEEDS[:seeds]:
            for limit in (2, 8):
                for name, flags in LOSSES.items():
                    yield Cell(f"limit {limit}", name, seed, flags)


def _stale(limit: int, name: str, seed: int) -> Cell:
    flags = ["--over-sampling-batch-size", str(STALE_GROUPS[limit])]
    if limit in STALE_RATIO:
        flags += ["--windowed-fifo-ratio", str(STALE_RATIO[limit])]
    flags += ["--rollout-sample-hook-path", "benchmarks.study.slow_grader.wait"]
    return Cell(f"limit {limit}", STALE + name, seed, (*flags, *STALE_FLAGS[name]))


def stored(cell: Cell) -> Outcome | None:
    """The outcome of an earlier run with the same settings."""
    if not cell.path.exists():
        return None
    outcome = msgspec.json.decode(cell.path.read_bytes(), type=Outcome)
    return outcome if outcome.key == cell.key() else None


def stored_or_run(cell: Cell) -> Outcome:
    outcome = stored(cell)
    if outcome is None:
        outcome = run(cell)
        STORE.mkdir(parents=True, exist_ok=True)
        write_atomically(cell.path, msgspec.json.encode(outcome) + b"\n")
    return outcome


def run_to_its_end(command: Sequence[str], folder: Path | None = None) -> None:
    """Run a command, in `folder` if given, without showing its output.

    Raises SystemExit with the end of its errors if it fails.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def run(cell: Cell) -> Outcome:
    load = machine_load()
    with tempfile.TemporaryDirectory() as folder:
        run_to_its_end(cell.command(Path(folder)))
        return _outcome(cell, Path(folder) / "latest" / "events.jsonl", load)


def _outcome(cell: Cell, log: Path, load: float) -> Outcome:
    evaluations: list[Evaluated] = []
    started: list[StepStarted] = []
    steps: list[StepEnded] = []
    announced: list[int] = []
    for event in read_events(log):
        match event:
            case Evaluated():
                evaluations.append(event)
            case StepStarted():
                started.append(event)
            case StepEnded():
                steps.append(event)
            case CollapseRiskChanged(high=True):
                announced.append(event.rollout)
            case RunEnded(reason=reason) if reason != "done":
                raise SystemExit(f"the run of {cell.path.stem} ended: {reason}")
    # The evaluation before training ends when generation of the first batch begins.
    begun = evaluations[0].time
    samples = [0]
    for batch in started:
        samples.append(samples[-1] + len(batch.groups))
    curve = [(samples[point.rollout + 1], point.time - begun, point.accuracy) for point in evaluations]
    ages = [age for batch in started for age in batch.staleness]
    pairs = list(zip(started, steps, strict=True))
    return Outcome(
        key=cell.key(),
        before=evaluations[0].accuracy,
        after=evaluations[-1].accuracy,
        curve=[(count, round(seconds, 2), accuracy) for count, seconds, accuracy in curve],
        seconds=round(steps[-1].time - begun, 2),
        load=load,
        staleness=round(fmean(ages), 4),
        points=[_point(pairs[index : index + WINDOW]) for index in range(0, len(pairs), WINDOW)],
        by_age=_by_age(steps),
        max_staleness=max(ages),
        evaluation_seconds=[round(point.seconds, 2) for point in evaluations],
        announced=announced,
    )


def _point(pairs: Sequence[tuple[StepStarted, StepEnded]]) -> dict[str, float]:
    point = {
        "reward": fmean(step.reward for _, step in pairs),
        "staleness": fmean(age for batch, _ in pairs for age in batch.staleness),
    }
    for name in METRICS:
        # A batch without a gradient computes nothing, so its step has no such metrics.
        known = [step.metrics[name] for _, step in pairs if name in step.metrics]
        if known:
            point[name] = fmean(known)
    return {name: round(value, 5) for name, value in point.items()}


def _by_age(steps: Sequence[StepEnded]) -> dict[int, dict[str, float]]:
    values: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        for metric, value in step.metrics.items():
            name, separator, age = metric.partition("_staleness_")
            if separator and name in ("ess", "logprob_gap_mean", "token_share"):
                values[int(age.removesuffix("_or_more"))][name].append(value)
    return {age: {name: round(fmean(found), 5) for name, found in values[age].items()} for age in sorted(values)}
