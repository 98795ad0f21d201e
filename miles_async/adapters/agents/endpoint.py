"""An OpenAI-compatible endpoint (`/v1/chat/completions`) in front of the engines, so that any agent can be trained.

    async with args.agents.session(sample, sampling_params) as base_url:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=args.agents.api_key)

Each session produces one trajectory, of one or more segments. The session name is part of the URL, so an agent needs no
extra header and may run in another process. Requests with `stream` are accepted; the whole answer is then sent as one
chunk.

The endpoint listens on 127.0.0.1 only, and refuses requests without its key. The key opens nothing but this endpoint:
an agent may run code that the model wrote, and must not reach the weights of the engines.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import orjson
from aiohttp import web

from miles_async.adapters.agents.conversation import Completion, Conversation, InvalidRequestError, SessionClosedError
from miles_async.adapters.agents.trajectories import BufferFullError, NotStoredError, TrajectoryBuffer
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.server_key import new_key
from miles_async.errors import TrajectoryError, UserError
from miles_async.local_requests import foreign_request
from miles_async.types import Sample

MODEL = "policy"
"""Name of the trained model in answers; requests may use any model name."""
MAX_EXTERNAL_SESSIONS = 8192
"""Limit for the open sessions of external generators; the oldest session is closed when it is exceeded."""
MAX_REQUEST_BYTES = 64 * 2**20


class AgentEndpoint:
    def __init__(self, trajectories: TrajectoryBuffer | None = None) -> None:
        """`trajectories` receives the groups that external generators post; without it, they are refused."""
        self.key = new_key()
        """API key that every request has to carry."""
        self._trajectories = trajectories
        self._external: tuple[MultiTurnSampler, Mapping[str, Any], Callable[[], bool]] | None = None
        self._external_sessions: dict[str, None] = {}
        """Names of the sessions that external generators opened, the oldest first (a dict keeps insertion order)."""
        self._conversations: dict[str, tuple[Conversation, set[asyncio.Task[Completion]]]] = {}
        """Open sessions by name: the conversation, and its requests in progress."""
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, port: int = 0) -> None:
        """Listen on `port` of 127.0.0.1, or on any free port if `port` is 0, and set `url`.

        Raises UserError if the port is in use.
        """
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._admit])
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._complete_chat)
        app.router.add_get("/sessions/{session}/v1/models", self._list_models)
        app.router.add_post("/sessions", self._open_session if self._trajectories else _refuse_external)
        app.router.add_post("/trajectories", self._post_trajectory if self._trajectories else _refuse_external)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", port).start()
        except OSError as error:
            raise UserError(
                f"agent_port {port} is not available ({error.strerror}): set --agent-port to a free port, or to 0"
            ) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def session(
        self, sample: Sample, sampler: MultiTurnSampler, sampling_params: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """Open a conversation that fills `sample`, and yield its base URL for an OpenAI client.

        When the block ends, requests in progress are cancelled, so nothing changes the sample afterwards. Raises the
        error that ended the conversation (TrajectoryError or EngineLostError), and TrajectoryError if the agent sent no
        request.
        """
        name, conversation = self._begin(sample, sampler, sampling_params)
        try:
            yield self._base_url(name)
        except Exception:
            # The client of the agent turned the failure into an HTTP error. The original error, raised below, says
            # more.
            if conversation.failure is None:
                raise
        finally:
            _, tasks = self._conversations.pop(name)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if conversation.failure is not None:
            raise conversation.failure
        if not conversation.segments:
            raise TrajectoryError(f"sample {sample.index}: the agent sent no request to the model")

    def accept_external(
        self, sampler: MultiTurnSampler, sampling_params: Mapping[str, Any], *, live: Callable[[], bool]
    ) -> None:
        """Let external generators open sessions as soon as `live()` returns true (the engines hold this run's weights).

        Before that, an engine that served another run would answer with the weight versions of that run.
        """
        self._external = sampler, sampling_params, live

    def _begin(self, sample: Sample, sampler: MultiTurnSampler, params: Mapping[str, Any]) -> tuple[str, Conversation]:
        name, conversation = uuid.uuid4().hex, Conversation(sample, sampler, params)
        self._conversations[name] = conversation, set()
        return name, conversation

    def _base_url(self, session: str) -> str:
        return f"{self.url}/sessions/{session}/v1"

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests from web pages, and requests without the key."""
        if (reason := foreign_request(request.headers.get("Host"), request.headers.get("Origin"))) is not None:
            return _error(403, reason)
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(sent.encode(), self.key.encode()):
            return _error(
                401, "the API key is missing or wrong: use args.agents.api_key or agent_key of the run folder"
            )
        return await handler(request)

    async def _open_session(self, http: web.Request) -> web.Response:
        if self._external is None or not self._external[2]():
            return _weights_are_missing()
        sampler, params, _ = self._external
        name, _ = self._begin(Sample(), sampler, params)
        self._external_sessions[name] = None
        if len(self._external_sessions) > MAX_EXTERNAL_SESSIONS:
            # The oldest session probably belongs to a generator that died: a live generator needs only a few.
            self._claim(next(iter(self._external_sessions)))
        return _json(200, {"session": name, "base_url": self._base_url(name)})

    async def _post_trajectory(self, http: web.Request) -> web.Response:
        assert self._trajectories is not None, "the route exists"
        if self._external is not None and not self._external[2]():
            return _weights_are_missing()
        try:
            posted = msgspec.json.decode(await http.read(), type=dict[str, Any]).get("samples")
            name = await self._trajectories.add(
                posted, self._lookup, self._claim, key=http.headers.get("Idempotency-Key")
            )
            return _json(200, {"group": name})
        except (InvalidRequestError, msgspec.DecodeError) as error:
            return _error(400, str(error))
        except BufferFullError as full:
            return _error(429, str(full))
        except NotStoredError as failure:
            return _error(503, str(failure))

    def _lookup(self, session: str) -> list[Sample]:
        """The segments of a session. Raises InvalidRequestError if the session is unknown, busy, failed or empty."""
        if session not in self._external_sessions:
            raise InvalidRequestError(
                f"session {session!r} is unknown, was posted already, or was closed because "
                f"{MAX_EXTERNAL_SESSIONS} newer sessions are open"
            )
        conversation, tasks = self._conversations[session]
        segments = conversation.segments
        if tasks or conversation.failure is not None or not segments:
            cause = conversation.failure or ("a request is in progress" if tasks else "it has no response tokens")
            raise InvalidRequestError(f"session {session!r} cannot be trained: {cause}")
        return segments

    def _claim(self, session: str) -> None:
        del self._external_sessions[session]
        conversation, tasks = self._conversations.pop(session)
        for task in tasks:
            task.cancel()
        conversation.forget()

    async def _complete_chat(self, http: web.Request) -> web.StreamResponse:
        session = self._conversations.get(http.match_info["session"])
        if session is None:
            return _error(404, "this session does not exist or has ended: open one session per sample")
        conversation, tasks = session
        try:
            request = msgspec.json.decode(await http.read(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _error(400, f"the request is not a JSON object: {error}")
        task = asyncio.ensure_future(conversation.complete(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            # The request continues if the agent disconnects: the agent may reconnect and repeat the request.
            completion = await asyncio.shield(task)
        except InvalidRequestError as error:
            return _error(400, str(error))
        except SessionClosedError as error:
            return _error(410, str(error))
        except asyncio.CancelledError:
            if task.cancelled():
                return _error(410, "the session was closed")
            raise
        return await _stream(http, completion) if request.get("stream") else _json(200, _body(completion))

    async def _list_models(self, http: web.Request) -> web.Response:
        return _json(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": ""}]})


class Agents:
    """The endpoint as generate functions see it (`args.agents`); `sampler` generates the answers of its sessions."""

    def __init__(self, endpoint: AgentEndpoint, sampler: MultiTurnSampler) -> None:
        self._endpoint = endpoint
        self._sampler = sampler

    @property
    def api_key(self) -> str:
        """API key of the endpoint, for the client of an agent."""
        return self._endpoint.key

    def session(self, sample: Sample, sampling_params: Mapping[str, Any]) -> AbstractAsyncContextManager[str]:
        """Use as `async with agents.session(...) as base_url`; the conversation fills `sample`."""
        return self._endpoint.session(sample, self._sampler, sampling_params)

    def segments(self, sample: Sample) -> list[Sample]:
        """The segments of the sample's trajectory, in the order in which they were answered last."""
        return self._sampler.segments(sample)


async def _refuse_external(http: web.Request) -> web.Response:
    return _error(
        404,
        "this run has no external generator: set rollout_function_path to "
        "miles_async.rollout.external_rollout.generate_rollout",
    )


def _weights_are_missing() -> web.Response:
    return _error(503, "the engines do not hold the weights of this run yet: try again in a moment")


def _body(completion: Completion) -> dict[str, Any]:
    # Tokens are given as the decimal text of their ID: an ID identifies a token exactly, its text may not.
    logprobs: list[dict[str, Any]] = [
        {"token": str(token), "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(completion.tokens, completion.log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": completion.message,
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": logprobs},
    }
    before, new = completion.context, len(completion.tokens)
    usage = {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}
    return {**_head("chat.completion"), "choices": [choice], "usage": usage}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


async def _stream(http: web.Request, completion: Completion) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(http)
    head, message = _head("chat.completion.chunk"), dict(completion.message)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    for delta, reason in ((message, None), ({}, completion.finish_reason)):
        chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def _json(status: int, body: Any) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})
