"""Which way the weights take. `auto` is the fastest that works here, found out by trying."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.broadcast import BroadcastWriter
from miles_async.adapters.weights.disk import DiskWriter
from miles_async.adapters.weights.p2p import P2PWriter
from miles_async.adapters.weights.writer import NamedTensors, WeightWriter
from miles_async.errors import EngineLost, Fatal, UserError

Export = Callable[[], NamedTensors]
"""The learner's present weights, anew at each call."""

_log = structlog.get_logger(__name__)


def choose_writer(wanted: str, engines: Sequence[EngineInfo], export: Export, folder: Path) -> WeightWriter:
    """A writer that is connected to `engines` and has written the present weights to each of them as version 0.

    `wanted` is `auto`, `p2p`, `broadcast` or `disk`; `folder` is where `disk` keeps its files. The engines must
    be idle.
    Raises UserError when a way that was asked for by name does not work, with what to do about it.
    """
    ways: dict[str, Callable[[], WeightWriter]] = {
        "p2p": P2PWriter,
        "broadcast": BroadcastWriter,
        "disk": lambda: DiskWriter(folder),
    }
    if wanted != "auto":
        try:
            return _proven(ways[wanted], engines, export)
        except (ImportError, EngineLost, Fatal) as failure:
            raise UserError(f"weight_transfer {wanted} does not work here: {_advice(failure)}") from failure
    for way, make in ways.items():
        try:
            return _proven(make, engines, export)
        except (ImportError, EngineLost, Fatal) as failure:
            _log.warning(f"weights cannot travel by {way}, trying the next way: {_advice(failure)}")
    raise Fatal("no way to move weights to the engines works; the warnings above say why each one failed")


def _proven(make: Callable[[], WeightWriter], engines: Sequence[EngineInfo], export: Export) -> WeightWriter:
    writer = make()
    try:
        writer.connect(engines)
        writer.stage(0, export())
        for engine in engines:
            outcome = writer.write(0, engine.name)
            if outcome.error is not None:
                raise EngineLost(outcome.error)
    except (EngineLost, Fatal):
        writer.close()
        raise
    return writer


def _advice(failure: Exception) -> str:
    if isinstance(failure, ImportError):
        if "libibverbs" in str(failure):
            return "Mooncake needs libibverbs; install it with: apt-get install libibverbs1"
        return f"Mooncake could not be loaded ({failure}); install mooncake-transfer-engine-non-cuda"
    return str(failure)
