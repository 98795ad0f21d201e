"""Confines a process that scores text of the model: scorers of reasoning-gym evaluate such text as Python code.

A confined process can compute, read the files that Python needs and write to what is already open. It reaches no keys,
no network, no other process and no other file.

The functions here use only `resource` and libc. bubblewrap needs user namespaces, which many containers refuse, and
pyseccomp needs libseccomp on every node; both would replace 50 lines.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import signal
import site
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_OPEN_FILES = 64

_KEPT_VARIABLES = "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ"
"""The interpreter needs these variables to start and to find this package."""

_SYSTEM_FILES = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/urandom"),
)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls of Landlock; their numbers are the same on all architectures."""
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_FILE_RIGHTS = (13, 14, 15, 15, 16)
"""The number of rights to files that version 1, 2, ... of Landlock controls; later ones control as many as the last."""

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
"""Actions of a seccomp filter: allow the system call, or let it fail with EPERM."""
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
"""Opcodes of a seccomp filter: load a word, the two conditional jumps, and return."""
_OPEN = {"x86_64": 257, "aarch64": 56}
"""The system call `openat`."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The number of each architecture in <linux/audit.h>."""

# Everything that Python computes with, and nothing that changes another process, a file or a limit. No call here
# duplicates a descriptor or changes its owner or flags: a descriptor can send a signal to its owner.
_ALLOWED_CALLS = {
    "x86_64": (
        *(0, 1, 3, 5, 8, 17, 19, 20),  # read write close fstat lseek pread64 readv writev
        *(4, 6, 21, 79, 89, 217, 262, 267, 269, 332, 439),  # stat lstat access getcwd readlink getdents64 *at statx
        *(9, 10, 11, 12, 25, 28),  # mmap mprotect munmap brk mremap madvise: limited by the address space
        *(13, 14, 15, 131, 219),  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall
        *(24, 35, 202, 204, 228, 229, 230),  # sched_yield nanosleep futex sched_getaffinity clock_*
        *(39, 63, 96, 98, 99, 100, 102, 104, 107, 108, 110, 186, 318),  # getpid, getuid, uname, times, getrandom, ...
        *(60, 231),  # exit exit_group
    ),
    "aarch64": (
        *(63, 64, 57, 80, 62, 67, 65, 66),
        *(17, 61, 79, 78, 48, 291, 439),
        *(222, 226, 215, 214, 216, 233),
        *(134, 135, 139, 132, 128),
        *(124, 101, 98, 123, 113, 114, 115),
        *(172, 160, 169, 165, 179, 153, 174, 176, 175, 177, 173, 178, 278),
        *(93, 94),
    ),
}


def scrubbed_environment() -> dict[str, str]:
    """Return an environment without keys, tokens and settings, for a process that needs one core."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, **threads, **kept}


def protect() -> None:
    """Hide the memory of this process and of its children from others, and end it together with its parent.

    The kernel ends a child when the thread that started it ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def python_files() -> list[str]:
    """Return the files and folders that Python and the imported packages may read, without those inside of others.

    A folder that contains the home folder of the user is left out.
    """
    packages = (
        path
        for name, module in list(sys.modules.items())
        if "." not in name
        for path in vars(module).get("__path__", ())
    )
    named = {sys.prefix, sys.base_prefix, *site.getsitepackages(), *_SYSTEM_FILES, *packages}
    found = sorted({Path(path).resolve() for path in named if os.path.exists(path)})
    home = Path.home().resolve()
    kept: list[Path] = []
    for path in found:
        if not home.is_relative_to(path) and not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return list(map(str, kept))


def confine(memory_bytes: int, files: Iterable[str], *, evaluates: bool) -> tuple[bool, bool]:
    """Confine this process for the rest of its life. Returns whether system calls and whether files are restricted.

    Limits the address space to `memory_bytes`, allows `MAX_OPEN_FILES` open files and forbids new processes. Landlock
    limits reading to `files` and forbids writing. A seccomp filter permits only the system calls that computing needs.
    Without Landlock, a process that `evaluates` text can open no file at all.
    """
    _lower_limit(resource.RLIMIT_AS, memory_bytes)
    _lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower_limit(resource.RLIMIT_NPROC, 0)
    _lower_limit(resource.RLIMIT_CORE, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel accepts a filter from an ordinary process only if the process can gain no privileges.
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restricted = _restrict_files(libc, files)
    return _filter_calls(libc, opens=restricted or not evaluates), restricted


def limit_cpu(seconds: int) -> None:
    """End this process once it has used so much CPU time; not even a handler for the signal can prevent it."""
    _lower_limit(resource.RLIMIT_CPU, seconds)


_ARITHMETIC = re.compile(rb"""(?:Integer|Float|Rational|Symbol|E|'[\w.+-]*'|"[\w.+-]*"|[\d\s.+\-*/(),])*+""")
_EVALUATORS = "ast", "sympy.parsing.sympy_parser", "sympy.utilities.lambdify"
"""The modules that evaluate formulas."""


def refuse_code(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook that lets sympy evaluate numbers and arithmetic only. Raises PermissionError.

    math-verify passes only digits and operators to sympy's parser. A reward for mathematics relies on this, because its
    process scores one sample after the other, and a sample must not change the rewards of others.
    """
    if event != "compile" or sys._getframe(1).f_globals.get("__name__") not in _EVALUATORS:
        return
    source = arguments[0].encode() if isinstance(arguments[0], str) else arguments[0]
    if isinstance(source, bytes) and source != b"from sympy import *" and not _ARITHMETIC.fullmatch(source):
        raise PermissionError("the formula contains code")


def _lower_limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _restrict_files(libc: ctypes.CDLL, files: Iterable[str]) -> bool:
    """Let this process read `files` and write nothing (Landlock). Returns False if the kernel does not permit it."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    # `struct landlock_ruleset_attr`: rights to files, rights to TCP ports (version 4), and what stays inside: abstract
    # sockets and signals (version 6).
    rights = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]) - 1
    controlled = struct.pack("QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    rules = libc.syscall(_CREATE_RULESET, controlled, ctypes.c_size_t(len(controlled)), 0)
    for name in files:
        path = os.open(name, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | (_READ_FOLDER if os.path.isdir(name) else 0)
        libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, path), 0)
        os.close(path)
    restricted = libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return bool(restricted)


def _filter_calls(libc: ctypes.CDLL, *, opens: bool) -> bool:
    """Install the seccomp filter. Returns False if the kernel does not permit it or the architecture is unknown.

    With `opens`, files can be opened for reading.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return False
    # A filter loads words of `struct seccomp_data`: the number of the system call at 0, the architecture at 4, and the
    # third argument at 32. An instruction has an opcode, the number of instructions to skip if true and if false, and
    # an operand.
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    for call in _ALLOWED_CALLS[machine]:
        steps += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW)]
    if opens:
        steps += [(_EQUAL, 0, 3, _OPEN[machine]), (_LOAD, 0, 0, 32), (_ANY_BIT, 1, 0, _WRITES), (_RETURN, 0, 0, _ALLOW)]
    steps.append((_RETURN, 0, 0, _REFUSE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program) == 0)
