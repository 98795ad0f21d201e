"""Plays one run of `make chaos`: starts it, strikes, resumes it if it ended, and judges it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, BinaryIO

import psutil

from benchmarks.chaos.cases import DETECTION_SECONDS, RANKS, ROLLOUTS, SAVE_INTERVAL, Strike
from benchmarks.chaos.judge import (
    SAMPLES_PER_PROMPT,
    STALENESS_LIMIT,
    RunPart,
    detected,
    read_part,
    recovered,
    start_seconds,
    violations,
)
from benchmarks.chaos.small_disk import SmallDisk
from benchmarks.chaos.warm_ray import WarmRay
from benchmarks.records import machine_load
from benchmarks.settings import TRAINING
from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.adapters.system.run_processes import of_part
from miles_async.errors import UserError
from tests.stack.job import Job, job
from workers.cluster import JOINED_RAY_LOST_SECONDS
from workers.driver import REFUSED

POLL_SECONDS = 0.1
SHUTDOWN_SECONDS = 15.0
"""No process of a run is left so long after its driver has ended."""
STOPPED_DRIVER_SECONDS = 20.0
"""A driver that is stopped continues after this time; nothing replaces it."""
FULL_DISK_SECONDS = 5.0
"""A full disk has space again after this time."""
REFUSAL_SECONDS = 60.0
"""A second run in the same folder is refused within this time."""
STALL_SECONDS = 180.0
"""A run that makes no progress for so long ends with an error. On a loaded machine, an engine starts in a minute."""
START_SECONDS = 300.0
"""A run that has not trained its first batch after this time hangs, also on a loaded machine."""
HANG_SECONDS = 2 * STALL_SECONDS + SHUTDOWN_SECONDS
"""A run that has neither trained a batch nor ended for so long after a batch hangs."""
MAX_PARTS = 6
"""Times that a run is started before it must have come to its end."""


def flags(folder: Path, rollouts: int) -> list[str]:
    """The main job with small batches, without a warm start and an evaluation, and with frequent checkpoints.

    The same flags start the run and continue it.
    """
    settings = {
        **TRAINING,
        "num_rollout": rollouts,
        "rollout_batch_size": 16,
        "over_sampling_batch_size": 24,
        "n_samples_per_prompt": SAMPLES_PER_PROMPT,
        "rollout_max_response_len": 24,
        "max_weight_staleness": STALENESS_LIMIT,
        "eval_size": 0,
        "warm_start_max_steps": 0,
        "run_dir": folder / "runs",
        "store_dir": folder / "store",
        "save": folder / "saved",
        "resume": "auto",
        "save_interval": SAVE_INTERVAL,
        "save_keep": 2,
        # The check may begin a second after the loss. Its failure is reported after the router has removed the engine.
        "engine_health_timeout_seconds": DETECTION_SECONDS - 3,
        # Small, so that a driver that continues the run starts from a snapshot.
        "event_log_rotate_bytes": 2**16,
        "no_progress_warn_seconds": 10,
        "no_progress_abort_seconds": STALL_SECONDS,
    }
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(kw_only=True)
class Struck:
    """A strike, and what came of it."""

    strike: Strike
    time: float | None = None
    """Wall-clock seconds of the signal; None if the run never came to the point."""
    detected: float | None = None
    """Seconds until the loss was reported."""
    recovered: float | None = None
    """Seconds until a group was generated and a batch trained after it, in this run or in the one that resumed it."""


@dataclass(kw_only=True)
class Outcome:
    """One run with its strikes, from its start to its end."""

    strikes: list[Struck]
    parts: int = 0
    """Times that it was started: the first time, and after each end before the last batch."""
    seconds: float = 0.0
    load: float = field(default_factory=machine_load)
    """Load of the machine at the start, in processes that want a core."""
    starts: dict[str, float] = field(default_factory=dict)
    """Seconds that each process needed at the first start, by name."""
    hangs: int = 0
    left: list[str] = field(default_factory=list)
    """Command lines of processes that were left."""
    violations: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """The sentences with which the run ended before its last batch."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def play(
    strikes: Sequence[Strike],
    folder: Path,
    ray: WarmRay | None = None,
    *,
    rollouts: int = ROLLOUTS,
    further_flags: Sequence[str] = (),
) -> Outcome:
    """Play one run of `rollouts` batches with these strikes in an empty folder. It starts a Ray, or joins `ray`."""
    outcome = Outcome(strikes=[Struck(strike=strike) for strike in strikes])
    began = time.monotonic()
    ranks = RANKS if any(strike.is_between_ranks for strike in strikes) else 1
    words = [*flags(folder, rollouts), "--actor-num-gpus-per-node", str(ranks), *further_flags]
    with _store_disk(strikes, folder / "store") as disk:
        parts = _Playing(folder, words, outcome, ray, disk).to_the_end()
    outcome.starts = start_seconds(parts)
    outcome.violations += violations(parts, _progress(folder / "saved"), rollouts)
    for struck in outcome.strikes:
        if struck.time is not None:
            struck.recovered = recovered(parts, struck.time)
    outcome.seconds = time.monotonic() - began
    return outcome


