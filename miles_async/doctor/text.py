"""The facts and the findings as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from miles_async.doctor.facts import Gpu, Limit, Machine, Memory, Processor, RdmaPort, Space, Unknown, size
from miles_async.doctor.findings import Diagnosis
from miles_async.doctor.options import Option

INDENT = 12
"""Columns of the names of facts."""


def render(machine: Machine, diagnosis: Diagnosis) -> str:
    lines = [f"{name:<{INDENT}}{text}" for name, text in _facts(machine)]
    for title, options in (
        ("Weight transports", diagnosis.transports),
        ("Attention", diagnosis.attention),
        ("Precision", diagnosis.precisions),
    ):
        lines += ["", title, *_options(options)]
    if diagnosis.findings:
        lines += ["", "To change"]
    for finding in diagnosis.findings:
        lines += [f"  {finding.level}: {finding.text}", f"    {finding.fix}"]
    lines += [
        "",
        "make run can work here" if diagnosis.run_works else "make run cannot work here: see the problems above",
    ]
    return "\n".join(lines)


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    container = ", in a container" if machine.container is True else ""
    yield "system", f"{machine.system} {machine.kernel}, Python {machine.python}{container}"
    yield "processor", _processor(machine.processor)
    yield "memory", _memory(machine.memory)
    yield "GPUs", _several(machine.cuda.gpus, _gpu)
    if machine.cuda.visible is not None:
        yield "", f"CUDA_VISIBLE_DEVICES={machine.cuda.visible}"
    cuda = machine.cuda
    if cuda.driver is not None:
        yield (
            "CUDA",
            f"driver {_text(cuda.driver)} (up to CUDA {_text(cuda.driver_supports)}), torch for {_text(cuda.of_torch)}",
        )
    yield "RDMA", _several(machine.rdma.ports, _port)
    limits = machine.limits
    yield (
        "limits",
        (
            f"open files {_limit(limits.open_files)}, processes {_limit(limits.processes)}, "
            f"locked memory {_limit(limits.locked_memory, in_bytes=True)}"
        ),
    )
    yield "/dev/shm", _space(machine.shared_memory)
    for folder in (machine.run_folder, machine.cache_folder, machine.temporary_folder):
        yield "disk", f"{folder.path}: {_space(folder)}"
    found = [f"{name} {version}" for name, version in machine.packages.items() if version is not None]
    yield "packages", ", ".join(found)


def _processor(processor: Processor) -> str:
    features = processor.features if isinstance(processor.features, Unknown) else " ".join(processor.features)
    quota = "" if processor.quota is None else f", limit of control groups: {_text(processor.quota)}"
    cores = f"{_text(processor.cores)} cores, {_text(processor.usable_cores)} usable{quota}"
    return f"{_text(processor.name)} ({processor.architecture}), {cores}; {_text(features)}"


def _memory(memory: Memory) -> str:
    limit = "" if memory.limit is None else f", limit of control groups: {_bytes(memory.limit)}"
    return f"{_bytes(memory.total)}, {_bytes(memory.available)} available{limit}"


def _gpu(gpu: Gpu) -> str:
    capability = ".".join(map(str, gpu.capability))
    return f"{gpu.name}, {size(gpu.memory)}, compute capability {capability}, NVLinks: {_text(gpu.nvlinks)}"


def _port(port: RdmaPort) -> str:
    return f"{port.link_layer} {port.rate}, {port.state}"


def _space(space: Space) -> str:
    kind = f" ({space.file_system})" if space.file_system else ""
    return f"{_bytes(space.free)} of {_bytes(space.total)} free{kind}"


def _limit(limit: Limit, *, in_bytes: bool = False) -> str:
    def shown(value: int | Unknown | None) -> str:
        if value is None:
            return "unlimited"
        return size(value) if in_bytes and not isinstance(value, Unknown) else _text(value)

    return shown(limit.soft) if limit.soft == limit.hard else f"{shown(limit.soft)} (up to {shown(limit.hard)})"


def _several(items: tuple[Any, ...] | Unknown, describe: Any) -> str:
    """Equal items on one line with their number."""
    if isinstance(items, Unknown):
        return _text(items)
    counts = Counter(map(describe, items))
    return f"\n{'':<{INDENT}}".join(f"{count} x {text}" for text, count in counts.items()) or "none"


def _options(options: Iterable[Option]) -> Iterator[str]:
    marks = {True: "yes", False: "no", None: "?"}
    for option in options:
        setting = f" [{option.setting}]" if option.setting else ""
        yield f"  {marks[option.works]:<4}{option.name}: {option.why}{setting}"


def _bytes(value: int | Unknown) -> str:
    return _text(value) if isinstance(value, Unknown) else size(value)


def _text(value: object) -> str:
    return f"unknown ({value.unknown})" if isinstance(value, Unknown) else str(value)
