"""Runs a job on the cluster, unplugs a node at a chosen moment, plugs it in again, and judges what the run did."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from miles_async.events import EngineChanged, Event, ProcessSilent, PublishEnded, StepEnded
from miles_async.observability.trace.event_log import read_events
from tests.audit import Audit

from .nodes import ENGINES, HEAD, LEARNER, NODES, LocalCluster
from .unplugging_rollout import MOMENTS

ROOT = Path(__file__).parents[2]
BATCHES, CUT_AT_BATCH = 40, 8
STALENESS_LIMIT = 2
SETTINGS = (
    *("--config", "configs/arithmetic-cpu.yaml", "--schedule", "fully_async"),
    *("--rollout-function-path", "benchmarks.cluster.unplugging_rollout.generate_rollout"),
    *("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", str(BATCHES)),
    *("--max-weight-staleness", str(STALENESS_LIMIT)),
)
ABORT_SECONDS, LOST_ABORT_SECONDS = 240, 60
"""Time without progress after which a job gives up: longer than any break that heals, shorter if a node is lost."""
START_SECONDS = 300.0
"""Time for a job to reach the batch at which the node is unplugged."""
END_SECONDS = 300.0
"""Time for a job to end after the node is plugged in again, or after it is lost."""
LEAVE_SECONDS = 60.0
"""Time for the processes of a job to end after its driver."""
WORKERS = ("ray::LearnerRank", "ray::Engine", "ray::Router", "ray::RolloutWorker", "sglang", "router_process")
"""Parts of the command lines of a job's processes."""
GRACE_SECONDS = 0.5
"""An announcement may be reported so long after it was made."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One broken link."""

    node: str
    moment: str
    seconds: float | None
    """Time until the node is plugged in again; None if it is lost for good."""
    cluster: int = 0
    batch: int = CUT_AT_BATCH

    def __str__(self) -> str:
        how_long = "lost for good" if self.seconds is None else f"unplugged for {self.seconds:g} s"
        return f"{self.node} {how_long} while {self.moment}"


@dataclass
class Outcome:
    """What a job did whose network broke."""

    cut: Cut
    code: int | None = None
    """Exit code of the driver; None if it had to be killed."""
    sentence: str = ""
    """The last line of the driver's standard error, if it failed."""
    batches: int = 0
    """Batches that were trained."""
    noticed_seconds: float | None = None
    """From the cut to the first event about a process that does not answer."""
    stopped_seconds: float | None = None
    """From the cut until no process of the job ran apart from the head node, if that was before the repair."""
    continued_seconds: float | None = None
    """From the repair of the link to the next trained batch."""
    ended_seconds: float | None = None
    """From the repair of the link, or the loss of the node, to the end of the job."""
    violations: list[str] = field(default_factory=list)


SERIES_CLUSTER = 2
SHORT_SECONDS = 10.0
"""A break that Ray does not notice is shorter."""
CASES = [
    *(
        Cut(node=ENGINES, moment=moment, seconds=seconds, cluster=SERIES_CLUSTER)
        for seconds in (5.0, 30.0, 120.0)
        for moment in MOMENTS
    ),
    *(
        Cut(node=node, moment=moment, seconds=seconds, cluster=SERIES_CLUSTER)
        for node in (LEARNER, HEAD)
        for seconds in (5.0, 30.0, 120.0)
        for moment in ("generating", "writing")
    ),
    *(Cut(node=node, moment="generating", seconds=None, cluster=SERIES_CLUSTER) for node in (ENGINES, LEARNER)),
]


def run_series(results: Path, only: str) -> int:
    """Play all cases that `results` does not have yet, and append their outcomes to it. Returns an exit code."""
    done = {json.loads(line)["case"] for line in results.read_text().splitlines()} if results.exists() else set()
    cluster, failed = LocalCluster(SERIES_CLUSTER), False
    try:
        for cut in CASES:
            if str(cut) in done or only not in str(cut):
                continue
            cluster.up()
            folder = Path(tempfile.mkdtemp(prefix="miles-broken-link-"))
            outcome = play(cut, folder)
            entry = {"case": str(cut), **asdict(outcome)}
            with results.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(outcome)
            failed |= bool(outcome.violations)
            if cut.seconds is None or cut.seconds > SHORT_SECONDS:
                # The next job must not start before the node that Ray has lost is back.
                cluster.down()
    finally:
        cluster.down()
    return int(failed)


