"""The requests of the generator to an engine that does not answer, and their aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_async.adapters.sglang import generator as sglang_generator
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.plugin import abort_samples
from miles_async.errors import EngineLostError, TrajectoryError
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.types import Group, Sample
from tests.unit.byte_tokenizer import Bytes


async def test_the_engines_stop_working_on_a_request_that_was_cancelled() -> None:
    begun, asked, aborted = asyncio.Event(), [], asyncio.Queue[Any]()

    async def generate(http: web.Request) -> web.Response:
        asked.append(await http.json())
        begun.set()
        await asyncio.Event().wait()
        return web.Response()

    async def abort(http: web.Request) -> web.Response:
        await aborted.put(await http.json())
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/abort_request", abort)])
    async with TestServer(app, handler_cancellation=True) as engine:
        url = str(engine.make_url("")).rstrip("/")
        engines = [EngineInfo("engine", url, 0, 1)]
        generator = SGLangGenerator(
            url, Bytes(), SamplingParams(max_new_tokens=9), limit=lambda: 4, engines=lambda: engines
        )
        group = Group([Sample(tokens=[1])])
        generating = asyncio.create_task(generator.generate(group))
        await begun.wait()
        generating.cancel()
        assert await aborted.get() == {"rid": asked[0]["rid"] + "_"}
        await generator.close()
        assert generator.requests.in_flight == 0
        assert group[0].tokens == [1]


async def test_a_sample_that_has_lost_the_name_of_its_adapter_gets_no_other() -> None:
    """Generate functions may create samples, or replace their metadata."""
    adapters = AdapterVersions(1, ["math", "code"])
    generator = SGLangGenerator(
        "http://nowhere", Bytes(), SamplingParams(max_new_tokens=9), limit=lambda: 4, engines=list, adapters=adapters
    )
    with pytest.raises(TrajectoryError, match="lost the metadata that names its adapter: let the generate function"):
        await generator.generate(Group([Sample(tokens=[1])]))
    await generator.close()


class SlowToEnd:
    """An engine, as seen over HTTP: its one request ends with the `aborts`-th abort."""

    def __init__(self, aborts: int) -> None:
        self.aborts: list[Any] = []
        self.begun = asyncio.Event()
        self._needed = aborts
        self._ended = asyncio.Event()

    async def generate(self, http: web.Request) -> web.Response:
        self.rid = (await http.json())["rid"]
        self.begun.set()
        await self._ended.wait()
        meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "weight_version": "0"}
        return web.json_response([{"output_ids": [], "text": "", "meta_info": meta}] * 8)

    async def abort(self, http: web.Request) -> web.Response:
        self.aborts.append(await http.json())
        if len(self.aborts) == self._needed:
            self._ended.set()
        return web.json_response({})


async def aborts_of_a_group(needed: int, *others: EngineInfo) -> tuple[str, list[Any], bool]:
    """Abort a request for eight samples.

    Returns the id of the request, the aborts that its engine receives until the request ends, and whether it ends in
    time.
    """
    engine = SlowToEnd(needed)
    app = web.Application()
    app.add_routes([web.post("/generate", engine.generate), web.post("/abort_request", engine.abort)])
    async with TestServer(app, handler_cancellation=True) as server:
        url = str(server.make_url("")).rstrip("/")
        generator = SGLangGenerator(
            url,
            Bytes(),
            SamplingParams(max_new_tokens=9),
            limit=lambda: 8,
            engines=lambda: [EngineInfo("engine", url, 0, 1), *others],
        )
        group, in_time = Group([Sample(tokens=[1]) for _ in range(8)]), False
        generating = asyncio.create_task(generator.generate(group))
        await engine.begun.wait()
        with suppress(EngineLostError):
            await generator.abort(group)
            in_time = True
        generating.cancel()
        with suppress(asyncio.CancelledError):
            await generating
        aborts = list(engine.aborts)
        await generator.close()
    return engine.rid, aborts, in_time


async def test_one_abort_per_engine_ends_all_samples_of_a_group() -> None:
    rid, aborts, _ = await aborts_of_a_group(needed=1)
    assert aborts == [{"rid": f"{rid}_"}]


async def test_an_engine_that_hangs_does_not_delay_the_abort_of_a_group_at_another_engine() -> None:
    continued = asyncio.Event()

    async def hang(http: web.Request) -> web.Response:
        await continued.wait()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/abort_request", hang)])
    async with TestServer(app) as hung:
        _, _, in_time = await aborts_of_a_group(1, EngineInfo("hung", str(hung.make_url("")).rstrip("/"), 0, 1))
        continued.set()
    assert in_time


async def test_an_abort_is_repeated_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_generator, "ABORT_TIMEOUT_SECONDS", 1.0)
    _, aborts, _ = await aborts_of_a_group(needed=1000)
    assert 2 <= len(aborts) <= 7


def test_an_engine_aborts_the_samples_of_the_request_and_no_others() -> None:
    class TokenizerManager:
        rid_to_state: Mapping[str, object] = dict.fromkeys(["a-1_0", "a-1_1", "a-10_0", "a-2_0"])

    def abort(manager: TokenizerManager, rid: str, abort_all: bool) -> None:
        aborted.append((rid, abort_all))

    aborted: list[tuple[str, bool]] = []
    abort_samples(abort, TokenizerManager(), rid="a-1_")
    assert aborted == [("a-1_0", False), ("a-1_1", False)]
    aborted.clear()
    for rid, everything in (("a-3_", False), ("a-2_0", False), ("", True)):
        abort_samples(abort, TokenizerManager(), rid=rid, abort_all=everything)
    assert aborted == [("a-3_", False), ("a-2_0", False), ("", True)]


@pytest.mark.parametrize(
    "seed, indices, requested",
    [(None, (7, 8, 9), [None]), (40, (7, 8, 9), [47, 48, 49]), (40, (None, None, None), [40, 41, 42])],
)
async def test_each_sample_has_a_seed_of_its_own_at_engines_that_sample_with_a_seed_per_request(
    seed: int | None, indices: tuple[int | None, ...], requested: list[int | None]
) -> None:
    """SGLang gives requests without a seed the same one, and the samples of a group would be equal."""
    seeds: list[int | None] = []

    async def generate(http: web.Request) -> web.Response:
        asked = await http.json()
        seeds.append(asked["sampling_params"].get("sampling_seed"))
        spans = [{"version": "0", "start": 0, "end": 1}]
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None]], "weight_versions": spans}
        return web.json_response([{"output_ids": [5], "text": "x", "meta_info": meta}] * len(asked["input_ids"]))

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        sampling = SamplingParams(max_new_tokens=9)
        generator = SGLangGenerator(url, Bytes(), sampling, limit=lambda: 4, engines=list, seed=seed)
        group = Group([Sample(index=index, tokens=[1]) for index in indices])
        await generator.generate(group)
        await generator.close()
    assert sorted(seeds, key=str) == requested
    assert all(sample.tokens == [1, 5] for sample in group)
