"""Runs a program as on a system that refuses some system calls: `python -m tests.stack.old_kernel CALLS PROGRAM...`.

CALLS are names of `REFUSED`, separated by commas. An old kernel, and the default settings of Docker, refuse them too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

X86 = platform.machine() == "x86_64"
REFUSED = {
    "landlock": (444, 445, 446),
    "namespaces": (272 if X86 else 97,),
    "seccomp": (157 if X86 else 167,),
}
"""The system calls. `seccomp` refuses only the operation of `prctl` that installs a filter."""
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001


def refuse(names: list[str]) -> None:
    steps = []
    for name in names:
        for call in REFUSED[name]:
            steps.append((LOAD, 0, 0, 0))
            if name == "seccomp":
                steps += [(EQUAL, 0, 3, call), (LOAD, 0, 0, 16), (EQUAL, 0, 1, 22)]
            else:
                steps.append((EQUAL, 0, 1, call))
            steps.append((RETURN, 0, 0, REFUSE))
    steps.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program) == 0, os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execv(sys.argv[2], sys.argv[2:])
