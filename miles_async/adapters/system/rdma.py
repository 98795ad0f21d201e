"""The RDMA devices of this machine, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
"""Folder of InfiniBand and RoCE devices. The state of a port is in `DEVICE/ports/NUMBER/state`."""


def has_active_port() -> bool:
    """Return whether a port of an RDMA device is active."""
    return any("ACTIVE" in state.read_text() for state in DEVICES.glob("*/ports/*/state"))
