"""`/v1/chat/completions` in front of the engines, on loopback: any agent that speaks it can be trained.

    async with args.agents.session(sample, sampling_params) as base_url:
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none")

Each session is one conversation and one sample; its address names it, so that an agent needs no header and may be
another process. `stream` is understood: the answer then comes in one piece.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import orjson
from aiohttp import web

from miles_async.adapters.agents.conversation import Completion, Conversation, InvalidRequestError, SessionClosedError
from miles_async.adapters.agents.trajectories import BufferFullError, TrajectoryBuffer
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.errors import TrajectoryError, UserError
from miles_async.types import Sample

MODEL = "policy"
"""The name that the model being trained goes by; requests may name any."""
MOST_VISITS = 8192
"""Sessions of external generators open at once; with one more, the oldest is closed."""
LARGEST_REQUEST_BYTES = 64 * 2**20


class AgentEndpoint:
    def __init__(self, trajectories: TrajectoryBuffer) -> None:
        """`trajectories` takes what external generators post."""
        self._trajectories = trajectories
        self._visitors: tuple[MultiTurnSampler, Mapping[str, Any], Callable[[], bool]] | None = None
        self._visits: dict[str, None] = {}
        """Sessions that external generators opened, the oldest first."""
        self._conversations: dict[str, tuple[Conversation, set[asyncio.Task[Completion]]]] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, port: int = 0) -> None:
        """Listen on `port` of 127.0.0.1, on a free one if it is 0; `url` then says where.

        Raises UserError where somebody else listens there.
        """
        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_post("/sessions", self._open)
        app.router.add_post("/trajectories", self._trajectory)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", port).start()
        except OSError as error:
            raise UserError(f"agent_port {port} cannot be had: {error.strerror}; set another, or 0 for any") from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def session(
        self, sample: Sample, turns: MultiTurnSampler, sampling_params: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """The base url of a new conversation that becomes `sample`.

        At the end, requests still under way are ended: nothing writes into the sample afterwards. Raises what broke
        the conversation (TrajectoryError, EngineLostError), which says more than what the agent made of it, and
        TrajectoryError where the agent asked for nothing.
        """
        name, conversation = self._begin(sample, turns, sampling_params)
        try:
            yield self._base_url(name)
        except Exception:
            if conversation.failure is None:
                raise
        finally:
            _, tasks = self._conversations.pop(name)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if conversation.failure is not None:
            raise conversation.failure
        if not sample.response_length:
            raise TrajectoryError(f"sample {sample.index}: its agent asked the model for nothing")

    def accept_external(
        self, turns: MultiTurnSampler, sampling_params: Mapping[str, Any], *, live: Callable[[], bool]
    ) -> None:
        """Let external generators open sessions, which draw from these turns, as soon as the run's weights are `live`.

        Before that an engine that served another run would still answer for that run's versions.
        """
        self._visitors = turns, sampling_params, live

    def _begin(self, sample: Sample, turns: MultiTurnSampler, params: Mapping[str, Any]) -> tuple[str, Conversation]:
        name, conversation = uuid.uuid4().hex, Conversation(sample, turns, params)
        self._conversations[name] = conversation, set()
        return name, conversation

    def _base_url(self, session: str) -> str:
        return f"{self.url}/sessions/{session}/v1"

    async def _open(self, http: web.Request) -> web.Response:
        if self._visitors is None:
            return _error(409, "this run has no external generator: set rollout_function_path to external_rollout")
        turns, params, live = self._visitors
        if not live():
            return _error(503, "the run's weights are not live yet: ask again in a moment")
        name, _ = self._begin(Sample(), turns, params)
        self._visits[name] = None
        if len(self._visits) > MOST_VISITS:
            # Of a generator that died, perhaps; one that lives keeps to a few.
            self._claim(next(iter(self._visits)))
        return _json(200, {"session": name, "base_url": self._base_url(name)})

    async def _trajectory(self, http: web.Request) -> web.Response:
        try:
            posted = msgspec.json.decode(await http.read(), type=dict[str, Any]).get("samples")
            self._finished(posted)
            return _json(200, {"group": self._trajectories.add(posted, self._claim)})
        except (InvalidRequestError, msgspec.DecodeError) as error:
            return _error(400, str(error))
        except BufferFullError as full:
            return _error(429, str(full))

    def _finished(self, posted: Any) -> None:
        """Raises Refused where a posted sample's session is unknown, busy, broken or empty."""
        names = [entry["session"] for entry in posted or () if isinstance(entry, dict) and "session" in entry]
        if len(set(names)) < len(names):
            raise InvalidRequestError("a session is posted twice: each sample has its own")
        for name in names:
            if name not in self._visits:
                raise InvalidRequestError(
                    f"session {name!r} is unknown, was posted already, or was closed after {MOST_VISITS} others"
                )
            conversation, tasks = self._conversations[name]
            if tasks or conversation.failure is not None or not conversation.sample.response_length:
                cause = conversation.failure or ("a request is under way" if tasks else "nothing was sampled in it")
                raise InvalidRequestError(f"session {name!r} cannot be trained: {cause}")

    def _claim(self, session: str) -> Sample:
        del self._visits[session]
        conversation, tasks = self._conversations.pop(session)
        for task in tasks:
            task.cancel()
        return conversation.sample

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        held = self._conversations.get(http.match_info["session"])
        if held is None:
            return _error(404, "this session has ended, or never was: open one for each sample")
        conversation, tasks = held
        try:
            request = msgspec.json.decode(await http.read(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _error(400, f"the request is no JSON object: {error}")
        task = asyncio.ensure_future(conversation.complete(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            # An agent that disconnects does not end the turn: it may come back and ask again.
            completion = await asyncio.shield(task)
        except InvalidRequestError as refusal:
            return _error(400, str(refusal))
        except SessionClosedError as gone:
            return _error(410, str(gone))
        except asyncio.CancelledError:
            if task.cancelled():
                return _error(410, "the session was closed")
            raise
        return await _streamed(http, completion) if request.get("stream") else _json(200, _body(completion))

    async def _models(self, http: web.Request) -> web.Response:
        return _json(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": ""}]})


class Agents:
    """The endpoint as generate functions see it, `args.agents`: its sessions draw from one engine's turns."""

    def __init__(self, endpoint: AgentEndpoint, turns: MultiTurnSampler) -> None:
        self._endpoint = endpoint
        self._turns = turns

    def session(self, sample: Sample, sampling_params: Mapping[str, Any]) -> AbstractAsyncContextManager[str]:
        """`async with` gives the base url for an OpenAI client; the conversation becomes `sample`."""
        return self._endpoint.session(sample, self._turns, sampling_params)


def _body(completion: Completion) -> dict[str, Any]:
    said: list[dict[str, Any]] = [
        {"token": str(token), "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(completion.tokens, completion.log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": completion.message,
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": said},
    }
    before, new = completion.context, len(completion.tokens)
    usage = {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}
    return {**_head("chat.completion"), "choices": [choice], "usage": usage}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


async def _streamed(http: web.Request, completion: Completion) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(http)
    head, message = _head("chat.completion.chunk"), dict(completion.message)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    for delta, reason in ((message, None), ({}, completion.finish_reason)):
        chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def _json(status: int, body: Any) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})
