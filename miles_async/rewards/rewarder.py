"""Scores the samples of a finished group with a built-in reward or the user's own."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from numbers import Real
from typing import Any

from miles_async.errors import TrajectoryError, UserError
from miles_async.rewards.answers import last_boxed
from miles_async.rewards.graders import GraderError
from miles_async.types import Group, Sample

RewardFunction = Callable[..., Any]
"""`fn(args, sample)`, plain or async (slime's shape): a number, or a dictionary of numbers.

One that scores groups is `fn(args, samples)` and returns one reward per sample.
"""


class Rewarder:
    """Implements `ports.Rewarder`.

    A plain function runs in a thread, one hop per group, so that it may block; an async one for all samples at once.
    """

    def __init__(
        self,
        function: RewardFunction,
        args: Any,
        *,
        name: str,
        timeout_seconds: float | None,
        reward_key: str | None = None,
        whole_groups: bool = False,
        boxed: bool = False,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`args` is the flat view that user functions see; `name` is for messages.

        `timeout_seconds` None: the function keeps its own deadline. `whole_groups`: it scores a group per call.
        `boxed`: it sees only what the response's last box holds. `close` ends what it started.
        """
        self._function = function
        self._args = args
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._reward_key = reward_key
        self._whole_groups = whole_groups
        self._boxed = boxed
        self._close = close
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    async def score(self, group: Group) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                rewards = await self._rewards(group)
        except TimeoutError:
            raise TrajectoryError(
                f"group {group.feed_index}: reward {self._name} took longer than {self._timeout_seconds:g} s "
                "(reward_timeout_seconds)"
            ) from None
        if len(rewards) != len(group):
            raise TrajectoryError(
                f"group {group.feed_index}: reward {self._name} returned {len(rewards)} rewards "
                f"for {len(group)} samples"
            )
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward, sample.reward_key = self._checked(sample, reward)

    async def close(self) -> None:
        """End processes and connections. Scores nothing afterwards."""
        if self._close is not None:
            await self._close()

    async def _rewards(self, group: Group) -> list[Any]:
        seen = [_boxed(sample) for sample in group] if self._boxed else group
        if self._whole_groups:
            return await self._scored_together(seen, group)
        if self._is_async:
            return await asyncio.gather(*map(self._await, seen))
        return await _in_thread(lambda: list(map(self._call, seen)))  # type: ignore[no-any-return]

    async def _scored_together(self, seen: list[Sample], group: Group) -> list[Any]:
        try:
            if self._is_async:
                rewards = await self._function(self._args, seen)
            else:
                rewards = await _in_thread(lambda: self._function(self._args, seen))
            return list(rewards)
        except (Exception, SystemExit) as error:
            raise TrajectoryError(f"group {group.feed_index}: reward {self._name} {_failure(error)}") from error

    async def _await(self, sample: Sample) -> Any:
        try:
            return await self._function(self._args, sample)
        except (Exception, SystemExit) as error:
            raise self._failed(sample, error) from error

    def _call(self, sample: Sample) -> Any:
        try:
            return self._function(self._args, sample)
        except (Exception, SystemExit) as error:
            raise self._failed(sample, error) from error

    def _failed(self, sample: Sample, error: BaseException) -> TrajectoryError:
        return TrajectoryError(f"sample {sample.index}: reward {self._name} {_failure(error)}")

    def _checked(self, sample: Sample, reward: Any) -> tuple[Any, str | None]:
        """The reward as it is kept, and the key of a dictionary's entry that counts."""
        if not isinstance(reward, Mapping):
            return self._number(sample, reward), None
        key = self._reward_key
        if key is None:
            raise UserError(
                f"reward {self._name} returned a dictionary: set reward_key to one of {', '.join(map(str, reward))}"
            )
        if key not in reward:
            raise TrajectoryError(f"sample {sample.index}: reward {self._name} returned no {key!r} (reward_key)")
        return {**reward, key: self._number(sample, reward[key])}, key

    def _number(self, sample: Sample, reward: Any) -> float:
        if not isinstance(reward, Real):
            kind = type(reward).__name__
            raise TrajectoryError(
                f"sample {sample.index}: reward {self._name} returned {reward!r}, a {kind}, not a number"
            )
        if not math.isfinite(reward):
            raise TrajectoryError(f"sample {sample.index}: reward {self._name} returned {reward}")
        return float(reward)


def _boxed(sample: Sample) -> Sample:
    return replace(sample, response=last_boxed(sample.response) or "")


def _failure(error: BaseException) -> str:
    return str(error) if isinstance(error, GraderError) else f"raised {type(error).__name__}: {error}"


async def _in_thread(call: Callable[[], Any]) -> Any:
    """In a thread of its own: one that hangs for good takes no place of another's, and does not keep the run alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            # `sys.exit` in a reward must not end the run, and a future takes no StopIteration.
            ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if ordinary else RuntimeError(repr(error))
        # The loop has ended where the run did not wait for this.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, result, failure)

    # A skip role finds its manager in the context, a log line its group.
    threading.Thread(target=copy_context().run, args=(run,), name="reward", daemon=True).start()
    return await done
