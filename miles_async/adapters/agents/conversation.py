"""The requests of one agent, recorded as the tokens of its trajectory.

A client sends the whole message history with each request. The history is compared with the messages that are recorded;
only the new messages are tokenized, and appended to the token IDs that the model sampled. An answer of the model is
never decoded to text and tokenized again, so training sees exactly the sampled tokens. Miles calls this "token in,
token out".

An agent may also rewrite or shorten its history, start sub-agents, or send several requests at the same time. A request
that does not extend the history of a segment opens another one. The new segment begins with the tokens up to the last
answer that both have in common; there they are context, because they are trained in the segment that sampled them. The
messages after that answer, or all messages if there is none, are rendered and tokenized.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from miles_async.adapters.agents.continuation import tokens_after
from miles_async.adapters.agents.messages import (
    AnswerParser,
    Message,
    for_template,
    plain,
    read_answer,
    same,
    same_message,
)
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler, is_special
from miles_async.errors import MilesError, PromptTooLongError, TrajectoryError
from miles_async.types import Sample, SampleStatus

T = TypeVar("T")
LONG_TEXT = 20_000
"""Texts with so many characters are rendered and tokenized in a thread."""
MAX_SEGMENTS = 128
"""Limit for the segments of one trajectory: an agent that rewrites its history in every turn would fill the memory."""


class InvalidRequestError(Exception):
    """The request cannot be answered; the message tells the author of the agent what to change."""


class SessionClosedError(Exception):
    """The conversation has failed or was aborted, so further requests fail as well."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request."""

    message: Message
    finish_reason: str
    tokens: list[int]
    """IDs of the sampled tokens."""
    log_probs: list[float]
    """Log-probability of each token in `tokens`."""
    context: int
    """Number of tokens in the context before `tokens`."""
    stop: str | None = None
    """The stop string that ended the answer. It is in `tokens`, but not in `message`."""


class _Answer(NamedTuple):
    """An answer of the model, at which other segments can depart."""

    messages: int
    """Number of messages up to and including the answer."""
    tokens: int
    """Number of tokens up to and including the answer."""
    completed: bool
    """Whether the model ended its turn."""


