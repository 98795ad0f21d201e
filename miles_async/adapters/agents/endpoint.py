"""An endpoint in front of the engines that speaks the protocols of agents, so that any agent can be trained.

    async with args.agents.session(sample, sampling_params) as base_url:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=args.agents.api_key)

It serves OpenAI's chat completions and responses, and Anthropic's messages (`formats/`). One recorder behind them
(`conversation.py`) stores the sampled tokens. Each session produces one trajectory, of one or more segments. The name
of the session is part of the URL, so an agent needs no extra header and may run in another process. A streamed answer
is sent when it is complete, each text as one delta. Until then, the stream contains pings.

The endpoint listens on 127.0.0.1 only, and refuses requests without its key. The key opens nothing but this endpoint:
an agent may run code that the model wrote, and must not reach the weights of the engines. A session may be opened
without a key, for agents that send none. Its name, which is random and part of its URL, then replaces the key.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from miles_async.adapters.agents.connections import Connections
from miles_async.adapters.agents.conversation import (
    Completion,
    Conversation,
    InvalidRequestError,
    SessionClosedError,
)
from miles_async.adapters.agents.formats.format import MODEL, event
from miles_async.adapters.agents.messages import AnswerParser, Message, read_answer
from miles_async.adapters.agents.trajectories import BufferFullError, NotStoredError, TrajectoryBuffer
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler, sampled_at_end
from miles_async.adapters.sglang.server_key import new_key
from miles_async.errors import TrajectoryError, UserError
from miles_async.local_requests import foreign_request
from miles_async.parsing import decode_json
from miles_async.types import Sample
from miles_async.wire_formats import FORMATS, WireFormat

MAX_EXTERNAL_SESSIONS = 8192
"""Limit for the open sessions of external generators; the oldest session is closed when it is exceeded."""
MAX_REQUEST_BYTES = 64 * 2**20
BACKLOG = 4096
"""Connections that wait to be accepted: thousands of agents may connect at the same time."""
BODY_SECONDS = 120.0
"""Time limit for a client to send the body of a request."""
PING_SECONDS = 10.0
"""A stream begins, or contains a ping, after this time without an answer, so that no time limit of a client passes."""
_TOO_DEEP = "the request is nested too deep: store it flat, or as text"
_STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(slots=True)
class _Session:
    conversation: Conversation
    needs_key: bool = True
    """Whether its requests have to carry the key."""
    context: Context = field(default_factory=copy_context)
    """The context in which the session was opened: the time limit of its sample, and the fields of log lines."""
    requests: set[asyncio.Task[Completion]] = field(default_factory=set)
    """Requests in progress."""
    expiry: asyncio.TimerHandle | None = None
    """Closes the session of an external generator that sends no more requests."""

    def cancel(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
        for request in self.requests:
            request.cancel()


@dataclass(eq=False, repr=False)
class AgentEndpoint:
    trajectories: TrajectoryBuffer | None = None
    """Receives the groups that external generators post; without it, they are refused."""
    parser: AnswerParser | None = None
    """Finds tool calls and reasoning in answers; without it, they remain text."""
    session_seconds: float = 1800.0
    """The session of an external generator is closed so long after its last request, and `on_expired` is called."""
    on_expired: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.key = new_key()
        """API key that every request has to carry."""
        self._external: tuple[MultiTurnSampler, Mapping[str, Any], Callable[[], bool]] | None = None
        self._external_sessions: dict[str, None] = {}
        """Names of the sessions that external generators opened, the oldest first (a dict keeps insertion order)."""
        self._sessions: dict[str, _Session] = {}
        """Open sessions by name."""
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self, port: int = 0) -> None:
        """Listen on `port` of 127.0.0.1, or on any free port if `port` is 0, and set `url`.

        Raises UserError if the port is in use.
        """
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._admit])
        for path, wire in FORMATS.usable().items():
            app.router.add_post(f"/sessions/{{session}}/v1/{path}", partial(self._complete, wire))
        app.router.add_get("/sessions/{session}/v1/models", self._list_models)
        app.router.add_post("/sessions", self._open_session if self.trajectories else _refuse_external)
        app.router.add_post("/trajectories", self._post_trajectory if self.trajectories else _refuse_external)
        # The handler of a request is cancelled when its client disconnects.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, logger=_server_log())
        await self._runner.setup()
        assert self._runner.server is not None, "set up"
        connections = Connections(self._runner.server)
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(connections, "127.0.0.1", port, backlog=BACKLOG)
        except OSError as error:
            connections.close()
            raise UserError(
                f"agent_port {port} is not available ({error.strerror}): set --agent-port to a free port, or unset it"
            ) from error
        self._connections = connections
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        if self._connections is not None:
            self._connections.close()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def session(
        self,
        sample: Sample,
        sampler: MultiTurnSampler,
        sampling_params: Mapping[str, Any],
        *,
        needs_key: bool = True,
    ) -> AsyncIterator[str]:
        """Open a conversation that fills `sample`, and yield its base URL, which ends with `/v1`.

        Without `needs_key`, everyone who knows the URL can send requests.

        When the block ends, requests in progress are cancelled, so nothing changes the sample afterwards. Raises the
        error that ended the conversation (TrajectoryError or EngineLostError), and TrajectoryError if the agent sent no
        request.
        """
        name, conversation = self._begin(sample, sampler, sampling_params, needs_key=needs_key)
        try:
            yield self._base_url(name)
        except Exception:
            # The client of the agent turned the failure into an HTTP error. The original error, raised below, says
            # more.
            if conversation.failure is None:
                raise
        finally:
            session = self._sessions.pop(name)
            session.cancel()
            await asyncio.gather(*session.requests, return_exceptions=True)
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

    def _begin(
        self, sample: Sample, sampler: MultiTurnSampler, params: Mapping[str, Any], *, needs_key: bool = True
    ) -> tuple[str, Conversation]:
        name, conversation = secrets.token_hex(16), Conversation(sample, sampler, params, self.parser)
        self._sessions[name] = _Session(conversation, needs_key)
        return name, conversation

    def _base_url(self, session: str) -> str:
        return f"{self.url}/sessions/{session}/v1"

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests from web pages, and requests without the key."""
        assert self._connections is not None, "started"
        return await self._connections.handle(request, partial(self._admit_one, handler))

    async def _admit_one(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]], request: web.Request
    ) -> web.StreamResponse:
        if (reason := foreign_request(request.headers.get("Host"), request.headers.get("Origin"))) is not None:
            return _error(403, reason)
        session = self._sessions.get(request.match_info.get("session", ""))
        # The client of Anthropic sends the key in another header.
        sent = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        # Bytes that are not UTF-8 are half surrogate pairs in the header.
        is_open = session is not None and not session.needs_key
        if not is_open and not secrets.compare_digest(sent.encode(errors="replace"), self.key.encode()):
            return _error(
                401, "the API key is missing or wrong: use args.agents.api_key or agent_key of the run folder"
            )
        try:
            length = request.content_length or 0
            if length > MAX_REQUEST_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_REQUEST_BYTES, length)
            return await handler(request)
        except web.HTTPRequestTimeout:
            return _error(408, f"the request was not complete after {BODY_SECONDS:g} s: send it again")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the request has more than {MAX_REQUEST_BYTES >> 20} MiB: send a shorter history")
        except web.HTTPNotFound:
            paths = ", ".join(f"/v1/{path}" for path in sorted(FORMATS.usable()))
            return _error(404, f"the endpoint has no address {request.path}: the paths of a session are {paths}")

    async def _open_session(self, http: web.Request) -> web.Response:
        if self._external is None or not self._external[2]():
            return _weights_are_missing()
        sampler, params, _ = self._external
        name, _ = self._begin(Sample(), sampler, params)
        self._external_sessions[name] = None
        self._expire_later(name)
        if len(self._external_sessions) > MAX_EXTERNAL_SESSIONS:
            # The oldest session probably belongs to a generator that died: a live generator needs only a few.
            self._claim(next(iter(self._external_sessions)))
        return _json(200, {"session": name, "base_url": self._base_url(name)})

    async def _post_trajectory(self, http: web.Request) -> web.Response:
        assert self.trajectories is not None, "the route exists"
        if self._external is not None and not self._external[2]():
            return _weights_are_missing()
        try:
            posted = decode_json(await _body(http), dict[str, Any]).get("samples")
            name = await self.trajectories.add(
                posted, self._lookup, self._claim, key=http.headers.get("Idempotency-Key")
            )
            return _json(200, {"group": name})
        except (InvalidRequestError, ValueError) as error:
            return _error(400, str(error))
        except BufferFullError as full:
            return _error(429, str(full))
        except NotStoredError as failure:
            return _error(503, str(failure))

    def _lookup(self, session: str) -> list[Sample]:
        """The segments of a session. Raises InvalidRequestError if the session is unknown, busy, failed or empty."""
        if session not in self._external_sessions:
            raise InvalidRequestError(
                f"session {session!r} is unknown, was posted already, was closed after {self.session_seconds:g} s "
                f"without a request (generate_timeout_seconds), or because {MAX_EXTERNAL_SESSIONS} newer ones are open"
            )
        conversation, tasks = self._sessions[session].conversation, self._sessions[session].requests
        segments = conversation.segments
        if tasks or conversation.failure is not None or not segments:
            cause = conversation.failure or ("a request is in progress" if tasks else "it has no response tokens")
            raise InvalidRequestError(f"session {session!r} cannot be trained: {cause}")
        return segments

    def _claim(self, name: str) -> None:
        """Close the session of an external generator."""
        del self._external_sessions[name]
        session = self._sessions.pop(name)
        session.cancel()
        session.conversation.forget()

    def _expire_later(self, name: str) -> None:
        """Close the session of an external generator after its time without a request, which begins now."""
        session = self._sessions.get(name)
        if session is None or name not in self._external_sessions:
            return
        if session.expiry is not None:
            session.expiry.cancel()
        session.expiry = asyncio.get_running_loop().call_later(self.session_seconds, self._expire, name)

    def _expire(self, name: str) -> None:
        if not self._sessions[name].requests:
            self._claim(name)
            self.on_expired()

    async def _complete(self, wire: WireFormat, http: web.Request) -> web.StreamResponse:
        try:
            request = decode_json(await _body(http), dict[str, Any])
            asked = wire.read(request)
        except InvalidRequestError as error:
            return _error(400, str(error))
        except ValueError as error:
            return _error(400, f"the request is not a JSON object: {error}")
        except RecursionError:
            return _error(400, _TOO_DEEP)
        name = http.match_info["session"]
        session = self._sessions.get(name)
        if session is None:
            return _error(404, "this session does not exist or has ended: open one session per sample")
        task = asyncio.create_task(session.conversation.complete(asked), context=session.context.copy())
        session.requests.add(task)
        task.add_done_callback(session.requests.discard)
        task.add_done_callback(lambda _: self._expire_later(name))
        stream = web.StreamResponse(headers=_STREAM_HEADERS) if request.get("stream") else None
        try:
            while not (await asyncio.wait([task], timeout=PING_SECONDS))[0]:
                if stream is not None:
                    await _send(stream, http, [wire.ping])
        finally:
            # This cancels the task if the client has disconnected: nobody waits for the answer.
            task.cancel()
        refusal = _refusal(task)
        if stream is None or (refusal is not None and not stream.prepared):
            return _json(200, wire.answer(task.result(), request)) if refusal is None else _error(*refusal)
        events = wire.stream(task.result(), request) if refusal is None else [event(_error_body(*refusal))]
        await _send(stream, http, events)
        return stream

    async def _list_models(self, http: web.Request) -> web.Response:
        return _json(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": ""}]})


class Agents:
    """The endpoint as generate functions see it (`args.agents`); `sampler` generates the answers of its sessions."""

    def __init__(
        self, endpoint: AgentEndpoint, sampler: MultiTurnSampler, *, prompts_are_rendered: bool = False
    ) -> None:
        """`prompts_are_rendered` means that `sample.prompt` is the text of a rendered chat."""
        self._endpoint = endpoint
        self._sampler = sampler
        self._prompts_are_rendered = prompts_are_rendered

    @property
    def api_key(self) -> str:
        """API key of the endpoint, for the client of an agent."""
        return self._endpoint.key

    def session(
        self, sample: Sample, sampling_params: Mapping[str, Any], *, needs_key: bool = True
    ) -> AbstractAsyncContextManager[str]:
        """Use as `async with agents.session(...) as base_url`; the conversation fills `sample`.

        `needs_key=False` is for agents that send no key: everyone who knows `base_url` can then send requests. Raises
        UserError if the prompt is rendered already, because an agent would send a chat within a message.
        """
        if self._prompts_are_rendered:
            raise UserError(
                "apply_chat_template renders sample.prompt, and the endpoint for agents renders each request again: "
                "unset apply_chat_template, and let the agent send sample.messages"
            )
        return self._endpoint.session(sample, self._sampler, sampling_params, needs_key=needs_key)

    async def read(
        self, sample: Sample, tools: Sequence[Mapping[str, Any]], *, stop: Sequence[str] = (), calls_before: int = 0
    ) -> Message:
        """Return the answer at the end of `sample` as a chat message, with its reasoning and its calls of `tools`.

        `stop` are the strings that may have ended the answer, which the message lacks. `calls_before` is the number of
        calls in earlier answers.
        """
        message, _ = await read_answer(
            sample,
            len(sample.tokens) - sampled_at_end(sample),
            self._sampler.tokenizer,
            self._endpoint.parser,
            tools=tools,
            calls_before=calls_before,
            stop=stop,
        )
        return message

    def segments(self, sample: Sample) -> list[Sample]:
        """The segments of the sample's trajectory, in the order in which they were answered last."""
        return self._sampler.segments(sample)


def _server_log() -> logging.Logger:
    """Return the log of aiohttp's server without requests that are not HTTP: any client could fill the disk."""

    def is_no_request(record: logging.LogRecord) -> bool:
        return record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError)

    log = logging.getLogger("aiohttp.server.agents")
    log.filters[:] = [lambda record: not is_no_request(record)]
    return log


