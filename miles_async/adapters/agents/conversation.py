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
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

from miles_async.adapters.agents.messages import (
    AnswerParser,
    Message,
    PlainTextParser,
    for_template,
    plain,
    read_answer,
    same,
    same_message,
)
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.errors import MilesError, PromptTooLongError, TrajectoryError
from miles_async.types import Sample, SampleStatus

T = TypeVar("T")
CONTEXT_TOKENS = 32
"""Tokens before an answer that parsers of reasoning read."""
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


@dataclass(slots=True, eq=False)
class _Segment:
    """A history that only grows."""

    sample: Sample
    tools: list[dict[str, Any]] | None
    history: list[Message] = field(default_factory=list)
    """All messages up to and including the last answer."""
    answers: list[_Answer] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)
    """The messages of the latest request."""
    completion: asyncio.Future[Completion] = field(default_factory=asyncio.Future)
    """The answer to the latest request."""

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


class Conversation:
    """The conversations of one agent, which fill `sample` and the further segments of its trajectory.

    `sampling_params` are those of the run. A request of the agent may lower the number of tokens and add stop strings;
    its temperature and similar parameters are ignored, because training needs the distribution that the run sampled
    from. `max_new_tokens` limits the tokens of each segment after its first prompt.
    """

    def __init__(
        self,
        sample: Sample,
        sampler: MultiTurnSampler,
        sampling_params: Mapping[str, Any],
        parser: AnswerParser | None = None,
    ) -> None:
        self.sample = sample
        self.failure: MilesError | None = None
        """The error that ended the conversation; `AgentEndpoint.session` raises it."""
        self._sampler = sampler
        self._params = sampling_params
        self._parser = parser or PlainTextParser()
        self._open: list[_Segment] = []
        self._marker = f"[{uuid.uuid4().hex}]"
        sampler.forget(sample)
        sample.reset()

    @property
    def segments(self) -> list[Sample]:
        """The segments that have sampled tokens, in the order in which they were answered last."""
        return [segment for segment in self._sampler.segments(self.sample) if segment.has_trained_tokens]

    def forget(self) -> None:
        """Release what the sampler knows of the segments."""
        self._sampler.forget(self.sample)

    async def complete(self, request: Mapping[str, Any]) -> Completion:
        """Answer one request with `messages`, `tools`, `max_tokens` and `stop` in the format of chat completions.

        Requests of different segments run concurrently. A request that is cancelled leaves no trace. Raises
        InvalidRequestError if the request is invalid or too long, and SessionClosedError after a failure or an abort.
        """
        messages, tools = self._read(request)
        if self.failure is not None:
            raise SessionClosedError(str(self.failure))
        while (asked := self._asked(messages, tools)) is not None:
            # The client repeats a request because it lost the connection before it received the answer.
            repeated = asked.completion
            await asyncio.wait([repeated])
            if not repeated.cancelled():
                return repeated.result()
        segment, source, answer = self._find_segment(messages, tools)
        before = segment.asked, segment.completion, _fields(segment.sample)
        segment.asked, segment.completion = messages, asyncio.Future()
        try:
            await self._extend(segment, source, answer)
            completion = await self._answer(segment, request)
        except MilesError as failure:
            error = self._failed(segment, failure)
            segment.completion.set_exception(error)
            segment.completion.exception()  # nobody may wait for it
            raise error from failure
        except BaseException:
            # The client has disconnected, the session has ended, or there is an error in this program.
            self._withdraw(segment, *before)
            raise
        segment.completion.set_result(completion)
        return completion

    def _read(self, request: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("messages must be a list with at least one message")
        try:
            read = [plain(message) for message in messages]
            for message in read:
                for_template(message)
            return read, request.get("tools")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidRequestError(f"a message does not have the format of a chat message: {error!r}") from error

    def _find_segment(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[_Segment, _Segment | None, _Answer | None]:
        """Return the segment that answers these messages, and the last answer that they follow, with its segment."""
        # Templates render the tools before all messages, so other tools are another history.
        alike = [segment for segment in self._open if segment.tools == tools]
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
        opened = _Segment(self._sampler.open_segment(self.sample) if self._open else self.sample, tools)
        self._open.append(opened)
        return opened, source, answer

    def _asked(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> _Segment | None:
        """The segment whose latest request had these messages."""
        alike = (segment for segment in self._open if segment.tools == tools and same(segment.asked, messages))
        return next(alike, None)

    async def _extend(self, segment: _Segment, source: _Segment | None, answer: _Answer | None) -> None:
        """Append the messages that follow `answer` in `source` to the segment."""
        sample, tokenizer, messages = segment.sample, self._sampler.tokenizer, segment.asked
        if source is None or answer is None:
            sample.tokens = await self._encode(await self._render(messages, segment.tools))
            return
        if source is not segment:
            prompt, shared = source.sample.prompt_length, source.sample.tokens[: answer.tokens]
            sample.tokens = shared[:prompt]
            self._sampler.observe_ids(sample, shared[prompt:])
        # The chat template renders the history with a unique marker in place of the last answer. The text after the
        # marker is the text that the model did not sample: the end of its turn and the new messages.
        marked = {"role": "assistant", "content": self._marker}
        rendered = [*messages[: answer.messages - 1], marked, *messages[answer.messages :]]
        text = await self._render(rendered, segment.tools)
        _, marker, continuation = text.rpartition(self._marker)
        if not marker:
            raise TrajectoryError("the chat template omits the last answer, so it cannot be continued token by token")
        # A completed answer ends with the end-of-turn token, which the template renders once more.
        last = tokenizer.text_of(sample.tokens[-1:])
        if answer.completed and last and continuation.startswith(last):
            continuation = continuation[len(last) :]
        # Tokens beyond the limit are dropped, and the next answer then ends with finish_reason `length`: an agent
        # cannot make a sample longer than the learner accepts.
        room = max(self._params["max_new_tokens"] - sample.response_length, 0)
        self._sampler.observe_ids(sample, (await self._encode(continuation))[:room])

    async def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        size = sum(len(message["content"]) for message in messages)
        render = partial(self._sampler.tokenizer.render, [*map(for_template, messages)], tools)
        return await _without_blocking(size, render)

    async def _encode(self, text: str) -> list[int]:
        return await _without_blocking(len(text), partial(self._sampler.tokenizer.encode_text, text))

    def _withdraw(
        self, segment: _Segment, asked: list[Message], completion: asyncio.Future[Completion], values: dict[str, Any]
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
            self._sampler.drop_segment(segment.sample)

    async def _answer(self, segment: _Segment, request: Mapping[str, Any]) -> Completion:
        sample, params = segment.sample, dict(self._params)
        # `max_new_tokens` limits the whole response of the sample, all turns together; a request limits only its
        # answer.
        before = sample.response_length
        if requested := request.get("max_tokens"):
            params["max_new_tokens"] = min(params["max_new_tokens"], before + requested)
        params["stop"] = [*(params.get("stop") or ()), *(request.get("stop") or ())] or None
        await self._sampler.sample(sample, params)
        if sample.status is SampleStatus.ABORTED:
            raise TrajectoryError("the run aborted the sample")
        first = sample.prompt_length + before
        tokens, completed = sample.tokens[first:], sample.status is SampleStatus.COMPLETED
        message, stop = await read_answer(
            tokens,
            self._sampler.tokenizer,
            self._parser,
            context=sample.tokens[max(0, first - CONTEXT_TOKENS) : first],
            ended=completed,
            tools=segment.tools,
            calls_before=sum(len(message.get("tool_calls", ())) for message in segment.asked),
            stop=params["stop"] or (),
        )
        reason = "tool_calls" if "tool_calls" in message else "stop"
        segment.history = [*segment.asked, message]
        segment.answers.append(_Answer(len(segment.history), len(sample.tokens), completed))
        return Completion(
            message,
            "length" if sample.status is SampleStatus.TRUNCATED else reason,
            tokens,
            sample.rollout_log_probs[before:],
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
    """The fields of a sample that a request changes; its lists are copied."""
    values = {entry.name: getattr(sample, entry.name) for entry in fields(sample)}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


async def _without_blocking(size: int, work: Callable[[], T]) -> T:
    """Process `size` characters: in a thread if they could delay the event loop."""
    return work() if size < LONG_TEXT else await asyncio.to_thread(work)
