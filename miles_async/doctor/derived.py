"""What follows from the facts about a machine: the devices, cores and memory that a run can use."""

from __future__ import annotations

from miles_async.doctor.facts import Gpu, Machine, known

GIB = 1 << 30


def visible_gpus(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves. CUDA ignores the first entry that names no GPU, and all after it."""
    gpus, visible = known(machine.cuda.gpus) or (), machine.cuda.visible
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


def uses_cuda(machine: Machine) -> bool:
    """Whether learner and engines compute on GPUs."""
    return bool(visible_gpus(machine)) and known(machine.cuda.of_torch) is not None


def usable_cores(machine: Machine) -> float | None:
    """Cores that affinity and control groups allow; None if they are unknown."""
    limits = (known(machine.processor.usable_cores), known(machine.processor.quota))
    return min((limit for limit in limits if limit is not None), default=None)


def usable_memory(machine: Machine) -> int | None:
    """Bytes of the machine that control groups allow; None if they are unknown."""
    limits = (known(machine.memory.total), known(machine.memory.limit))
    return min((limit for limit in limits if limit is not None), default=None)


def mooncake(machine: Machine) -> str | None:
    """The installed build of Mooncake; None without one."""
    return next((name for name, found in machine.packages.items() if name.startswith("mooncake") and found), None)


def has_active_rdma(machine: Machine) -> bool:
    ports = known(machine.rdma.ports) or ()
    return any("ACTIVE" in port.state for port in ports) and known(machine.rdma.device_files) is not False


def size(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
