"""A socket that listens at all addresses can be confined to one address of the machine."""

from __future__ import annotations

import socket

import pytest

from miles_async.adapters.system.listeners import (
    INTERFACE_VARIABLES,
    confined_listeners,
    interface_variables,
    local_address,
)

DROPPED_SECONDS = 0.2
"""A dropped packet is never answered, so a connection attempt only ends by its time limit."""


@pytest.mark.parametrize("family, everywhere", [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_a_confined_socket_accepts_connections_at_its_address_only(
    family: socket.AddressFamily, everywhere: str
) -> None:
    addresses = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    with _listening(family, everywhere) as older:
        with confined_listeners("127.0.0.2"):
            newer = _listening(family, everywhere)
        with newer:
            assert [address for address in addresses if _accepts(address, newer)] == ["127.0.0.1", "127.0.0.2"]
        assert [address for address in addresses if _accepts(address, older)] == [*addresses]


def test_collectives_use_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert interface_variables("127.0.0.2") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("203.0.113.7") == {}
    assert local_address("127.0.0.1") == "127.0.0.1"


def _listening(family: socket.AddressFamily, address: str) -> socket.socket:
    listener = socket.socket(family)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind((address, 0))
    listener.listen()
    return listener


def _accepts(address: str, listener: socket.socket) -> bool:
    try:
        socket.create_connection((address, listener.getsockname()[1]), timeout=DROPPED_SECONDS).close()
    except TimeoutError:
        return False
    return True