def _store_disk(strikes: Sequence[Strike], folder: Path) -> AbstractContextManager[SmallDisk | None]:
    """The file system of the store, if something happens to it."""
    return SmallDisk(folder) if any(strike.part == "store_disk" for strike in strikes) else nullcontext()


def _progress(save: Path) -> dict[str, Any] | None:
    """The progress in the newest checkpoint; None if there is no checkpoint yet."""
    try:
        return read_progress(CheckpointFolder(save).latest().folder)
    except UserError:
        return None


@dataclass
class _Playing:
    """A run in `folder` that is started again until it comes to its end."""

    folder: Path
    flags: Sequence[str]
    outcome: Outcome
    ray: WarmRay | None
    disk: SmallDisk | None
    """The file system of the store, if something happens to it."""
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """When a strike ends, in monotonic seconds, and how."""
    _second: tuple[Struck, Job] | None = None
    """A second run in the folder that has not been refused yet."""

    def to_the_end(self) -> list[RunPart]:
        """Start the run up to `MAX_PARTS` times, strike, and return what is to be judged."""
        outcome = self.outcome
        while outcome.parts < MAX_PARTS:
            outcome.parts += 1
            earlier = [struck for struck in outcome.strikes if struck.time is not None]
            code, ended = self._play_part()
            # A run that is continued goes on in its own folder; without its store, another run begins.
            parts = [read_part(run) for run in sorted((self.folder / "runs").glob("2*"))]
            for struck in outcome.strikes:
                if struck.time is not None and struck not in earlier and struck.detected is None:
                    struck.detected = detected(parts, struck.strike, struck.time, ended if code else None)
            if code == 0:
                return parts
        outcome.violations.append(f"the run did not come to its end in {MAX_PARTS} parts")
        return parts

    @property
    def _run(self) -> Path:
        """The folder of the run."""
        return self.folder / "runs" / "latest"

    def _play_part(self) -> tuple[int | None, float]:
        """Start the run, strike as often as is due, and wait for its end.

        Returns the exit code, None if the run hangs, and the wall-clock time of the end.
        """
        outcome, arguments = self.outcome, list(self.flags)
        own = self.folder / f"part-{outcome.parts - 1}"
        own.mkdir(parents=True)
        ends = outcome.parts - 1
        waiting = [struck for struck in outcome.strikes if struck.time is None and struck.strike.earlier_ends <= ends]
        at_points = [struck for struck in waiting if struck.strike.point is not None]
        # Faults happen once per run, so those of an earlier part are not repeated.
        if injected := bool(at_points) and not (self._run / "faults.jsonl").exists():
            arguments += ["--inject-faults", json.dumps([struck.strike.fault for struck in at_points])]
        started = time.time()
        read_only = [struck for struck in waiting if struck.strike.kind == "make_read_only"]
        for struck in read_only:
            self._disk.make_read_only()
            struck.time = started
        with _started(own, arguments, self.ray) as running:
            code = self._strike_until_end(running, [each for each in waiting if each.strike.point is None])
            ended = time.time()
            self._end_strikes()
            if code is None:
                outcome.hangs += 1
                outcome.violations.append(f"part {outcome.parts - 1} hangs: {_last_line(running.out)}")
            elif left := _left(running, self.ray):
                outcome.left += [line.strip() for line in left.values()]
                outcome.violations.append(f"part {outcome.parts - 1}: {len(left)} processes are left")
        if injected:
            _read_faults(self._run / "faults.jsonl", at_points)
        if read_only:
            sentence = _last_line(running.err)
            if code != REFUSED or "store_dir" not in sentence:
                outcome.violations.append(f"a run with a read-only store ended with {code}: {sentence}")
        if code:
            self._judge_end(running, code, [each for each in outcome.strikes if (each.time or 0.0) >= started], ended)
        return code, ended

    @property
    def _disk(self) -> SmallDisk:
        assert self.disk is not None, "mounted if it is struck"
        return self.disk

    def _strike_until_end(self, running: Job, waiting: list[Struck]) -> int | None:
        """Strike at the time of each strike, until the driver ends. Returns its exit code; None if it hangs."""
        with closing(_BatchCounter(self._run)) as counter:
            return self._strike_at_batches(running, waiting, counter)

    def _strike_at_batches(self, running: Job, waiting: list[Struck], counter: _BatchCounter) -> int | None:
        deadline = time.monotonic() + START_SECONDS
        due, last = dict[int, float](), 0
        while time.monotonic() < deadline:
            with suppress(TimeoutExpired):
                return running.ended(within=POLL_SECONDS)
            now = time.monotonic()
            for at, end in [each for each in self._later if now >= each[0]]:
                end()
                self._later.remove((at, end))
            self._judge_second_run(running)
            # The driver prints its settings when no other run can write to its folders any more.
            batches = counter.read() if running.out else -1
            if batches > last:
                last, deadline = batches, now + HANG_SECONDS
            for number, struck in enumerate(waiting):
                if struck.time is not None or batches < struck.strike.call:
                    continue
                if now >= due.setdefault(number, now + struck.strike.delay) and self._strike(running, struck):
                    struck.time = time.time()
        return None

    def _strike(self, running: Job, struck: Struck) -> bool:
        """Strike now. Returns whether that was possible."""
        match struck.strike:
            case Strike(kind="fill"):
                self._disk.fill()
                self._later.append((time.monotonic() + FULL_DISK_SECONDS, self._disk.free))
            case Strike(part="second_run"):
                second = self.folder / "second"
                second.mkdir()
                address = () if self.ray is None else ("--ray-address", self.ray.address)
                self._second = struck, Job(second, (*self.flags, *address), mark=running.mark)
            case strike:
                if not _send(running, strike):
                    return False
                if (strike.part, strike.kind) == ("driver", "stop"):
                    release = partial(os.kill, running.pid, signal.SIGCONT)
                    self._later.append((time.monotonic() + STOPPED_DRIVER_SECONDS, release))
        return True

    def _judge_second_run(self, first: Job) -> None:
        """Judge whether a second run in the folder was refused, and named the first one."""
        if self._second is None:
            return
        struck, second = self._second
        assert struck.time is not None, "started"
        seconds = time.time() - struck.time
        try:
            code = second.ended(within=0)
        except TimeoutExpired:
            if seconds < REFUSAL_SECONDS:
                return
            second.kill()
            code = None
        sentence, self._second, struck.detected = _last_line(second.err), None, seconds
        named = f"is in use by another run (process {first.pid} on host {socket.gethostname()})"
        if code != REFUSED or named not in sentence:
            self.outcome.violations.append(f"a second run in the folder ended with {code}: {sentence}")

    def _end_strikes(self) -> None:
        """End all strikes at the end of a part."""
        if self.disk is not None:
            self.disk.make_writable()
            self.disk.free()
        self._later.clear()
        if self._second is not None:
            # The first run has ended before the second one looked for it.
            struck, second = self._second
            second.kill()
            struck.time = self._second = None

    def _judge_end(self, running: Job, code: int, struck: Sequence[Struck], ended: float) -> None:
        """Judge a part that ended before its last batch: it has a cause, names it in one line, and ended in time."""
        outcome, sentence = self.outcome, _last_line(running.err)
        outcome.ends.append(f"exit {code}: {sentence}")
        times = [each.time for each in struck if each.time is not None and each.strike.may_end_run]
        if not times:
            outcome.violations.append(f"the run ended although every part that was lost is replaced: {sentence}")
            return
        killed = code == -signal.SIGKILL
        if not killed and not sentence.startswith("train_async.py:"):
            outcome.violations.append(f"the run ended with {code} and without a sentence: {sentence}")
        limit = DETECTION_SECONDS + SHUTDOWN_SECONDS + (0.0 if self.ray is None else JOINED_RAY_LOST_SECONDS)
        if ended - max(times) > limit:
            outcome.violations.append(f"the run ended {ended - max(times):.0f} s after the strike: {sentence}")


