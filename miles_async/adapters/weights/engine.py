"""Requests of the learner to an engine about its weights: blocking HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import msgspec

from miles_async.adapters.sglang.engine_weights import (
    ADAPTER_SUM,
    CHECKSUMS,
    PLACEMENTS,
    RECEIVED,
    REGIONS,
    WATCH,
    RankLayout,
    Shape,
)
from miles_async.adapters.sglang.server_key import authorization
from miles_async.adapters.weights.layout import TensorDescription
from miles_async.errors import EngineLostError

if TYPE_CHECKING:
    from miles_async.adapters.sglang.launch import EngineInfo

FIRST_REQUEST_SECONDS = 600.0
"""Time for an engine to answer its first request, for which it may compile kernels."""
TOKENS = tuple(range(33, 65))
"""Tokens for which engines and learner are compared: printable characters or bytes in most vocabularies."""

Window = tuple[str, int, int]
"""A range of bytes in a parameter: parameter name, first byte, number of bytes."""


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of one parameter of an engine rank."""

    address: int
    shape: Shape
    dtype: str
    """Torch's name of the dtype, such as `bfloat16`."""
    device: str
    """Torch's name of the device in the engine's process: `cpu`, or for example `cuda:0`."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The parameters of one tensor-parallel rank, and the process that holds them."""

    pid: int
    machine: str
    """Identifies the machine and its process numbers, see `engine_weights.machine_id`."""
    regions: Mapping[str, Region]

    @property
    def device(self) -> str:
        """See `Region.device`."""
        return next(iter(self.regions.values())).device

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: region.shape for name, region in self.regions.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: region.dtype for name, region in self.regions.items()}


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """An engine and the memory of its tensor-parallel ranks."""

    info: EngineInfo
    ranks: tuple[RankMemory, ...]

    @property
    def name(self) -> str:
        return self.info.name


def read_engine_memory(info: EngineInfo, *, timeout: float) -> EngineMemory:
    """Ask an engine for the addresses, shapes and dtypes of its parameters.

    Raises EngineLostError if the engine does not answer or runs without the plugin of this project.
    """
    ranks = [
        RankMemory(
            json.loads(answer["pid"]),
            json.loads(answer["machine"]),
            msgspec.json.decode(answer["parameters"], type=dict[str, Region]),
        )
        for answer in _ask_all_ranks(info, REGIONS, timeout=timeout)
    ]
    return EngineMemory(info, tuple(ranks))


def read_layouts(engine: EngineMemory, tensors: Sequence[TensorDescription], *, timeout: float) -> list[RankLayout]:
    """Let each rank of an engine find out where SGLang's loader puts the elements of the tensors."""
    action = PLACEMENTS + json.dumps([(name, shape) for name, shape, _ in tensors])
    answers = _ask_all_ranks(engine.info, action, timeout=timeout)
    return [msgspec.json.decode(answer["layout"], type=RankLayout) for answer in answers]


def watch_loader(engine: EngineMemory, *, whole: bool, timeout: float) -> None:
    """Let an engine keep the checksums of the tensors that SGLang's loader receives; see `read_received`."""
    _ask_all_ranks(engine.info, WATCH + json.dumps(whole), timeout=timeout)


def read_received(engine: EngineMemory, names: Sequence[str], *, timeout: float) -> list[dict[str, int | None]]:
    """Return the checksums of tensors that the loader of each rank received since the last call, None for missing."""
    answers = _ask_all_ranks(engine.info, RECEIVED + json.dumps(names), timeout=timeout)
    return [json.loads(answer["received"]) for answer in answers]


def read_checksums(engine: EngineMemory, windows: Sequence[Sequence[Window]], *, timeout: float) -> list[list[int]]:
    """Return the CRC-32 of each window, computed by the engine. `windows` and the result have one list per rank."""
    answers = _ask_all_ranks(engine.info, CHECKSUMS + json.dumps(windows), timeout=timeout)
    return [json.loads(answer["checksums"]) for answer in answers]


def verify_checksums(
    engine: EngineMemory,
    windows: Sequence[Sequence[Window]],
    expected: Sequence[Sequence[int]],
    *,
    complaint: str,
    timeout: float,
) -> None:
    """Compare the CRC-32 of each window with the expected one. `windows` and `expected` have one list per rank.

    Raises EngineLostError with the first parameter that differs, its rank and the `complaint`.
    """
    found = read_checksums(engine, windows, timeout=timeout)
    for rank, columns in enumerate(zip(windows, expected, found, strict=True)):
        for (parameter, _, _), wanted, actual in zip(*columns, strict=True):
            if wanted != actual:
                raise EngineLostError(f"{parameter} of rank {rank} {complaint}")


def read_adapter_checksums(info: EngineInfo, name: str, *, timeout: float) -> list[int]:
    """Return the checksum of an adapter on each rank; see `models.lora.adapter_checksum`."""
    answers = _ask_all_ranks(info, ADAPTER_SUM + name, timeout=timeout)
    return [json.loads(answer["adapter"]) for answer in answers]


def compare_logprobs(
    info: EngineInfo, logprobs: Sequence[float], *, adapter: str | None = None, timeout: float
) -> float:
    """Return the mean difference in nats between an engine's log-probabilities of `TOKENS` and `logprobs`.

    Raises EngineLostError if the engine does not answer.
    """
    found = read_logprobs(info, TOKENS, adapter=adapter, timeout=max(timeout, FIRST_REQUEST_SECONDS))
    return sum(abs(ours - theirs) for ours, theirs in zip(logprobs, found, strict=True)) / len(found)


def read_logprobs(
    info: EngineInfo, tokens: Sequence[int], *, adapter: str | None = None, timeout: float
) -> list[float]:
    """Let an engine compute the log-probabilities of all tokens but the first, in nats."""
    body = {
        "input_ids": tokens,
        "lora_path": adapter,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = call_engine(info, "/generate", body, timeout=timeout)
    return [logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]]


def _ask_all_ranks(info: EngineInfo, action: str, *, timeout: float) -> list[dict[str, str]]:
    answer = call_engine(info, "/weights_checker", {"action": action}, timeout=timeout)
    # With data-parallel attention, each of its groups answers for all ranks.
    return [rank["checksums"] for rank in answer["ranks"][: info.tp]]


def call_engine(
    engine: EngineInfo, path: str, body: Mapping[str, Any] | None = None, *, timeout: float
) -> dict[str, Any]:
    """POST `body` as JSON, or GET if there is no body; return the decoded answer.

    Raises EngineLostError if the engine does not answer within `timeout` seconds or answers with an error.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **authorization(engine.key)}
    request = urllib.request.Request(engine.url + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            decoded: dict[str, Any] = json.load(answer)
            return decoded
    except urllib.error.HTTPError as error:
        text = " ".join(error.read(300).decode(errors="replace").split())
        raise EngineLostError(f"{engine.url}{path} answered {error.code}: {text}") from error
    except TimeoutError as error:
        raise EngineLostError(f"{engine.url}{path} did not answer within {timeout:g} s") from error
    except (OSError, HTTPException, json.JSONDecodeError) as error:
        # JSONDecodeError: an engine that dies while it answers leaves half of the JSON.
        raise EngineLostError(f"{engine.url}{path}: {error}") from error
