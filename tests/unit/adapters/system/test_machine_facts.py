"""The facts about a machine are read from files in the form of Linux; what cannot be read is unknown, with a reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from miles_async.adapters.system import machine
from miles_async.adapters.system.machine import control_group_values, fact, least, read_machine
from miles_async.doctor.facts import Unknown


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def memory_limits(root: Path) -> list[str]:
    names = ("memory.max", "memory", "memory.limit_in_bytes")
    return control_group_values(*names, proc=root / "proc", root=root / "cgroup")


def test_limits_of_control_groups_of_version_2_come_from_all_levels(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod7\n",
            "cgroup/cgroup.controllers": "cpu memory pids",
            "cgroup/kubepods/memory.max": "8589934592\n",
            "cgroup/kubepods/pod7/memory.max": "max\n",
        },
    )
    assert memory_limits(tmp_path) == ["max", "8589934592"]
    assert least(memory_limits(tmp_path)) == 8 << 30


def test_limits_of_control_groups_of_version_1_are_read_where_the_container_sees_them(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            # The path is that of the host; the container sees its own group as the root of the mount.
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/5a\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": "4294967296",
        },
    )
    assert least(memory_limits(tmp_path)) == 4 << 30


def test_a_huge_number_is_no_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert least(memory_limits(tmp_path)) is None


def test_limits_without_control_groups_are_unknown(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n"})
    limit = fact(lambda: memory_limits(tmp_path))
    assert isinstance(limit, Unknown)
    assert limit.unknown.startswith("no control groups are mounted at")


@pytest.mark.parametrize(
    "groups, cores",
    [
        ({"cpu.max": ["200000 100000", "max 100000"], "cpu.cfs_quota_us": [], "cpu.cfs_period_us": []}, 2.0),
        ({"cpu.max": ["max 100000"]}, None),
        ({"cpu.cfs_quota_us": ["-1", "150000"], "cpu.cfs_period_us": ["100000", "100000"]}, 1.5),
    ],
)
def test_the_quota_of_cores_is_the_lowest_of_all_groups(
    groups: dict[str, list[str]], cores: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def values(v2_file: str, v1_controller: str, v1_file: str) -> list[str]:
        return groups["cpu.max"] if "cpu.max" in groups else groups[v1_file]

    monkeypatch.setattr(machine, "control_group_values", values)
    assert machine.cpu_quota() == cores


def test_features_are_read_on_x86_and_arm(tmp_path: Path) -> None:
    x86 = write(tmp_path, {"x86": "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512f amx_tile\n"}) / "x86"
    arm = write(tmp_path, {"arm": "processor\t: 0\nFeatures\t: fp asimd bf16\n"}) / "arm"
    assert machine.features(x86) == ("avx2", "avx512f", "amx_tile")
    assert machine.features(arm) == ("asimd", "bf16")
    assert fact(lambda: machine.cpuinfo("model name", arm)) == Unknown(f"{arm} has no field 'model name'")


def test_ports_of_network_cards_are_read_without_tools(tmp_path: Path) -> None:
    files = {"state": "4: ACTIVE\n", "link_layer": "InfiniBand\n", "rate": "400 Gb/sec (4X NDR)\n"}
    write(tmp_path, {f"mlx5_0/ports/1/{name}": text for name, text in files.items()})
    (port,) = machine.rdma_ports(tmp_path)
    assert (port.device, port.port, port.state, port.rate) == ("mlx5_0", 1, "ACTIVE", "400 Gb/sec (4X NDR)")
    assert machine.rdma_ports(tmp_path / "no-cards") == ()
    assert fact(lambda: machine.rdma_ports(tmp_path / "no-sys" / "infiniband")) == Unknown(
        f"there is no {tmp_path / 'no-sys'}"
    )


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that answers for one H100, whose fourth NVLink is down and that has no further ones."""

    class Memory:
        total = 80 << 30

    def link(handle: object, number: int) -> int:
        if number > 3:
            raise pynvml.NVMLError_InvalidArgument
        return int(number < 3)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
        "nvmlDeviceGetUUID": lambda handle: "GPU-5a",
        "nvmlDeviceGetMemoryInfo": lambda handle: Memory,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetNvLinkState": link,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(machine, "has_nvidia_driver", lambda: True)


@pytest.mark.usefixtures("one_gpu")
def test_gpus_are_listed_by_the_driver() -> None:
    found = machine.read_cuda()
    assert (found.driver, found.driver_supports) == ("580.65.06", "13.0")
    assert isinstance(found.gpus, tuple)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.capability, gpu.memory, gpu.nvlinks) == ("NVIDIA H100", (9, 0), 80 << 30, 3)


@pytest.mark.usefixtures("one_gpu")
def test_a_driver_that_does_not_answer_leaves_the_gpus_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise pynvml.NVMLError_LibRmVersionMismatch

    monkeypatch.setattr(pynvml, "nvmlInit", broken)
    found = machine.read_cuda()
    assert (
        found.gpus == found.driver == found.driver_supports == Unknown("RM has detected an NVML/RM version mismatch.")
    )


def test_a_container_without_access_to_the_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def inaccessible() -> bool:
        raise LookupError("the driver is loaded, but this container was started without GPUs")

    monkeypatch.setattr(machine, "has_nvidia_driver", inaccessible)
    assert machine.read_cuda().gpus == Unknown("the driver is loaded, but this container was started without GPUs")


def test_a_fact_that_fails_does_not_keep_the_others_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise PermissionError(13, "Permission denied")

    for module, name in ((psutil, "virtual_memory"), (psutil, "cpu_count"), (shutil, "disk_usage")):
        monkeypatch.setattr(module, name, broken)
    for name in ("cpuinfo", "torch_cuda", "rdma_ports", "writes_other_processes", "control_group_values"):
        monkeypatch.setattr(machine, name, broken)
    found = read_machine(tmp_path / "runs", tmp_path / "cache")
    reason = Unknown("[Errno 13] Permission denied")
    assert found.memory.total == found.processor.cores == found.run_folder.free == found.cuda.of_torch == reason
    assert found.processor.quota == found.memory.limit == found.rdma.ports == reason
    assert found.limits.open_files.soft != reason
    assert found.packages["torch"] is not None
