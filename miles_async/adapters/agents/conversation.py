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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from miles_async.adapters.agents.messages import Message, for_template, plain, reply
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.errors import MilesError, PromptTooLongError, TrajectoryError
from miles_async.types import Sample, SampleStatus

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
        return self.completion.done() and known < len(messages) and messages[:known] == self.history

    def last_common_answer(self, messages: list[Message]) -> _Answer | None:
        """The last answer before which the history is the same as `messages`, which go on after it."""
        pairs = enumerate(zip(self.history, messages, strict=False))
        common = next((i for i, (held, message) in pairs if held != message), min(len(self.history), len(messages)))
        shared = [answer for answer in self.answers if answer.messages <= min(common, len(messages) - 1)]
        return shared[-1] if shared else None


class Conversation:
    """The conversations of one agent, which fill `sample` and the further segments of its trajectory.

    `sampling_params` are those of the run. A request of the agent may lower the number of tokens and add stop strings;
    its temperature and similar parameters are ignored, because training needs the distribution that the run sampled
    from. `max_new_tokens` limits the tokens of each segment after its first prompt.
    """

    def __init__(self, sample: Sample, sampler: MultiTurnSampler, sampling_params: Mapping[str, Any]) -> None:
        self.sample = sample
        self.failure: MilesError | None = None
        """The error that ended the conversation; `AgentEndpoint.session` raises it."""
        self._sampler = sampler
        self._params = sampling_params
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
        """Answer one request. Requests of different segments run concurrently.

        Raises InvalidRequestError if the request is invalid or too long, and SessionClosedError after a failure or an
        abort.
        """
        messages, tools = self._read(request)
        if self.failure is not None:
            raise SessionClosedError(str(self.failure))
        for segment in self._open:
            if segment.asked == messages and segment.tools == tools:
                # The client repeats a request because it lost the connection before it received the answer.
                return await asyncio.shield(segment.completion)
        segment, source, answer = self._find_segment(messages, tools)
        segment.asked, segment.completion = messages, asyncio.Future()
        before = segment.sample.status
        try:
            self._extend(segment, source, answer)
            completion = await self._answer(segment, request)
        except asyncio.CancelledError:
            # The session ended without this answer. What was answered before is trained.
            segment.sample.status = before if segment.answers else SampleStatus.TRUNCATED
            segment.completion.cancel()
            raise
        except MilesError as failure:
            error = self._failed(segment, failure)
            segment.completion.set_exception(error)
            segment.completion.exception()  # nobody may wait for it
            raise error from failure
        segment.completion.set_result(completion)
        return completion

    def _read(self, request: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        if request.get("n") not in (None, 1):
            raise InvalidRequestError(
                "n must be 1: a conversation is one sample, and the run itself generates several samples per prompt"
            )
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("messages must be a list with at least one message")
        try:
            read = [plain(message) for message in messages]
            for message in read:
                for_template(message)
            return read, request.get("tools")
        except (KeyError, TypeError, AttributeError, msgspec.DecodeError) as error:
            raise InvalidRequestError(f"a message does not have the format of a chat message: {error!r}") from error

    def _find_segment(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[_Segment, _Segment | None, _Answer | None]:
        """Return the segment that answers these messages, and the last answer that they follow, with its segment."""
        # Templates render the tools before all messages, so other tools are another history.
        alike = [segment for segment in self._open if segment.tools == tools]
        recorded = any(messages == segment.history[: len(messages)] for segment in alike)
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

    def _extend(self, segment: _Segment, source: _Segment | None, answer: _Answer | None) -> None:
        """Append the messages that follow `answer` in `source` to the segment."""
        sample, tokenizer, messages = segment.sample, self._sampler.tokenizer, segment.asked
        if source is None or answer is None:
            sample.tokens = tokenizer.encode_text(tokenizer.render([*map(for_template, messages)], segment.tools))
            return
        if source is not segment:
            prompt, shared = source.sample.prompt_length, source.sample.tokens[: answer.tokens]
            sample.tokens = shared[:prompt]
            self._sampler.observe_ids(sample, shared[prompt:])
        # The chat template renders the history with a unique marker in place of the last answer. The text after the
        # marker is the text that the model did not sample: the end of its turn and the new messages.
        marked = {"role": "assistant", "content": self._marker}
        rendered = [*messages[: answer.messages - 1], marked, *messages[answer.messages :]]
        text = tokenizer.render([*map(for_template, rendered)], segment.tools)
        _, marker, continuation = text.rpartition(self._marker)
        if not marker:
            raise TrajectoryError("the chat template omits the last answer, so it cannot be continued token by token")
        # A completed answer ends with the end-of-turn token, which the template renders once more.
        last = tokenizer.text_of(sample.tokens[-1:])
        if answer.completed and last and continuation.startswith(last):
            continuation = continuation[len(last) :]
        # Tokens beyond the limit are dropped, and the next answer then ends with finish_reason `length`: an agent
        # cannot make a sample longer than the learner accepts.
        self._sampler.observe(sample, continuation, room=self._params["max_new_tokens"] - sample.response_length)

    async def _answer(self, segment: _Segment, request: Mapping[str, Any]) -> Completion:
        sample, params = segment.sample, dict(self._params)
        # `max_new_tokens` limits the whole response of the sample, all turns together; a request limits only its
        # answer.
        before = sample.response_length
        requested = request.get("max_completion_tokens") or request.get("max_tokens")
        if requested:
            params["max_new_tokens"] = min(params["max_new_tokens"], before + requested)
        stop = request.get("stop") or []
        params["stop"] = [*(params.get("stop") or ()), *([stop] if isinstance(stop, str) else stop)] or None
        await self._sampler.sample(sample, params)
        if sample.status is SampleStatus.ABORTED:
            raise TrajectoryError("the run aborted the sample")
        tokens = sample.tokens[len(sample.tokens) - sample.response_length + before :]
        message = plain(reply(self._sampler.tokenizer.decode(tokens), segment.tools))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        segment.history = [*segment.asked, message]
        completed = sample.status is SampleStatus.COMPLETED
        segment.answers.append(_Answer(len(segment.history), len(sample.tokens), completed))
        return Completion(
            message,
            "length" if sample.status is SampleStatus.TRUNCATED else reason,
            tokens,
            sample.rollout_log_probs[before:],
            len(sample.tokens) - len(tokens),
        )

    def _failed(self, segment: _Segment, failure: MilesError) -> InvalidRequestError | SessionClosedError:
        """The error of a request. Every failure ends the conversation, except that a new segment may be too long."""
        if isinstance(failure, PromptTooLongError) and segment.sample is not self.sample:
            self._open.remove(segment)
            self._sampler.drop_segment(segment.sample)
            return InvalidRequestError(str(failure))
        self.failure = failure
        return SessionClosedError(str(failure))