@contextmanager
def _started(folder: Path, arguments: Sequence[str], ray: WarmRay | None) -> Iterator[Job]:
    """Start a run. At the end of the block, its processes are killed."""
    if ray is None:
        with job(folder, *arguments) as running:
            yield running
        return
    ray.ensure()
    yield Job(folder, (*arguments, "--ray-address", ray.address), mark=ray.mark)
    for pid in ray.of_runs():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _left(running: Job, ray: WarmRay | None) -> dict[int, str]:
    """The processes of the run that are left some time after its driver has ended."""
    if ray is None:
        return running.left_running(patience=SHUTDOWN_SECONDS)
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while (left := ray.of_runs()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return left


class _BatchCounter:
    """Counts the batches that are added to the event log of a run, while the log is written, cut and rotated."""

    def __init__(self, run: Path) -> None:
        self._log = run / "events.jsonl"
        self._file = self._log.open("rb") if self._log.exists() else None
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)
        self._count = 0

    def read(self) -> int:
        """Return the number of batches since the counter was made."""
        with suppress(FileNotFoundError):  # the log is about to be created, or is being rotated
            self._file = self._file or self._log.open("rb")
            while self._log.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                self._read_lines(self._file)
                self._file.close()
                self._file = self._log.open("rb")
            self._read_lines(self._file)
        return self._count

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read_lines(self, file: BinaryIO) -> None:
        begin = min(file.tell(), os.fstat(file.fileno()).st_size)
        file.seek(begin)
        lines, newline, _ = file.read().rpartition(b"\n")
        file.seek(begin + len(lines) + len(newline))
        self._count += lines.count(b'"type":"StepEnded"')


def _send(running: Job, strike: Strike) -> bool:
    """Send the signal to one process of the part. Returns whether there is one now."""
    match strike.part:
        case "driver":
            pids = [running.pid]
        case "store_disk" | "second_run":
            raise AssertionError("gets no signal")
        case part:
            pids = [each.pid for each in of_part(part, _all(running))]
    with suppress(ProcessLookupError):
        for pid in pids[-1:]:
            os.kill(pid, signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP)
            return True
    return False


def _all(running: Job) -> Iterator[psutil.Process]:
    for pid in running.left_running():
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _read_faults(listed: Path, at_points: Sequence[Struck]) -> None:
    """Set the times of the strikes at fault points from the list that the run has written."""
    for line in listed.read_text().splitlines() if listed.exists() else ():
        fault = json.loads(line)
        at_points[fault["number"]].time = fault["time"]


def _last_line(text: str) -> str:
    """The last line that is not blank, with paths relative to the working directory, because results are published."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return line.replace(f"{Path.cwd()}/", "")[:500]
