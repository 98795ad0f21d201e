"""Calls to Ray actors that raise this project's errors instead of Ray's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from miles_async.errors import FatalError, MilesError

T = TypeVar("T")
_NAME = re.compile(r"^\s*name: (\S+)$", re.MULTILINE)
_ADDRESS = re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)
_NODE_DEATH = re.compile(r"the actor's node was (?:preempted|terminated)[^:]*: (.*)")


async def actor_result(call: Awaitable[T]) -> T:
    """Await a call to an actor, or a coroutine that makes such calls.

    Raises the actor's own error if it is a MilesError, and FatalError if the actor raised anything else, has died
    or cannot be reached.
    """
    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, MilesError):
            raise error.cause from None
        sentence = f"a process of the run failed with {type(error.cause).__name__}: {error.cause}"
        raise FatalError(f"{sentence}; its log is in logs/ of the run folder") from error
    except ActorUnavailableError as error:
        cause = " ".join(str(error).split()).partition(" The task may or may not")[0].rstrip(". ")
        raise FatalError(
            f"a process of the run could not be reached: {cause}; check the network between the nodes"
        ) from error
    except RayActorError as error:
        raise FatalError(describe_death(error)) from error


async def all_results(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await the same call to several actors; return their results in order.

    Raises what `actor_result` raises, as soon as one call fails: the other actors may wait for the one that failed.
    """
    return list(await asyncio.gather(*map(actor_result, calls)))


def describe_death(error: RayActorError) -> str:
    """Say in one sentence which process died, how, and where its log is, or that its node was lost."""
    text = str(error).strip()
    # Ray's last line has the cause, followed by a list of what may cause such deaths in general.
    cause = text.splitlines()[-1].partition("Worker exit detail: ")[2] or text.splitlines()[-1]
    cause = cause.partition(" Some common causes")[0].partition(" There are some potential root causes")[0].rstrip(". ")
    if (name := _NAME.search(text)) is None:
        return f"a process of the run died: {cause}"
    if (node := _NODE_DEATH.search(text)) is not None:
        where = f" {address[1]}" if (address := _ADDRESS.search(text)) else ""
        return f"{name[1]} was lost with its node{where}: {node[1].rstrip('. ')}; check that machine and its network"
    if "never ran" in cause:
        # Ray says why it did not start the actor in the line before.
        why = text.splitlines()[-2].strip().rstrip(". ")
        if "all references to the actor were removed" in why:
            # The run keeps its references. Ray concludes this if its head node cannot call the driver.
            why = "Ray's head node cannot call the driver; set RAY_AUTH_MODE as for `ray start`, and check the network"
        return f"{name[1]} was never started: {why}; see `ray status`"
    log = f"logs/{name[1]}.log in the run folder"
    if "killed by `ray.kill`" in cause:
        return f"{name[1]} was ended by the run, see {log}"
    return f"{name[1]} died: {cause}; it was killed (out of memory?) or crashed, see {log}"
