"""Snapshots of what follows from the events of a run. A driver that continues the run starts from the newest one, and
reads only the later events.

    snapshot.bin      written each time that the event log has been rotated

A snapshot is a shortcut: without it, the same follows from all events. It is ignored if it is damaged, or if other code
wrote it. It is a pickle, and a run folder may come from somebody else, so only the classes below are loaded from it
(https://docs.python.org/3/library/pickle.html#restricting-globals).
"""

from __future__ import annotations

import pickle
from functools import cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from miles_async import events
from miles_async.atomic_files import write_atomically
from miles_async.observability.diagnosis.collapse import CollapseDetector
from miles_async.observability.view import RunView

if TYPE_CHECKING:
    from miles_async.observability.metrics.recorder import Totals, Values
    from miles_async.observability.trace.perfetto import WrittenTrace

MAX_BYTES = 256 << 20
"""A larger file is not a snapshot. A snapshot has a few megabytes."""

_OWN = (
    "miles_async.events",
    "miles_async.observability.diagnosis.",
    "miles_async.observability.snapshot",
    "miles_async.observability.state.",
    "miles_async.observability.trace.perfetto",
    "miles_async.observability.view",
    "miles_async.scheduling.",
    "miles_async.types",
)
"""The modules whose classes a snapshot holds."""
_OTHERS = {
    ("builtins", "int"),
    ("builtins", "float"),
    ("builtins", "set"),
    ("collections", "Counter"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("msgspec._utils", "rebuild"),
}

log = structlog.get_logger(__name__)


class Snapshot(NamedTuple):
    """Everything that is known of a run after the first parts of its event log."""

    parts: int
    """Number of these parts."""
    view: RunView
    metrics: tuple[Values, Totals] | None
    """None before the first event."""
    collapse: CollapseDetector
    trace: WrittenTrace | None
    """None if no trace is written."""


def nothing_known() -> Snapshot:
    """Return what is known before the first event."""
    return Snapshot(0, RunView(), None, CollapseDetector(), None)


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot of a run. Raises OSError if the file cannot be written."""
    with snapshot.view.lock:
        data = pickle.dumps(snapshot, pickle.HIGHEST_PROTOCOL)
    write_atomically(path, _code() + data)


def read_snapshot(path: Path) -> Snapshot | None:
    """Return the snapshot of a run; None if there is none, or if it cannot be used."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise pickle.UnpicklingError(f"it has more than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
        if not data.startswith(_code()):
            return None
        snapshot = _Unpickler(BytesIO(data[len(_code()) :])).load()
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever damaged bytes cause
        log.warning(
            "the snapshot of the run cannot be read; its whole event log is read instead, which may take minutes",
            file=str(path),
            error=str(error),
        )
        return None
    return snapshot if isinstance(snapshot, Snapshot) else None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module.startswith(_OWN):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


@cache
def _code() -> bytes:
    """Identify the code whose objects a snapshot holds: another version may keep other values."""
    package = Path(events.__file__).parent
    files = [package / "events.py", *sorted((package / "observability").rglob("*.py"))]
    return sha256(b"".join(file.read_bytes() for file in files)).digest()
