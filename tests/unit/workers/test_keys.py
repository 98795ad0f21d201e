"""Engines, router and agent endpoint answer only clients with the key, and the key is shown nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from miles_async.adapters.agents.endpoint import AgentEndpoint
from miles_async.adapters.agents.trajectories import TrajectoryBuffer
from miles_async.adapters.sglang import launch, lockdown, router
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo, Rendezvous
from miles_async.adapters.weights.engine import read_engine_memory
from miles_async.config.redaction import REDACTED, redacted_values
from miles_async.errors import EngineLostError, UserError
from tests.configuration import run_config
from tests.sim.world import DirectJournal, Trace
from tests.waiting import PATIENCE_SECONDS
from workers.specs import ClusterHandles, engine_spec, external_router_key, router_spec

KEY = "key-of-the-run"
Request = tuple[str, str | None, Any]
"""Method and path, the Authorization header, and the decoded body."""


@asynccontextmanager
async def server(answer: Any, status: int = 200) -> AsyncIterator[tuple[str, list[Request]]]:
    """A server that records all requests, and its URL."""
    requests: list[Request] = []

    async def respond(request: web.Request) -> web.Response:
        header = request.headers.get("Authorization")
        requests.append(
            (f"{request.method} {request.path}", header, await request.json() if request.can_read_body else None)
        )
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", requests
    finally:
        await runner.cleanup()


async def test_the_fleet_sends_each_server_its_key_and_gives_the_router_the_keys_of_the_engines() -> None:
    workers = {"workers": [], "weight_version": "1"}
    async with server(workers) as (router_url, at_router), server(workers) as (engine_url, at_engine):
        fleet = SGLangFleet(router_url, router_key="key-of-the-router", timeout=0.1)
        fleet.register_engine(EngineInfo("e", engine_url, 0, 1, KEY))
        await fleet.commit("e", 1)
        with pytest.raises(EngineLostError, match="did not take engine e"):
            await fleet.admit("e")
        await fleet.close()
    assert ("POST /workers", "Bearer key-of-the-router", {"url": engine_url, "api_key": KEY}) in at_router
    assert {header for _, header, _ in at_router} == {"Bearer key-of-the-router"}
    assert {header for _, header, _ in at_engine} == {f"Bearer {KEY}"}


async def test_requests_about_weights_carry_the_key() -> None:
    async with server({"ranks": []}) as (url, requests):
        info = EngineInfo("e", url, 0, 1, KEY)
        await asyncio.to_thread(read_engine_memory, info, timeout=PATIENCE_SECONDS)
    assert [header for _, header, _ in requests] == [f"Bearer {KEY}"]


def test_the_key_is_in_no_command_environment_or_text_of_a_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "max_position_embeddings": 8}'
    )
    spec = engine_spec(run_config(), "e", str(tmp_path), tmp_path, key=KEY)
    routing = router_spec(run_config(), tmp_path, KEY)
    assert (spec.key, routing.key) == (KEY, KEY)
    handles: dict[str, Any] = dict.fromkeys(ClusterHandles.__dataclass_fields__) | {"router_key": KEY}
    shown = [
        launch.command(spec, 1, Rendezvous("127.0.0.1", 2, 3)),
        launch.environment(spec),
        router.arguments(routing, 1, 2),
        (spec, routing, EngineInfo("e", "http://e", 1, 1, KEY), ClusterHandles(**handles)),
    ]
    assert KEY not in repr(shown)


def test_engines_and_routers_without_a_given_key_get_random_ones(tmp_path: Path) -> None:
    specs = [router_spec(run_config(), tmp_path) for _ in range(2)]
    engines = [engine_spec(run_config(), "e", "checkpoint", tmp_path) for _ in range(2)]
    keys = {spec.key for spec in specs} | {spec.key for spec in engines}
    assert len(keys) == 4
    assert min(map(len, keys)) > 40


def test_sglang_shows_its_arguments_without_keys() -> None:
    shown = lockdown.hide_keys({"api_key": KEY, "admin_api_key": KEY, "port": 1})
    assert shown == {"api_key": None, "admin_api_key": None, "port": 1}


def test_the_key_of_an_external_router_comes_from_a_variable_a_file_or_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTER_KEY", "from-variable")
    (tmp_path / "key").write_text("from-file\n")
    for setting, key in (("env:ROUTER_KEY", "from-variable"), (f"file:{tmp_path}/key", "from-file"), (KEY, KEY)):
        config = run_config(sglang_router_api_key=setting)
        assert external_router_key(config) == key
        shown = redacted_values(config)["engine"]["sglang_router_api_key"]
        assert shown == (REDACTED if setting == KEY else setting)
    assert external_router_key(run_config()) == ""


@pytest.mark.parametrize(
    "setting, advice", [("env:NOT_SET", "set the environment variable NOT_SET"), ("file:/no/file", "cannot be read")]
)
def test_a_missing_source_of_the_key_is_refused(setting: str, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        external_router_key(run_config(sglang_router_api_key=setting))


async def test_a_router_that_refuses_the_key_is_reported_with_the_setting() -> None:
    async with server({}, status=401) as (url, requests):
        with pytest.raises(UserError, match="set sglang_router_api_key to the api_key"):
            await asyncio.to_thread(router.require_router, url, KEY)
    assert requests == [("GET /workers", f"Bearer {KEY}", None)]


@asynccontextmanager
async def agent_endpoint(
    trajectories: TrajectoryBuffer | None,
) -> AsyncIterator[tuple[AgentEndpoint, Callable[..., Any]]]:
    """The endpoint, and a function that posts to one of its paths and returns the status and the text."""
    endpoint = AgentEndpoint(trajectories)
    await endpoint.start()
    try:
        async with aiohttp.ClientSession() as http:

            async def post(path: str, **headers: str) -> tuple[int, str]:
                async with http.post(endpoint.url + path, json={}, headers=headers) as response:
                    return response.status, await response.text()

            yield endpoint, post
    finally:
        await endpoint.close()


@pytest.mark.parametrize("path", ["/trajectories", "/sessions", "/sessions/x/v1/chat/completions"])
async def test_the_agent_endpoint_refuses_clients_without_the_key(path: str) -> None:
    async with agent_endpoint(TrajectoryBuffer(1, 1, log=DirectJournal(Trace()))) as (endpoint, post):
        assert (await post(path))[0] == 401
        assert (await post(path, Authorization="Bearer guess"))[0] == 401
        assert (await post(path, Authorization=f"Bearer {endpoint.key}"))[0] in (400, 404, 503)


@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
async def test_the_agent_endpoint_refuses_web_pages_even_with_the_key(header: dict[str, str]) -> None:
    async with agent_endpoint(TrajectoryBuffer(1, 1, log=DirectJournal(Trace()))) as (endpoint, post):
        status, text = await post("/trajectories", Authorization=f"Bearer {endpoint.key}", **header)
        assert (status, "refused: " in text) == (403, True)


async def test_trajectories_are_accepted_only_in_a_run_with_an_external_generator() -> None:
    async with agent_endpoint(None) as (endpoint, post):
        for path in ("/trajectories", "/sessions"):
            status, text = await post(path, Authorization=f"Bearer {endpoint.key}")
            assert (status, "set rollout_function_path to" in text) == (404, True)
