"""What a call costs: seconds, memory of the GPU, kernels, and how often the host waits for the GPU."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import ON_GPU

ROUNDS = 3
TOP = 10
"""Kernels, and operators, of a profile that are printed."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
OPERATORS = ("cpu_op", "cuda_runtime", "cuda_driver")
"""Categories of a trace's events."""
NO_GPU_MEMORY = "without a GPU there is no device memory"

Call = Callable[[], Any]


def timed(call: Call) -> float:
    """Seconds of one call, until the GPU has computed everything."""
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def report_cost(report: Report, part: str, call: Call) -> float:
    """Report time, peak memory and synchronizations of a call; returns the median seconds.

    The memory is that which the call allocates on the GPU in addition. The first call is not measured: kernels are
    chosen and compiled in it.
    """
    call()
    before = start_peak()
    seconds = median(timed(call) for _ in range(ROUNDS))
    report.figure(f"{part}: time", 1e3 * seconds, "ms")
    report_peak(report, f"{part}: memory", before)
    report_synchronizations(report, f"{part}: synchronizations", call)
    return seconds


def start_peak() -> int:
    """Bytes that are allocated on the GPU now, above which `report_peak` reports the most until then."""
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def report_peak(report: Report, part: str, before: int) -> None:
    if ON_GPU:
        report.figure(part, (torch.cuda.max_memory_allocated() - before) / 2**30, "GiB")
    else:
        report.not_possible(part, NO_GPU_MEMORY)


def report_synchronizations(report: Report, part: str, call: Call) -> None:
    """Report how often a call lets the host wait for the GPU. The log of the check has the lines of code.

    Waits in a backward pass count for the line that started it.
    """
    if not ON_GPU:
        report.not_possible(part, "without a GPU there is nothing to wait for")
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = Counter(f"{one.filename}:{one.lineno}" for one in caught if "synchronizing CUDA" in str(one.message))
    report.figure(part, waits.total(), "waits")
    for line, count in waits.most_common():
        print(f"{part}: {count} at {line}", flush=True)


def report_kernels(report: Report, part: str, call: Call) -> None:
    """Report the kernels that a call launches and the time in which they run; on a CPU, operators of torch.

    The log of the check has those that take the longest.
    """
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]) as trace:
        call()
        synchronize()
    events = trace_events(trace)
    kernels = [(event["name"], event["dur"]) for event in events if event["cat"] in KERNELS]
    operators = own_times([event for event in events if event["cat"] in OPERATORS])
    counted = kernels if ON_GPU else operators
    report.figure(f"{part}: kernels", len(counted), "kernels")
    report.figure(f"{part}: time in kernels", sum(time for _, time in counted) / 1e3, "ms")
    for kind, entries in (("kernels", kernels), ("operators, without those inside them", operators)):
        counts = Counter(name for name, _ in entries)
        times = dict.fromkeys(counts, 0.0)
        for name, microseconds in entries:
            times[name] += microseconds
        print(f"\n{part}: milliseconds and number of {kind}")
        for name, microseconds in sorted(times.items(), key=lambda entry: entry[1], reverse=True)[:TOP]:
            print(f"{microseconds / 1e3:12.2f} {counts[name]:8} {name[:120]}", flush=True)


def trace_events(trace: profile) -> list[dict[str, Any]]:
    """The events of a trace that last. A file with hundreds of thousands of them is read faster than `key_averages`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_bytes())["traceEvents"] if event["ph"] == "X"]


def own_times(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Name and microseconds of each event, without the events of the same thread inside it."""
    own = [event["dur"] for event in events]
    order = sorted(range(len(events)), key=lambda i: (events[i]["tid"], events[i]["ts"], -own[i]))
    around: list[int] = []
    for i in order:
        event = events[i]
        while around and not _contains(events[around[-1]], event):
            around.pop()
        if around:
            own[around[-1]] -= event["dur"]
        around.append(i)
    return [(event["name"], time) for event, time in zip(events, own, strict=True)]


def _contains(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    return outer["tid"] == inner["tid"] and inner["ts"] < outer["ts"] + outer["dur"]


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()