async def _body(http: web.Request) -> bytes:
    """Raises HTTPRequestTimeout if the client is too slow."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await http.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


async def _refuse_external(http: web.Request) -> web.Response:
    return _error(
        404,
        "this run has no external generator: set rollout_function_path to "
        "miles_async.rollout.external_rollout.generate_rollout",
    )


def _weights_are_missing() -> web.Response:
    return _error(503, "the engines do not hold the weights of this run yet: try again in a moment")


def _refusal(task: asyncio.Task[Completion]) -> tuple[int, str] | None:
    """Return status and sentence if a request failed; None if it was answered."""
    if task.cancelled():
        return 410, "the session was closed"
    match task.exception():
        case None:
            return None
        case InvalidRequestError() as error:
            return 400, str(error)
        case SessionClosedError() as error:
            return 410, str(error)
        case RecursionError():
            # A value that can be decoded may be too deep for what follows, such as a comparison with earlier requests.
            return 400, _TOO_DEEP
        case error:
            raise error


async def _send(stream: web.StreamResponse, http: web.Request, events: Iterable[bytes]) -> None:
    # A client that has gone misses its answer.
    with suppress(ConnectionResetError):
        if not stream.prepared:
            await stream.prepare(http)
        await stream.write(b"".join(events))


def _json(status: int, body: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json(status, _error_body(status, message))


def _error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error that the clients of OpenAI and of Anthropic can read."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"message": message, "type": kind, "code": status}}