class _Request(NamedTuple):
    """Everything in a request that the answer depends on."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    max_tokens: int | None
    stop: Sequence[str]

    def repeats(self, other: _Request) -> bool:
        return self[1:] == other[1:] and same(self.messages, other.messages)


@dataclass(slots=True, eq=False)
class _Segment:
    """A history that only grows."""

    sample: Sample
    asked: _Request
    """The latest request."""
    history: list[Message] = field(default_factory=list)
    """All messages up to and including the last answer."""
    answers: list[_Answer] = field(default_factory=list)
    completion: asyncio.Future[Completion] = field(default_factory=asyncio.Future)
    """The answer to the latest request."""

    def renders_like(self, request: _Request) -> bool:
        """Whether the tools and template arguments are the same, which the template renders before all messages."""
        return self.asked[1:3] == request[1:3]

    def continued_by(self, messages: list[Message]) -> bool:
        known = len(self.history)
        return self.completion.done() and known < len(messages) and same(self.history, messages[:known])

    def last_common_answer(self, messages: list[Message]) -> _Answer | None:
        """The last answer before which the history is the same as `messages`, which go on after it."""
        common = 0
        for held, message in zip(self.history, messages, strict=False):
            if not same_message(held, message):
                break
            common += 1
        shared = [answer for answer in self.answers if answer.messages <= min(common, len(messages) - 1)]
        return shared[-1] if shared else None


@dataclass(eq=False, repr=False)
class Conversation:
    """The conversations of one agent, which fill `sample` and the further segments of its trajectory.

    `sampling_params` are those of the run. A request of the agent may lower the number of tokens and add stop strings;
    its temperature and similar parameters are ignored, because training needs the distribution that the run sampled
    from. `max_new_tokens` limits the tokens of each segment after its first prompt.
    """

    sample: Sample
    sampler: MultiTurnSampler
    sampling_params: Mapping[str, Any]
    parser: AnswerParser | None = None

    def __post_init__(self) -> None:
        self.failure: MilesError | None = None
        """The error that ended the conversation; `AgentEndpoint.session` raises it."""
        self._open: list[_Segment] = []
        # Digits, because tokens rarely span a digit and the text after it.
        self._marker = str(uuid.uuid4().int)
        self.sampler.forget(self.sample)
        self.sample.reset()

    @property
    def segments(self) -> list[Sample]:
        """The segments that have sampled tokens, in the order in which they were answered last."""
        return [segment for segment in self.sampler.segments(self.sample) if segment.has_trained_tokens]

    def forget(self) -> None:
        """Release what the sampler knows of the segments."""
        self.sampler.forget(self.sample)

    async def complete(self, request: Mapping[str, Any]) -> Completion:
        """Answer one request in the form that `Format.read` returns.

        Requests of different segments run concurrently. A request that is cancelled or refused leaves no trace. Raises
        InvalidRequestError if the request is invalid or too long, or if the chat template refuses its messages, and
        SessionClosedError after a failure or an abort.
        """
        asked = self._read(request)
        if self.failure is not None:
            raise SessionClosedError(str(self.failure))
        while (earlier := next((one for one in self._open if asked.repeats(one.asked)), None)) is not None:
            # The client repeats a request because it lost the connection before it received the answer.
            repeated = earlier.completion
            await asyncio.wait([repeated])
            if not repeated.cancelled():
                return repeated.result()
        segment, source, answer = self._find_segment(asked)
        before = segment.asked, segment.completion, _fields(segment.sample)
        segment.asked, segment.completion = asked, asyncio.Future()
        try:
            await self._extend(segment, source, answer)
            completion = await self._answer(segment)
        except MilesError as failure:
            error = self._failed(segment, failure)
            segment.completion.set_exception(error)
            segment.completion.exception()  # nobody may wait for it
            raise error from failure
        except BaseException:
            # The client has disconnected, the session has ended, the chat template refused the messages, or there is
            # an error in this program.
            self._withdraw(segment, *before)
            raise
        segment.completion.set_result(completion)
        return completion

    def _read(self, request: Mapping[str, Any]) -> _Request:
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("messages must be a list with at least one message")
        read = []
        for position, message in enumerate(messages):
            try:
                read.append(plain(message))
                for_template(read[-1])
            except ValueError as error:
                raise InvalidRequestError(
                    f"message {position} does not have the format of a chat message: {error}"
                ) from error
        return _Request(
            read,
            request.get("tools"),
            request.get("template_kwargs") or {},
            request.get("max_tokens"),
            request.get("stop") or (),
        )

    def _find_segment(self, request: _Request) -> tuple[_Segment, _Segment | None, _Answer | None]:
        """Return the segment that answers this request, and the last answer that it follows, with its segment."""
        messages = request.messages
        alike = [segment for segment in self._open if segment.renders_like(request)]
        recorded = any(same(segment.history[: len(messages)], messages) for segment in alike)
        if recorded and messages[-1]["role"] == "assistant":
            raise InvalidRequestError(
                f"the {len(messages)} messages do not continue the conversation: add a message after the last answer"
            )
        continued = [segment for segment in alike if segment.continued_by(messages)]
        if continued:
            longest = max(continued, key=lambda segment: len(segment.history))
            return longest, longest, longest.answers[-1]
        if len(self._open) == MAX_SEGMENTS:
            raise InvalidRequestError(
                f"this session has {MAX_SEGMENTS} segments already: extend the history of earlier requests instead of "
                "rewriting it, or open a session for each sample"
            )
        common = [(segment, answer) for segment in alike if (answer := segment.last_common_answer(messages))]
        source, answer = max(common, key=lambda pair: pair[1].messages, default=(None, None))
        opened = _Segment(self.sampler.open_segment(self.sample) if self._open else self.sample, request)
        self._open.append(opened)
        return opened, source, answer

    async def _extend(self, segment: _Segment, source: _Segment | None, answer: _Answer | None) -> None:
        """Append the messages that follow `answer` in `source` to the segment."""
        sample, messages = segment.sample, segment.asked.messages
        render = partial(self._render, segment.asked)
        if source is None or answer is None:
            sample.tokens = await self._encode(await render(messages))
            return
        if source is not segment:
            prompt, shared = source.sample.prompt_length, list(source.sample.tokens[: answer.tokens])
            sample.tokens = shared[:prompt]
            self.sampler.observe_ids(sample, shared[prompt:])
        tokens = await tokens_after(
            answer.messages - 1,
            messages,
            sample.tokens[-1] if answer.completed else None,
            marker=self._marker,
            render=render,
            encode=partial(self._encode, after=self._marker),
            is_special=partial(is_special, self.sampler.tokenizer),
        )
        # Tokens beyond the limit are dropped, and the next answer then ends with finish_reason `length`: an agent
        # cannot make a sample longer than the learner accepts.
        room = max(self.sampling_params["max_new_tokens"] - sample.response_length, 0)
        self.sampler.observe_ids(sample, tokens[:room])

    async def _render(self, request: _Request, messages: Sequence[Message], answer_next: bool = True) -> str:
        size = sum(len(message["content"]) for message in messages)
        render = partial(
            self.sampler.tokenizer.render,
            [*map(for_template, messages)],
            request.tools,
            answer_next=answer_next,
            template_kwargs=request.template_kwargs,
        )
        try:
            return await _without_blocking(size, render)
        except TrajectoryError as refusal:
            raise InvalidRequestError(str(refusal)) from refusal

    async def _encode(self, text: str, after: str = "") -> list[int]:
        return await _without_blocking(len(text), partial(self.sampler.tokenizer.encode_text, text, after=after))

    def _withdraw(
        self, segment: _Segment, asked: _Request, completion: asyncio.Future[Completion], values: dict[str, Any]
    ) -> None:
        """Undo a request without an answer; the values are those before it. What was answered before is trained."""
        segment.completion.cancel()
        for name, value in values.items():
            setattr(segment.sample, name, value)
        segment.asked, segment.completion = asked, completion
        if not segment.answers:
            self._close(segment)

    def _close(self, segment: _Segment) -> None:
        """Forget a segment without answers."""
        self._open.remove(segment)
        if segment.sample is self.sample:
            segment.sample.status = SampleStatus.TRUNCATED
        else:
            self.sampler.drop_segment(segment.sample)

    async def _answer(self, segment: _Segment) -> Completion:
        sample, asked, params = segment.sample, segment.asked, dict(self.sampling_params)
        # `max_new_tokens` limits the whole response of the sample, all turns together; a request limits only its
        # answer.
        before = sample.response_length
        if asked.max_tokens is not None:
            params["max_new_tokens"] = min(params["max_new_tokens"], before + asked.max_tokens)
        params["stop"] = [*(params.get("stop") or ()), *asked.stop] or None
        await self.sampler.sample(sample, params)
        if sample.status is SampleStatus.ABORTED:
            raise TrajectoryError("the run aborted the sample")
        first = sample.prompt_length + before
        tokens, completed = list(sample.tokens[first:]), sample.status is SampleStatus.COMPLETED
        message, stop = await read_answer(
            sample,
            first,
            self.sampler.tokenizer,
            self.parser,
            tools=asked.tools,
            calls_before=sum(len(message.get("tool_calls", ())) for message in asked.messages),
            stop=params["stop"] or (),
        )
        reason = "tool_calls" if "tool_calls" in message else "stop"
        segment.history = [*asked.messages, message]
        segment.answers.append(_Answer(len(segment.history), len(sample.tokens), completed))
        return Completion(
            message,
            "length" if sample.status is SampleStatus.TRUNCATED else reason,
            tokens,
            list(sample.rollout_log_probs[before:]),
            first,
            stop,
        )

    def _failed(self, segment: _Segment, failure: MilesError) -> InvalidRequestError | SessionClosedError:
        """The error of a request. Every failure ends the conversation, except that a new segment may be too long."""
        if isinstance(failure, PromptTooLongError) and segment.sample is not self.sample:
            self._close(segment)
            return InvalidRequestError(str(failure))
        self.failure = failure
        return SessionClosedError(str(failure))


def _fields(sample: Sample) -> dict[str, Any]:
    """The fields of a sample that a request changes; its columns are copied."""
    before = replace(sample)
    before.copy_columns(sample)
    return {entry.name: getattr(before, entry.name) for entry in fields(before)}


async def _without_blocking(size: int, work: Callable[[], T]) -> T:
    """Process `size` characters: in a thread if they could delay the event loop."""
    return work() if size < LONG_TEXT else await asyncio.to_thread(work)
