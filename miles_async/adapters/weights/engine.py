"""What the learner's side asks an engine about its weights, over HTTP. None of it is async."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from miles_async.adapters.sglang.engine_weights import REGIONS, SUMS
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.layout import Shape
from miles_async.errors import EngineLostError

Window = tuple[str, int, int]
"""Parameter, first byte, bytes."""


@dataclass(frozen=True, slots=True)
class Region:
    """One parameter of an engine rank."""

    address: int
    shape: Shape
    dtype: str
    """Torch's name for it, such as `bfloat16`."""
    device: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The parameters of one tensor-parallel rank, and the process that holds them."""

    pid: int
    machine: str
    regions: Mapping[str, Region]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: region.shape for name, region in self.regions.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: region.dtype for name, region in self.regions.items()}


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and the memory of its ranks."""

    info: EngineInfo
    ranks: tuple[Memory, ...]

    @property
    def name(self) -> str:
        return self.info.name


def meet(info: EngineInfo, *, timeout: float) -> Engine:
    """Ask an engine where its weights lie. Raises EngineLostError when it does not answer, or has no plugin of ours."""
    told = _ask(info, REGIONS, timeout=timeout)
    ranks = []
    for rank in told:
        regions = {
            name: Region(region["address"], tuple(region["shape"]), region["dtype"], region["device"])
            for name, region in json.loads(rank["parameters"]).items()
        }
        ranks.append(Memory(json.loads(rank["pid"]), json.loads(rank["machine"]), regions))
    return Engine(info, tuple(ranks))


def sums(engine: Engine, windows: Sequence[Sequence[Window]], *, timeout: float) -> list[list[int]]:
    """The CRC-32 of each window of each rank's memory."""
    told = _ask(engine.info, SUMS + json.dumps(windows), timeout=timeout)
    return [json.loads(rank["sums"]) for rank in told]


def _ask(info: EngineInfo, action: str, *, timeout: float) -> list[dict[str, str]]:
    answer = call_engine(info.url, "/weights_checker", {"action": action}, timeout=timeout)
    return [rank["checksums"] for rank in answer["ranks"]]


def address_towards(url: str) -> str:
    """This machine's address on the network that the engine at `url` is reached by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(url).hostname, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def call_engine(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
    """POST `body`, or GET without one; the decoded answer.

    Raises EngineLostError when the engine does not answer within `timeout` seconds or answers with an error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            decoded: dict[str, Any] = json.load(answer)
            return decoded
    except urllib.error.HTTPError as error:
        text = " ".join(error.read(300).decode(errors="replace").split())
        raise EngineLostError(f"{url}{path} answered {error.code}: {text}") from error
    except (OSError, HTTPException, json.JSONDecodeError) as error:
        # One that ends in the middle of its answer leaves half of it.
        raise EngineLostError(f"{url}{path}: {error}") from error
