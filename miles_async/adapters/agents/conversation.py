"""One agent's conversation, kept as the tokens of one sample.

The messages of a request are compared with those the conversation knows; only what is new is made into tokens and
appended, behind the very ids that the model sampled. So what was sampled is what is trained: an answer never goes
through text and back, whatever the template would make of it (Miles calls it token in, token out).
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
    """The request cannot be answered; the message says what the agent should do."""


class SessionClosedError(Exception):
    """The conversation has ended on our side; asking again is of no use."""


@dataclass(frozen=True, slots=True)
class Completion:
    message: Message
    finish_reason: str
    tokens: list[int]
    """What was sampled."""
    log_probs: list[float]
    context: int
    """Tokens before them."""


class Conversation:
    """`sampling_params` are the run's own: temperature and the like of the agent's requests are not obeyed, because
    training needs to know the distribution that was sampled from. Length and stop strings are."""

    def __init__(self, sample: Sample, turns: MultiTurnSampler, sampling_params: Mapping[str, Any]) -> None:
        self.sample = sample
        self.failure: MilesError | None = None
        """What ended the conversation, for whoever opened it."""
        self._turns = turns
        self._params = sampling_params
        self._known: list[Message] = []
        """All messages up to and including the model's last answer."""
        self._last: Completion | None = None
        self._one_at_a_time = asyncio.Lock()
        self._mark = f"[{uuid.uuid4().hex}]"
        sample.reset()

    async def complete(self, request: Mapping[str, Any]) -> Completion:
        """Answer one request. Raises Refused for a request that does not continue this conversation, Gone after a
        failure or an abort."""
        messages, tools = self._read(request)
        async with self._one_at_a_time:
            if self.failure is not None:
                raise SessionClosedError(str(self.failure))
            if self._last is not None and messages == self._known[:-1]:
                # A client that lost the connection asks again.
                return self._last
            try:
                self._append(messages, tools)
                self._last = await self._answer(request, tools)
            except MilesError as failure:
                self.failure = failure
                raise SessionClosedError(str(failure)) from failure
            self._known = [*messages, self._last.message]
            return self._last

    def _read(self, request: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        if request.get("n") not in (None, 1):
            raise InvalidRequestError(
                "n must be 1: a conversation is one sample; the run draws several samples per prompt itself"
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
            raise InvalidRequestError(f"a message has not the shape of a chat message: {error!r}") from error

    def _append(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
        tokenizer = self._turns.tokenizer
        if not self._known:
            self.sample.tokens = tokenizer.encode_text(tokenizer.render([*map(for_template, messages)], tools))
            return
        for place, (known, message) in enumerate(zip(self._known, messages, strict=False)):
            if known != message:
                raise InvalidRequestError(
                    f"messages[{place}] differs from what this conversation holds: an agent must extend its history "
                    "and not rewrite it; open a session per conversation"
                )
        new = messages[len(self._known) :]
        if not new:
            raise InvalidRequestError(
                f"{len(messages)} messages continue nothing: add a message after the model's last answer"
            )
        # The model's last answer is replaced by a mark: what the template puts behind it is what was not sampled.
        shown = [*self._known[:-1], {"role": "assistant", "content": self._mark}, *new]
        _, mark, behind = tokenizer.render([*map(for_template, shown)], tools).rpartition(self._mark)
        if not mark:
            raise TrajectoryError(
                "the chat template leaves out the model's last answer: it cannot be continued exactly"
            )
        last = tokenizer.text_of(self.sample.tokens[-1:])
        if self.sample.status is SampleStatus.COMPLETED and last and behind.startswith(last):
            behind = behind[len(last) :]
        # What does not fit is left out, and the turn after it is then `length`: no agent can outgrow the learner.
        self._turns.observe(self.sample, behind, room=self._params["max_new_tokens"] - self.sample.response_length)

    async def _answer(self, request: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> Completion:
        sample, params = self.sample, dict(self._params)
        before = sample.response_length
        asked = request.get("max_completion_tokens") or request.get("max_tokens")
        if asked:
            params["max_new_tokens"] = min(params["max_new_tokens"], before + asked)
        stop = request.get("stop") or []
        params["stop"] = [*(params.get("stop") or ()), *([stop] if isinstance(stop, str) else stop)] or None
        await self._turns.sample(sample, params)
        if sample.status is SampleStatus.ABORTED:
            raise TrajectoryError("the run took the sample back")
        tokens = sample.tokens[len(sample.tokens) - sample.response_length + before :]
        message = plain(reply(self._turns.tokenizer.decode(tokens), tools))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return Completion(
            message,
            "length" if sample.status is SampleStatus.TRUNCATED else reason,
            tokens,
            sample.rollout_log_probs[before:],
            len(sample.tokens) - len(tokens),
        )
