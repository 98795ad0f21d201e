"""Measures the size of a day's report, the first paint of the live page, and the CPU time per event.

    python -m benchmarks.page [--hours 24]

Simulates the real pipeline for a day of virtual time, writes its events like a run, creates the report from them, and
opens the live page of the last hour ten times in Chromium. Prints the results and writes benchmarks/results/page.json.
Exits with 1 if the report has 10 MB or more, or if the median first paint takes 300 ms or more.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry

from benchmarks.records import record
from miles_async.config.load import write_config
from miles_async.config.schema import RunConfig
from miles_async.events import ClusterReady, Event, RunEnded, RunStarted, SampleDisplayed
from miles_async.observability.http_server import HttpServer
from miles_async.observability.page.document import LivePage
from miles_async.observability.page.report import write_report
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.state.samples import MAX_SAMPLES
from miles_async.observability.trace.event_log import EventLogWriter, read_events
from miles_async.observability.trace.perfetto import PerfettoTrace
from miles_async.observability.view import RunView
from miles_async.pipeline.sample_display import CHARACTERS_SHOWN
from tests.sim.latency import log_normal
from tests.sim.world import Trace, World
from tests.stack.browser import Visit, chromium

LIMIT_BYTES, LIMIT_PAINT_MS = 10_000_000, 300.0
PAINTS = 10
STEP_SECONDS, BATCH = 20.0, 8


class EventRecorder:
    """An event sink that writes the event log of a run."""

    def __init__(self, path: Path) -> None:
        self._writer = EventLogWriter(path, rotate_bytes=64 * 2**20, max_bytes=10 * 2**30, on_error=fail)
        self.last = 0.0

    def emit(self, event: Event) -> None:
        self._writer.observe(event)
        self.last = event.time
        if isinstance(event, RunStarted):
            ready = ClusterReady(time=event.time, weight_transfer="p2p", warm_start_seconds=0.0, warm_start_cached=True)
            self._writer.observe(ready)

    def close(self) -> None:
        """Write samples of maximum length and the end of the run, and close the log."""
        text = "x" * CHARACTERS_SHOWN
        for sequence in range(MAX_SAMPLES):
            sample = SampleDisplayed(
                time=self.last,
                sequence=sequence,
                feed_index="sample_0_0",
                prompt=text,
                response=text,
                label="",
                reward=1.0,
                rewards=[1.0] * 8,
                tokens=500,
                versions=(1, 2),
                truncated=False,
            )
            self._writer.observe(sample)
        self._writer.observe(RunEnded(time=self.last, reason="done"))
        self._writer.close()


def simulate(folder: RunFolder, hours: float) -> None:
    settings = {
        "num_rollout": round(hours * 3600 / STEP_SECONDS),
        "rollout_batch_size": BATCH,
        "over_sampling_batch_size": 2 * BATCH,
        "n_samples_per_prompt": 8,
        "windowed_fifo_ratio": 0.3,
        "max_weight_staleness": 2,
    }
    config = RunConfig.model_validate({"rollout": settings})
    write_config(config, folder.path / "config.yaml")
    recorder = EventRecorder(folder.events)
    world = World(
        config=config,
        latency=log_normal(mean=15.0, sigma=0.7),
        train_seconds=0.8 * STEP_SECONDS,
        sinks=(recorder,),
        trace=Trace(RunStarted),
        keeps_batches=False,
    )
    world.run()
    recorder.close()


def time_events(view: RunView, trace: PerfettoTrace, events: Sequence[Event]) -> dict[str, float]:
    """Return the CPU time that the view and the trace take per event."""
    spent = {"view": 0, "trace": 0}
    for event in events:
        begun = time.process_time_ns()
        view.apply(event)
        applied = time.process_time_ns()
        trace.observe(event)
        spent["view"] += applied - begun
        spent["trace"] += time.process_time_ns() - applied
    return {f"{name}_microseconds_per_event": total / len(events) / 1e3 for name, total in spent.items()}


def time_paint(view: RunView) -> dict[str, float]:
    server = HttpServer(CollectorRegistry(), LivePage(view), 0)
    try:
        with chromium() as browser:
            paints = []
            for _ in range(PAINTS):
                visit = Visit.to(browser, server.page_url)
                paints.append(visit.first_paint_ms)
                visit.page.close()
    finally:
        server.close()
    return {"first_paint_ms_median": median(paints), "first_paint_ms_max": max(paints)}


def measure(hours: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        simulate(folder, hours)
        begun = time.process_time()
        report = write_report(folder, None, None).stat().st_size
        figures = {
            "hours": hours,
            "events_mb": folder.events.stat().st_size / 1e6,
            "report_mb": report / 1e6,
            "report_cpu_seconds": time.process_time() - begun,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        last_hour = list(events_of_last_hour(folder, hours))
        view = RunView()
        trace = PerfettoTrace(view, folder.trace, 64 * 2**20, fail)
        figures |= time_events(view, trace, last_hour)
        trace.close()
        figures["trace_mb_per_hour"] = folder.trace.stat().st_size / 1e6
        return figures | time_paint(view)


def fail(file: Path, error: OSError) -> None:
    raise SystemExit(f"{file} cannot be written: {error.strerror}")


def events_of_last_hour(folder: RunFolder, hours: float) -> Iterator[Event]:
    """Yield the start of the run and the events of its last hour."""
    start = None
    for event in read_events(folder.events):
        start = start or event.time
        if isinstance(event, RunStarted) or event.time - start > (hours - 1) * 3600:
            yield event


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0, help="virtual hours to simulate (default: 24)")
    figures = measure(parser.parse_args().hours)
    for name, value in figures.items():
        print(f"{name:<32}{value:>12.2f}")
    record("page", figures)
    too_large = figures["report_mb"] * 1e6 >= LIMIT_BYTES
    return int(too_large or figures["first_paint_ms_median"] >= LIMIT_PAINT_MS)


if __name__ == "__main__":
    sys.exit(main())
