"""The base class of skip roles, and the registry that maps role names to classes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import structlog

from miles_async.config.schema import RunConfig, SkipRole
from miles_async.errors import UserError
from miles_async.recording import SkipAction, Steps
from miles_async.sample_schema import NO_LIMITS, SampleLimits

Kind = TypeVar("Kind", bound="type[BaseSkip]")

REGISTERED: dict[str, type[BaseSkip]] = {}
"""The class of each role. Only classes are global; the state of a run belongs to its `SkipManager`."""


class CannotSkipError(Exception):
    """Raised by `warp_function` if it cannot replay the step after all; the decorated function then runs normally."""


def _warn(text: str) -> None:
    structlog.get_logger("miles_async.skip").warning(text)


async def _in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


@dataclass(frozen=True, kw_only=True)
class SkipContext:
    """What the roles of one run share."""

    config: RunConfig
    identity: Mapping[str, Any] = field(default_factory=dict)
    """The conditions that a recording depends on. A recording with other conditions is not replayed."""
    limits: SampleLimits = NO_LIMITS
    """The limits that recorded samples must keep."""
    warn: Callable[[str], None] = _warn
    offload: Callable[[Callable[[], Any]], Awaitable[Any]] = _in_thread
    """Runs the hooks of async functions outside the event loop, because hooks read and write files."""


class BaseSkip(ABC):
    """A skip role in one run. Subclasses implement the hooks, which are plain functions and may block.

    Each hook receives the step, and then the arguments of the decorated function (including `self` for a method). The
    names of the hooks are those of verl.
    """

    support_actions: ClassVar[frozenset[SkipAction]] = frozenset(SkipAction)
    support_online_step: ClassVar[bool] = False
    """True if `extract_step` derives the step from each call; False if `SkipManager.set_step` sets it for all calls."""

    def __init__(self, role: str, settings: SkipRole, context: SkipContext) -> None:
        """Raises UserError if the role does not support the action in `settings`."""
        self.role = role
        self.settings = settings
        self.context = context
        self.action = SkipAction(settings.action)
        if self.action not in self.support_actions:
            known = " or ".join(sorted(self.support_actions))
            raise UserError(f"skip role {role!r} does not support action {self.action}: set {known}")
        self._steps = Steps.parse(settings.steps)

    @property
    def is_enabled(self) -> bool:
        return self.settings.enable

    def is_eligible(self, step: int) -> bool:
        """Return whether `skip.<role>.steps` contains the step; other steps always run normally."""
        return step in self._steps

    def extract_step(self, *args: Any, **kwargs: Any) -> int | None:
        """Return the step of this call, or None to run it normally. Required if `support_online_step` is True."""
        raise NotImplementedError(f"{type(self).__name__} supports online steps and must define extract_step")

    @abstractmethod
    def meet_precondition(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Return whether the call can be skipped."""

    @abstractmethod
    def warp_function(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """Return the recorded result instead of running the call. Raises CannotSkipError if it cannot be loaded."""

    @abstractmethod
    def prepare_data(self, result: Any, step: int, *args: Any, **kwargs: Any) -> None:
        """Record the result of a call that ran, so that a later run can replay it."""


def register_skip(role: str) -> Callable[[Kind], Kind]:
    """Register the decorated class for `role`. Raises UserError if another class is registered for it."""

    def register(kind: Kind) -> Kind:
        known = REGISTERED.get(role)
        # A module that is imported a second time defines the same class again, which replaces the first definition.
        if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise UserError(f"skip role {role!r} is served by {known.__qualname__} already; choose another role name")
        REGISTERED[role] = kind
        return kind

    return register
