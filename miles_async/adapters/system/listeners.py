"""Keeps the listening sockets of a process away from other networks.

Mooncake and torch's TCPStore accept connections at all addresses of the machine, and neither can be bound to one
address (Mooncake 0.3.13 reads `MC_TCP_BIND_ADDRESS` for the address that it announces only). The kernel can drop the
packets of such a socket that were sent to other addresses: a classic BPF filter, which needs no privileges.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the name of the network interface that Gloo and NCCL listen on."""

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER, _DESTINATION = 0xFFF00000, 0xFFF00010
"""Offsets of the IPv4 header of a packet and of its destination address (`SKF_NET_OFF`)."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_DROP, _ACCEPT = 0, 0xFFFFFFFF


def local_address(host: str) -> str:
    """Return this machine's address on the network that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a UDP connect chooses a route and sends nothing
        address: str = probe.getsockname()[0]
        return address


def interface_variables(address: str) -> dict[str, str]:
    """Return the environment variables that let Gloo and NCCL listen only on the interface with this address.

    Variables that the user has set are left out.
    """
    unset = [name for name in INTERFACE_VARIABLES if name not in os.environ]
    wanted = LOOPBACK if address.startswith("127.") else address
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == wanted for entry in addresses):
            return dict.fromkeys(unset, interface)
    return {}


@contextmanager
def confined_listeners(address: str) -> Iterator[None]:
    """Confine the sockets that start to listen at all addresses inside this block to `address` and 127.0.0.1.

    Older sockets of the process stay as they are, such as the port where other Ray processes reach an actor. `address`
    is an IPv4 address; with an IPv6 address nothing changes.
    """
    older = {connection.laddr for connection in _open_listeners()}
    yield
    if ":" in address:
        return
    program = _program(sorted({struct.unpack("!I", socket.inet_aton(name))[0] for name in (address, LOOPBACK)}))
    for connection in _open_listeners():
        if connection.laddr not in older:
            # Another thread may close the socket meanwhile.
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as listener:
                _attach(listener, program)


def _open_listeners() -> list[Any]:
    """The sockets of this process that listen at all addresses."""
    return [
        connection
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ("0.0.0.0", "::")
    ]


def _program(allowed: list[int]) -> list[tuple[int, int, int, int]]:
    """The filter as instructions: code, jump if true, jump if false, operand."""
    count = len(allowed)
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, count + 1, 4),  # the version: drop IPv6
        (_LOAD_WORD, 0, 0, _DESTINATION),
        *((_JUMP_IF_EQUAL, count - index, 0, address) for index, address in enumerate(allowed)),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _ACCEPT),
    ]


def _attach(listener: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    # C's `struct sock_fprog`: the number of instructions and their address.
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))
