"""What every way of moving weights has in common. All of it runs in the learner's process and none of it is async."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLost
from miles_async.types import WriteOutcome

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and full (unsharded) tensors."""


class WeightWriter(Protocol):
    """`connect` once per set of engines, then `stage` and `write` for each version.

    The calls block. `write` spends its time in system calls and foreign code that let go of the interpreter lock, so
    run it in a thread and training goes on beside it.
    """

    @property
    def name(self) -> str:
        """`p2p`, `broadcast` or `disk`."""
        ...

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Meet these engines, and forget others. Raises EngineLost when one cannot be reached this way."""
        ...

    def stage(self, version: int, named_tensors: NamedTensors) -> None:
        """Copy the weights aside as `version`; the tensors may change as soon as this returns."""
        ...

    def write(self, version: int, engine: str) -> WriteOutcome:
        """Write the staged version to one engine and verify it. Never raises for what happens to an engine."""
        ...

    def close(self) -> None: ...


def call_engine(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
    """POST `body`, or GET without one; the decoded answer.

    Raises EngineLost when the engine does not answer within `timeout` seconds or answers with an error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            decoded: dict[str, Any] = json.load(answer)
            return decoded
    except urllib.error.HTTPError as error:
        text = " ".join(error.read(300).decode(errors="replace").split())
        raise EngineLost(f"{url}{path} answered {error.code}: {text}") from error
    except OSError as error:
        raise EngineLost(f"{url}{path}: {error}") from error