def play(cut: Cut, folder: Path, further_flags: Sequence[str] = ()) -> Outcome:
    """Run one job in `folder`, which must be empty, and break its network. The cluster has to be up."""
    cluster, outcome = LocalCluster(cut.cluster), Outcome(cut)
    (folder / "cut.json").write_text(json.dumps(asdict(cut)))
    abort = LOST_ABORT_SECONDS if cut.seconds is None else ABORT_SECONDS
    flags = ("--run-dir", str(folder), "--ray-address", cluster.address, "--no-progress-abort-seconds", str(abort))
    command = [sys.executable, "train_async.py", *SETTINGS, *flags, *further_flags]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        driver = subprocess.Popen(
            cluster.inside(HEAD, *command),
            cwd=ROOT,
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:
        if (unplugged := _wait_for_cut(driver, folder)) is None:
            last = _last_line(folder / "stderr")
            outcome.violations.append(f"the job did not reach the batch at which its network breaks: {last}")
            return outcome
        if cut.seconds is None:
            cluster.lose(cut.node)
        else:
            _watch_cut_node(cluster, outcome, unplugged)
            cluster.plug(cut.node)
        repaired = time.time()
        with suppress(subprocess.TimeoutExpired):
            outcome.code = driver.wait(END_SECONDS)
            outcome.ended_seconds = time.time() - repaired
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()
            outcome.violations.append(f"the job did not end within {END_SECONDS:.0f} s")
        cluster.plug(cut.node)
    if outcome.code:
        outcome.sentence = _last_line(folder / "stderr")
        if not outcome.sentence.startswith("train_async.py: "):
            outcome.violations.append(f"the job failed without a sentence: {outcome.sentence}")
    _judge_events(outcome, list(_events(folder)), unplugged, repaired)
    _judge_remains(cluster, outcome)
    return outcome


def _last_line(file: Path) -> str:
    return (file.read_text().strip().splitlines() or [""])[-1]


def _wait_for_cut(driver: subprocess.Popen[bytes], folder: Path) -> float | None:
    """Return when the node was unplugged; None if that did not happen."""
    deadline = time.monotonic() + START_SECONDS
    while driver.poll() is None and time.monotonic() < deadline:
        if (folder / "unplugged").exists():
            return float((folder / "unplugged").read_text())
        time.sleep(0.02)
    return None


def _watch_cut_node(cluster: LocalCluster, outcome: Outcome, unplugged: float) -> None:
    """Wait until the node is to be plugged in; note when the job's last process apart from the head node has ended."""
    assert outcome.cut.seconds is not None
    without_head = [node for node in NODES if node != HEAD] if outcome.cut.node == HEAD else [outcome.cut.node]
    while time.time() < unplugged + outcome.cut.seconds:
        if outcome.stopped_seconds is None and not any(workers(cluster, node) for node in without_head):
            outcome.stopped_seconds = time.time() - unplugged
        time.sleep(0.1)


def workers(cluster: LocalCluster, node: str) -> dict[int, str]:
    """Return pid and command line of the job's processes on a node."""
    found = {}
    for pid in cluster.processes(node):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if any(part in command for part in WORKERS):
                found[pid] = command
    return found


def _events(folder: Path) -> Iterator[Event]:
    for log in folder.glob("2*/events.jsonl"):
        yield from read_events(log)


def _judge_events(outcome: Outcome, events: list[Event], unplugged: float, repaired: float) -> None:
    cut = outcome.cut
    audit, live = Audit(STALENESS_LIMIT), -1
    for event in events:
        audit.observe(event)
        match event:
            case StepEnded():
                outcome.batches += 1
                if event.time > repaired and outcome.continued_seconds is None:
                    outcome.continued_seconds = event.time - repaired
            case PublishEnded(live=True, version=version):
                live = version
                over_the_link = cut.node != LEARNER or cut.moment != "announcing"
                if over_the_link and unplugged + GRACE_SECONDS < event.time < repaired:
                    outcome.violations.append(f"version {version} was announced over a link that was down")
            case ProcessSilent(seconds=seconds, time=at) if at > unplugged and seconds:
                if outcome.noticed_seconds is None:
                    outcome.noticed_seconds = at - unplugged
            case EngineChanged(state="routed", version=version) if event.time > unplugged:
                # A version that is staged, and not live yet, is as good.
                if version is None or version < live:
                    outcome.violations.append(f"an engine with version {version} got requests while {live} was live")
            case _:
                pass
    outcome.violations += audit.violations


def _judge_remains(cluster: LocalCluster, outcome: Outcome) -> None:
    deadline = time.monotonic() + LEAVE_SECONDS
    while remains := [line for node in NODES for line in workers(cluster, node).values()]:
        if time.monotonic() > deadline:
            outcome.violations += [f"a process remains: {line[:80]}" for line in remains]
            return
        time.sleep(0.2)
