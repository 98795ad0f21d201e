"""Confines a grader process: scorers of reasoning-gym and sympy evaluate the text of a model as Python code.

The confinement limits what such text can do by accident or design: it has no keys, no network and no other processes
within reach, and only as much memory and CPU time as scoring needs. The functions here use only `resource` and libc.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import struct
import time

MAX_OPEN_FILES = 64

_KEPT_VARIABLES = "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ"
"""The interpreter needs these variables to start and to find this package."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
"""Actions of a seccomp filter: allow the system call, or let it fail with EPERM."""
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Opcodes of a seccomp filter: load a word, the two conditional jumps, and return."""
_X32_CALLS = 0x40000000
"""On x86-64, the system calls from this number on repeat all others for another ABI."""

# The number of the architecture in <linux/audit.h>, and the numbers of the refused system calls: socket,
# io_uring_setup; fork, vfork, clone, clone3, execve, execveat; kill, tkill, tgkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo, pidfd_send_signal; ptrace, process_vm_readv, process_vm_writev, pidfd_getfd.
_REFUSED_CALLS = {
    "x86_64": (
        0xC000003E,
        (41, 425, 57, 58, 56, 435, 59, 322, 62, 200, 234, 129, 297, 424, 101, 310, 311, 438),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 425, 220, 435, 221, 281, 129, 130, 131, 138, 240, 424, 117, 270, 271, 438),
    ),
}


def scrubbed_environment() -> dict[str, str]:
    """Return an environment without keys, tokens and settings, for a process that needs one core."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, **threads, **kept}


def confine(memory_bytes: int) -> bool:
    """Confine this process for the rest of its life; all imports must be done. Returns whether the network is closed.

    Limits the address space to `memory_bytes`, allows `MAX_OPEN_FILES` open files, and forbids new processes. A user
    namespace keeps the environment and memory of other processes out of reach. The network is closed by a network
    namespace or a seccomp filter, whichever the kernel permits; containers often permit only the filter.
    """
    _lower_limit(resource.RLIMIT_AS, memory_bytes)
    _lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower_limit(resource.RLIMIT_NPROC, 0)
    _lower_limit(resource.RLIMIT_CORE, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    separated = libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    return _refuse_calls(libc) or separated


def limit_cpu(seconds: float) -> None:
    """End this process once it has used `seconds` more of CPU time.

    The parent process enforces the wall-clock limit. This limit also holds after the parent has died.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _lower_limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _refuse_calls(libc: ctypes.CDLL) -> bool:
    """Install the seccomp filter. Returns False if the kernel does not permit it or the architecture is unknown."""
    if platform.machine() not in _REFUSED_CALLS:
        return False
    architecture, refused = _REFUSED_CALLS[platform.machine()]
    # A filter loads words of `struct seccomp_data`: the number of the system call at 0, the architecture at 4. An
    # instruction has an opcode, the number of instructions to skip if true and if false, and an operand.
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 0, len(refused) + 3, architecture), (_LOAD, 0, 0, 0)]
    for position, call in enumerate(refused):
        steps.append((_EQUAL, len(refused) - position + 1, 0, call))
    steps += [(_AT_LEAST, 1, 0, _X32_CALLS), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    # The kernel accepts a filter from an ordinary process only if the process can gain no privileges.
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program) == 0)
