"""What a machine has, as far as it matters to a run. `adapters/system/machine.py` reads it, `findings.py` judges it.

`torch.utils.collect_env` and `python -m sglang.check_env` print some of these facts as text for people. Both import
torch, and neither judges the facts.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")
GIB = 1 << 30


class Unknown(msgspec.Struct, frozen=True):
    """Takes the place of a fact that could not be found out."""

    unknown: str
    """The reason."""


class Processor(msgspec.Struct, frozen=True, kw_only=True):
    name: str | Unknown
    architecture: str
    """Such as `x86_64`."""
    features: tuple[str, ...] | Unknown
    """Vector and matrix extensions that it has, such as `avx512f` and `amx_bf16`."""
    cores: int | Unknown
    """Logical cores of the machine."""
    usable_cores: int | Unknown
    """Cores that this process may run on (its CPU affinity)."""
    quota: float | Unknown | None
    """Cores' worth of time that the control groups allow; None without a limit."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes."""

    total: int | Unknown
    available: int | Unknown
    limit: int | Unknown | None
    """Limit of the control groups; None without a limit."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    identifier: str
    """Such as `GPU-5a…`, by which CUDA_VISIBLE_DEVICES may name it."""
    memory: int
    """Bytes."""
    capability: tuple[int, int]
    """Compute capability, such as (9, 0)."""
    nvlinks: int | Unknown
    """Active NVLink connections."""


class Cuda(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[Gpu, ...] | Unknown
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None if it is unset."""
    driver: str | Unknown | None
    """Version of the driver; None without a driver."""
    driver_supports: str | Unknown | None
    """The newest version of CUDA that the driver supports."""
    of_torch: str | Unknown | None
    """The version of CUDA that torch was built with; None for a CPU build."""
    peer_memory: bool | Unknown
    """Whether the kernel module nvidia_peermem is loaded, with which network cards reach GPU memory."""


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an InfiniBand or RoCE card."""

    device: str
    port: int
    state: str
    """Such as `ACTIVE` or `DOWN`."""
    link_layer: str
    """`InfiniBand` or `Ethernet`."""
    rate: str
    """Such as `400 Gb/sec (4X NDR)`."""


class Rdma(msgspec.Struct, frozen=True, kw_only=True):
    ports: tuple[RdmaPort, ...] | Unknown
    device_files: bool | Unknown
    """Whether /dev/infiniband has the files through which programs use the cards."""
    libibverbs: bool | Unknown
    """Whether the system library loads, without which Mooncake cannot be imported."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of `ulimit`; None is unlimited. A program may raise the soft limit up to the hard one."""

    soft: int | Unknown | None
    hard: int | Unknown | None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    open_files: Limit
    processes: Limit
    """Processes and threads of the user."""
    control_group_processes: int | Unknown | None
    """Processes and threads that the control groups allow; None without a limit."""
    locked_memory: Limit
    """Bytes."""
    is_root: bool


class Space(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    total: int | Unknown
    """Bytes."""
    free: int | Unknown
    file_system: str
    """Such as `ext4`; empty if it is unknown."""
    is_network: bool
    """Whether other machines may share the file system."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    system: str
    """`Linux`, or another operating system."""
    kernel: str
    container: bool | Unknown
    python: str
    processor: Processor
    memory: Memory
    cuda: Cuda
    rdma: Rdma
    limits: Limits
    shared_memory: Space
    run_folder: Space
    cache_folder: Space
    temporary_folder: Space
    writes_other_processes: bool | Unknown
    """Whether the system call process_vm_writev works, with which the transport `memory` copies weights."""
    packages: dict[str, str | None]
    """Version of each package that matters; None if it is not installed."""
    pins: dict[str, str]
    """The versions that this project was tested with."""
    plugin_problems: tuple[str, ...] = ()
    """One sentence for each plug-in of an installed package that cannot be used, or that is slow to import."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves. CUDA ignores the first entry that names no GPU, and all after
        it."""
        gpus, visible = known(self.cuda.gpus) or (), self.cuda.visible
        if visible is None:
            return gpus
        chosen: list[Gpu] = []
        for entry in filter(None, (part.strip() for part in visible.split(","))):
            if entry.isdigit() and int(entry) < len(gpus):
                chosen.append(gpus[int(entry)])
            elif named := [gpu for gpu in gpus if gpu.identifier.startswith(entry) and not entry.isdigit()]:
                chosen.append(named[0])
            else:
                break
        return tuple(chosen)

    @property
    def uses_cuda(self) -> bool:
        """Whether learner and engines compute on GPUs."""
        return bool(self.gpus) and known(self.cuda.of_torch) is not None

    @property
    def usable_cores(self) -> float | None:
        """Cores that affinity and control groups allow; None if they are unknown."""
        limits = (known(self.processor.usable_cores), known(self.processor.quota))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def usable_memory(self) -> int | None:
        """Bytes of the machine that control groups allow; None if they are unknown."""
        limits = (known(self.memory.total), known(self.memory.limit))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def mooncake(self) -> str | None:
        """The installed build of Mooncake; None without one."""
        return next((name for name, found in self.packages.items() if name.startswith("mooncake") and found), None)

    @property
    def has_active_rdma(self) -> bool:
        ports = known(self.rdma.ports) or ()
        return any("ACTIVE" in port.state for port in ports) and known(self.rdma.device_files) is not False


def known(fact: T | Unknown) -> T | None:
    """The fact, or None if it is unknown."""
    return None if isinstance(fact, Unknown) else fact


def size(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
