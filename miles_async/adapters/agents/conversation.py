"""The conversation of one agent, stored as the tokens of one sample.

An OpenAI client sends the whole message history with each request. The history is compared with the messages that the
conversation holds; only the new messages are tokenized, and appended to the token IDs that the model sampled. An answer
of the model is never decoded to text and tokenized again, so training sees exactly the sampled tokens. Miles calls this
"token in, token out".
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_async.adapters.agents.messages import Message, for_template, plain, reply
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.errors import MilesError, TrajectoryError
from miles_async.types import Sample, SampleStatus


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


class Conversation:
    """One conversation, which fills `sample`.

    `sampling_params` are those of the run. A request of the agent may lower the number of tokens and add stop strings;
    its temperature and similar parameters are ignored, because training needs the distribution that the run sampled
    from.
    """

    def __init__(self, sample: Sample, sampler: MultiTurnSampler, sampling_params: Mapping[str, Any]) -> None:
        self.sample = sample
        self.failure: MilesError | None = None
        """The error that ended the conversation; `AgentEndpoint.session` raises it."""
        self._sampler = sampler
        self._params = sampling_params
        self._history: list[Message] = []
        """All messages up to and including the last answer of the model."""
        self._last: Completion | None = None
        self._lock = asyncio.Lock()
        self._marker = f"[{uuid.uuid4().hex}]"
        sample.reset()

    async def complete(self, request: Mapping[str, Any]) -> Completion:
        """Answer one request.

        Raises InvalidRequestError if the request does not continue this conversation, and SessionClosedError after a
        failure or an abort.
        """
        messages, tools = self._read(request)
        async with self._lock:
            if self.failure is not None:
                raise SessionClosedError(str(self.failure))
            if self._last is not None and messages == self._history[:-1]:
                # The client repeats a request because it lost the connection before it received the answer.
                return self._last
            try:
                self._append(messages, tools)
                self._last = await self._answer(request, tools)
            except MilesError as failure:
                self.failure = failure
                raise SessionClosedError(str(failure)) from failure
            self._history = [*messages, self._last.message]
            return self._last

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

    def _append(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
        tokenizer = self._sampler.tokenizer
        if not self._history:
            self.sample.tokens = tokenizer.encode_text(tokenizer.render([*map(for_template, messages)], tools))
            return
        for index, (held, message) in enumerate(zip(self._history, messages, strict=False)):
            if held != message:
                raise InvalidRequestError(
                    f"messages[{index}] differs from the message in this conversation: an agent must extend its "
                    "history and not rewrite it; open one session per conversation"
                )
        new = messages[len(self._history) :]
        if not new:
            raise InvalidRequestError(
                f"the {len(messages)} messages do not continue the conversation: add a message after the last answer"
            )
        # The chat template renders the history with a unique marker in place of the last answer. The text after the
        # marker is the text that the model did not sample: the end of its turn and the new messages.
        rendered = [*self._history[:-1], {"role": "assistant", "content": self._marker}, *new]
        _, marker, continuation = tokenizer.render([*map(for_template, rendered)], tools).rpartition(self._marker)
        if not marker:
            raise TrajectoryError("the chat template omits the last answer, so it cannot be continued token by token")
        # A completed answer ends with the end-of-turn token, which the template renders once more.
        last = tokenizer.text_of(self.sample.tokens[-1:])
        if self.sample.status is SampleStatus.COMPLETED and last and continuation.startswith(last):
            continuation = continuation[len(last) :]
        # Tokens beyond the limit are dropped, and the next answer then ends with finish_reason `length`: an agent
        # cannot make a sample longer than the learner accepts.
        self._sampler.observe(
            self.sample, continuation, room=self._params["max_new_tokens"] - self.sample.response_length
        )

    async def _answer(self, request: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> Completion:
        sample, params = self.sample, dict(self._params)
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
        message = plain(reply(self._sampler.tokenizer.decode(tokens), tools))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return Completion(
            message,
            "length" if sample.status is SampleStatus.TRUNCATED else reason,
            tokens,
            sample.rollout_log_probs[before:],
            len(sample.tokens) - len(tokens),
        )
