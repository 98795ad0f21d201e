"""Scores the samples of a generated group with a built-in reward or the user's reward function."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from numbers import Real
from queue import SimpleQueue
from typing import Any

from miles_async.errors import InfrastructureError, TrajectoryError, UserError, is_infrastructure
from miles_async.json_values import json_value
from miles_async.rewards.answers import last_boxed
from miles_async.rewards.graders import GraderError
from miles_async.types import Group, Sample

RewardFunction = Callable[..., Any]
"""`fn(args, sample)`, plain or async, as in slime; it returns a number or a dictionary.

With `group_rm` it is `fn(args, samples)` instead and returns a list with one reward per sample.
"""


CANCEL_GRACE_SECONDS = 5.0
"""Time that an async reward function has to end after it was cancelled."""


class Rewarder:
    """Implements the `Rewarder` port.

    A plain function runs in a thread, one thread per group, so it may block. An async function runs for all samples of
    a group concurrently.
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
        """Create a rewarder.

        Args:
            function: the reward function.
            args: the flat configuration that `function` receives first.
            name: name of the reward in error messages.
            timeout_seconds: deadline per group; None if `function` enforces its own deadline.
            reward_key: the entry that counts if the reward is a dictionary.
            whole_groups: `function` scores a group per call.
            boxed: `function` sees only the contents of the last box in the response.
            close: releases processes and connections of `function`.
        """
        self._function = function
        self._args = args
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._reward_key = reward_key
        self._whole_groups = whole_groups
        self._boxed = boxed
        self._close = close
        self._threads = _Threads()
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    async def score(self, group: Group) -> None:
        """Set `reward` and `reward_key` of every sample.

        The reward function is called once per trajectory, with the segment that ended last, and all segments get the
        result. It is not called for a trajectory with a reward, which the generate function has set: segments without
        one get the same. A function for whole groups is always called, for all trajectories.

        Raises TrajectoryError if the function raises, misses its deadline or returns an invalid reward, and UserError
        if it returns a dictionary and `reward_key` is not set. Raises InfrastructureError if infrastructure failed, or
        if an async function missed its deadline; the error names the samples, and all others have their reward.
        """
        group.share_rewards()
        trajectories = [one for one in group.trajectories if self._whole_groups or one[-1].reward is None]
        shown = [_boxed(segments[-1]) if self._boxed else segments[-1] for segments in trajectories]
        try:
            rewards = await self._rewards(shown, group)
        except TrajectoryError as error:
            named = set(map(id, error.samples))
            pairs = zip(shown, trajectories, strict=True)
            error.samples = [sample for one, segments in pairs if id(one) in named for sample in segments]
            raise
        if len(rewards) != len(shown):
            raise TrajectoryError(
                f"group {group.feed_index}: reward {self._name} returned {len(rewards)} rewards "
                f"for {len(shown)} samples"
            )
        errors: list[InfrastructureError] = []
        failed: list[Sample] = []
        for segments, reward in zip(trajectories, rewards, strict=True):
            if isinstance(reward, InfrastructureError):
                errors.append(reward)
                failed += segments
                continue
            for segment in segments:
                segment.reward = reward
        unscored = set(map(id, failed))
        for sample in group:
            if id(sample) not in unscored:
                sample.reward, sample.reward_key = self._checked(sample, sample.reward)
        if errors:
            raise InfrastructureError(str(errors[0]), failed)

    async def close(self) -> None:
        """Release threads, processes and connections; the rewarder cannot score afterwards."""
        self._threads.close()
        if self._close is not None:
            await self._close()

    async def _rewards(self, shown: list[Sample], group: Group) -> list[Any]:
        """The reward of each shown sample, or an InfrastructureError in its place."""
        if self._is_async and not self._whole_groups:
            return await self._score_concurrently(shown)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                if self._whole_groups:
                    return await self._score_together(shown, group)
                return await self._score_in_thread(shown)
        except TimeoutError:
            raise TrajectoryError(f"group {group.feed_index}: {self._too_slow()}") from None

    def _too_slow(self) -> str:
        return f"reward {self._name} took longer than {self._timeout_seconds:g} s (reward_timeout_seconds)"

    async def _score_concurrently(self, shown: list[Sample]) -> list[Any]:
        """Score each sample with the async function. No call is left when this method raises.

        Otherwise a call could write into the samples while the next attempt at the group generates them.
        """
        calls = [asyncio.create_task(self._await(sample)) for sample in shown]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            # A function may ignore its cancellation, so the wait is limited.
            await asyncio.wait(calls, timeout=CANCEL_GRACE_SECONDS)

    async def _score_in_thread(self, shown: list[Sample]) -> list[Any]:
        """Score the samples with the plain function, one after the other, in a thread.

        A call cannot be interrupted, but no further sample is scored once the group has missed its deadline.
        """
        abandoned = threading.Event()

        def score() -> list[Any]:
            rewards: list[Any] = []
            for sample in shown:
                if abandoned.is_set():
                    break
                rewards.append(self._call(sample))
            return rewards

        try:
            return await _run_in_thread(self._threads, score)  # type: ignore[no-any-return]
        finally:
            abandoned.set()

    async def _score_together(self, shown: list[Sample], group: Group) -> list[Any]:
        try:
            if self._is_async:
                rewards = await self._function(self._args, shown)
            else:
                rewards = await _run_in_thread(self._threads, lambda: self._function(self._args, shown))
            return list(rewards)
        except (Exception, SystemExit) as error:
            kind = InfrastructureError if is_infrastructure(error) else TrajectoryError
            raise kind(f"group {group.feed_index}: reward {self._name} {_failure(error)}", shown) from error

    async def _await(self, sample: Sample) -> Any:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                return await self._function(self._args, sample)
        except (Exception, SystemExit) as error:
            if limit.expired():
                return InfrastructureError(f"sample {sample.index}: {self._too_slow()}")
            return self._failed(sample, error)

    def _call(self, sample: Sample) -> Any:
        try:
            return self._function(self._args, sample)
        except (Exception, SystemExit) as error:
            return self._failed(sample, error)

    def _failed(self, sample: Sample, error: BaseException) -> InfrastructureError:
        """The error to return in place of a reward. Raises TrajectoryError if the same response would fail again."""
        sentence = f"sample {sample.index}: reward {self._name} {_failure(error)}"
        if not is_infrastructure(error):
            raise TrajectoryError(sentence, [sample]) from error
        return InfrastructureError(sentence)

    def _checked(self, sample: Sample, reward: Any) -> tuple[Any, str | None]:
        """Return the validated reward, and the key of the entry that counts if the reward is a dictionary."""
        if not isinstance(reward, Mapping):
            return self._number(sample, reward), None
        key = self._reward_key
        if key is None:
            raise UserError(
                f"reward {self._name} returned a dictionary: set reward_key to one of {', '.join(map(str, reward))}"
            )
        if key not in reward:
            raise TrajectoryError(
                f"sample {sample.index}: reward {self._name} returned no {key!r} (reward_key)", [sample]
            )
        # Other entries may be numbers of NumPy, which checkpoints cannot express.
        return {**json_value(reward), key: self._number(sample, reward[key])}, key

    def _number(self, sample: Sample, reward: Any) -> float:
        if not isinstance(reward, Real):
            kind = type(reward).__name__
            raise TrajectoryError(
                f"sample {sample.index}: reward {self._name} returned {reward!r}, a {kind}, not a number", [sample]
            )
        if not math.isfinite(reward):
            raise TrajectoryError(f"sample {sample.index}: reward {self._name} returned {reward}", [sample])
        return float(reward)


