"""Which weight transports, attention back-ends and precisions work on a machine, as far as their requirements go.

Pure functions. What has been run on GPUs is in the README.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from miles_async.doctor.facts import Machine, Unknown, known


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a transport, an attention back-end or a precision works on this machine."""

    name: str
    works: bool | None
    """None if it is unknown."""
    why: str
    setting: str = ""
    """What selects it, or what to do so that it works."""


def transports(machine: Machine) -> Iterator[Option]:
    gpus = machine.gpus if machine.uses_cuda else ()
    yield _memory_transport(machine, bool(gpus))
    yield _p2p(machine, bool(gpus))
    broadcast = "--weight-transfer broadcast"
    if not gpus:
        yield Option(name="broadcast", works=True, why="by gloo, over loopback or the network", setting=broadcast)
    elif len(gpus) == 1:
        why = "NCCL refuses two ranks on one GPU, and learner and engine would share it"
        yield Option(name="broadcast", works=False, why=why, setting="--weight-transfer disk")
    else:
        linked = all(known(gpu.nvlinks) for gpu in gpus)
        route = "NVLink" if linked else "PCIe, because not all GPUs have an active NVLink"
        yield Option(name="broadcast", works=True, why=f"by NCCL, over {route}", setting=broadcast)
    yield _ipc(bool(gpus))
    for name in ("disk", "disk_delta"):
        why = "all processes see the run folder; on several nodes it has to be a shared folder"
        yield Option(name=name, works=True, why=why, setting=f"--weight-transfer {name}")


def _memory_transport(machine: Machine, on_gpus: bool) -> Option:
    if on_gpus:
        return Option(name="memory", works=False, why="engines hold their weights in GPU memory")
    allowed = machine.writes_other_processes
    if isinstance(allowed, Unknown):
        return Option(name="memory", works=None, why=f"process_vm_writev: {allowed.unknown}")
    if not allowed:
        why = "the system call process_vm_writev is forbidden here"
        return Option(name="memory", works=False, why=why, setting="docker run --cap-add=SYS_PTRACE …")
    return Option(name="memory", works=True, why="on one machine", setting="--weight-transfer memory")


def _ipc(on_gpus: bool) -> Option:
    if not on_gpus:
        return Option(name="ipc", works=True, why="through shared memory", setting="--weight-transfer ipc")
    why = "by CUDA IPC, to engines on the learner's node"
    return Option(name="ipc", works=True, why=why, setting="--weight-transfer ipc (the default with --colocate)")


def _p2p(machine: Machine, on_gpus: bool) -> Option:
    build, setting = machine.mooncake, "--weight-transfer p2p (the default)"
    if build is None:
        fix = "make setup-gpu" if on_gpus else "make setup"
        return Option(name="p2p", works=False, why="Mooncake is not installed", setting=fix)
    if known(machine.rdma.libibverbs) is False:
        why = "Mooncake needs libibverbs, also for TCP"
        return Option(name="p2p", works=False, why=why, setting="apt-get install libibverbs1")
    if not on_gpus:
        return Option(name="p2p", works=True, why="over TCP", setting=setting)
    if build == "mooncake-transfer-engine-non-cuda":
        why = "this build of Mooncake cannot reach GPU memory"
        return Option(name="p2p", works=False, why=why, setting="make setup-gpu")
    if machine.has_active_rdma:
        return Option(name="p2p", works=True, why="over RDMA", setting=setting)
    why = "over TCP through main memory, because no InfiniBand or RoCE port is active; broadcast may be faster"
    return Option(name="p2p", works=True, why=why, setting=setting)


def attention(machine: Machine) -> Iterator[Option]:
    flag = "--sglang-attention-backend"
    if not machine.uses_cuda:
        has_amx = "amx_tile" in (known(machine.processor.features) or ())
        yield Option(name="engine: torch_native", works=True, why="set by the run on CPUs")
        why = (
            "SGLang packs bfloat16 weights for AMX, which a publish would overwrite in another layout"
            if has_amx
            else "the processor has no AMX"
        )
        yield Option(name="engine: intel_amx", works=False, why=why)
        yield Option(name="learner: torch", works=True, why="scaled_dot_product_attention, with shared prefixes")
        return
    # All GPUs of a run have to do what it is set to.
    oldest = min(gpu.capability for gpu in machine.gpus)
    level = f"compute capability {oldest[0]}.{oldest[1]}"
    has_flashinfer = machine.packages.get("flashinfer-python") is not None
    default = {9: "fa3", 10: "trtllm_mha"}.get(oldest[0], "flashinfer" if has_flashinfer else "triton")
    for name, works, needs in (
        ("fa3", oldest[0] in (8, 9), "8.0 to 9.0"),
        ("trtllm_mha", oldest[0] == 10, "10.0 or 10.3"),
        ("flashinfer", oldest >= (7, 5) and has_flashinfer, "7.5 and the package flashinfer-python"),
        ("triton", oldest >= (7, 5), "7.5"),
    ):
        chosen = ", SGLang's default here" if name == default else ""
        why = f"{level}{chosen}" if works else f"{level}, and it needs {needs}"
        yield Option(name=f"engine: {name}", works=works, why=why, setting=f"{flag} {name}" if works else "")
    has_engine = machine.packages.get("transformer-engine") is not None
    why = f"{level}; its fast kernels need 8.0" if has_engine else "Transformer Engine is not installed"
    yield Option(name="learner: Transformer Engine", works=has_engine and oldest >= (8, 0), why=why)
    yield Option(
        name="learner: local layers",
        works=True,
        why="PyTorch's attention and norms, which take about twice as long",
        setting="--transformer-impl local",
    )
    yield Option(
        name="learner: FlexAttention",
        works=True,
        why="computes common prefixes once",
        setting="--share-prefixes",
    )


def precisions(machine: Machine) -> Iterator[Option]:
    bf16, fp32 = "--precision bf16", "--precision fp32"
    if not machine.uses_cuda:
        features = set(known(machine.processor.features) or ())
        yield Option(name="fp32", works=True, why="the default", setting=fp32)
        if features & {"avx512_bf16", "amx_bf16", "bf16"}:
            why = "the processor multiplies bfloat16; engines stay in float32"
        else:
            why = "slower than fp32, because the processor does not multiply bfloat16; engines stay in float32"
        yield Option(name="bf16", works=True, why=why, setting=bf16)
    else:
        oldest = min(gpu.capability for gpu in machine.gpus)
        why = "SGLang serves a float32 checkpoint in float16 unless its dtype is set"
        # Triton multiplies float32 as TF32.
        serve = "--sglang-dtype float32 --sglang-attention-backend torch_native"
        yield Option(name="fp32", works=True, why=why, setting=f"{fp32} {serve}")
        level = f"{oldest[0]}.{oldest[1]}"
        why = f"the default on GPUs; the oldest GPU has compute capability {level}, and bfloat16 needs 8.0"
        yield Option(name="bf16", works=oldest >= (8, 0), why=why, setting=bf16)
    why = "never tried, in engines and in the learner; refused without --allow-untested"
    yield Option(name="fp16, fp8, int8, int4", works=False, why=why)
