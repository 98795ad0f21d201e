"""What a role's module must say, and the names roles are known by."""

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

Kind = TypeVar("Kind", bound="type[BaseSkip]")

REGISTERED: dict[str, type[BaseSkip]] = {}
"""Which class serves which role. Classes only: what a run needs to remember lives in its manager."""


class CannotSkipError(Exception):
    """Raised by `warp_function`: there is nothing to replay after all, so the step runs as ever."""


def _warn(text: str) -> None:
    structlog.get_logger("miles_async.skip").warning(text)


async def _in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


@dataclass(frozen=True, kw_only=True)
class SkipContext:
    """What the modules of one run are told."""

    config: RunConfig
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What a recording depends on; one that was made under another is not replayed."""
    warn: Callable[[str], None] = _warn
    offload: Callable[[Callable[[], Any]], Awaitable[Any]] = _in_thread
    """Runs the hooks of async functions, which read and write files, off the event loop."""


class BaseSkip(ABC):
    """One role's module in one run. Its hooks are plain functions and may block.

    `step` comes first in each, then the arguments of the annotated call (`self` of a method included).
    """

    support_actions: ClassVar[frozenset[SkipAction]] = frozenset(SkipAction)
    support_online_step: ClassVar[bool] = False
    """True: each call tells its own step by `extract_step`. False: `SkipManager.set_step` tells it."""

    def __init__(self, role: str, settings: SkipRole, context: SkipContext) -> None:
        """Raises UserError for an action that the module does not know."""
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
        """Whether the step is among those configured; any other runs as ever."""
        return step in self._steps

    def extract_step(self, *args: Any, **kwargs: Any) -> int | None:
        """The step of this call; None runs it as ever. Needed where `support_online_step` is True."""
        raise NotImplementedError(f"{type(self).__name__} supports online steps and must define extract_step")

    @abstractmethod
    def meet_precondition(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Whether the call can be skipped."""

    @abstractmethod
    def warp_function(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """What the call returns instead of running. Raises CannotSkipError when that cannot be had after all."""

    @abstractmethod
    def prepare_data(self, result: Any, step: int, *args: Any, **kwargs: Any) -> None:
        """Keep what the call returned, for the next time."""


def register_skip(role: str) -> Callable[[Kind], Kind]:
    """Let the decorated class serve `role`. Raises UserError when another class does already."""

    def register(kind: Kind) -> Kind:
        known = REGISTERED.get(role)
        # The same class defined anew (a module imported again) takes its own place.
        if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise UserError(f"skip role {role!r} is served by {known.__qualname__} already; choose another name")
        REGISTERED[role] = kind
        return kind

    return register