def _boxed(sample: Sample) -> Sample:
    return replace(sample, response=last_boxed(sample.response) or "")


def _failure(error: BaseException) -> str:
    return str(error) if isinstance(error, GraderError) else f"raised {type(error).__name__}: {error}"


_Calls = SimpleQueue[Callable[[], None] | None]
"""The calls of one thread; None ends it."""


class _Threads:
    """Daemon threads that are reused; a call always finds a free one.

    The pool of the standard library would not do: a reward that hangs forever would occupy one of its threads, and keep
    the process alive. A new thread per group would cost more time than a simple reward.
    """

    def __init__(self) -> None:
        self._free: deque[_Calls] = deque()
        """The queues of the threads that wait for a call."""
        self._closed = False

    def start(self, call: Callable[[], None]) -> None:
        """Run `call`, which must not raise, in a thread."""
        try:
            calls = self._free.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), name="reward", daemon=True).start()
        calls.put(call)

    def close(self) -> None:
        """End the threads; a thread that runs a call ends after it."""
        self._closed = True
        for calls in list(self._free):
            calls.put(None)

    def _serve(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            call()
            self._free.append(calls)
            if self._closed:
                return


async def _run_in_thread(threads: _Threads, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, which runs in one of the threads."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def resolve(result: Any, error: BaseException | None) -> None:
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
            # `sys.exit` in a reward must not end the run, and a future does not accept StopIteration.
            ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if ordinary else RuntimeError(repr(error))
        # The event loop is closed if the run ended without waiting for this reward.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, result, failure)

    # The thread gets a copy of the context: the skip manager and the fields of log lines are context variables.
    threads.start(partial(copy_context().run, run))
    return await done
