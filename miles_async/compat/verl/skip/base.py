"""The base class of skip roles, and the registry that maps role names to classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar, TypeVar

from miles_async.config.schema import RunConfig, SkipRole
from miles_async.errors import UserError
from miles_async.recording import SkipAction, Steps
from miles_async.rollout.recordings import RecordingContext

Kind = TypeVar("Kind", bound="type[BaseSkip]")

REGISTERED: dict[str, type[BaseSkip]] = {}
"""The class of each role. Only classes are global; the state of a run belongs to its `SkipManager`."""


class CannotSkipError(Exception):
    """Raised by `warp_function` if it cannot replay the step after all; the decorated function then runs normally."""


class BaseSkip(ABC):
    """A skip role in one run, with the attributes and hooks of verl's BaseSkip.

    Subclasses implement the hooks, which are plain functions and may block. Each hook receives the step first, and at
    the end the arguments of the decorated function (including `self` for a method).
    """

    role: ClassVar[str] = ""
    """The name under which the class is registered."""
    support_actions: ClassVar[Collection[str]] = (SkipAction.CACHE, SkipAction.REPEAT)
    """The values of `skip.<role>.action` that the role understands: members of SkipAction, or other strings."""
    support_online_step: ClassVar[bool] = False
    """True if `extract_step` derives the step from each call; False if `SkipManager.set_step` sets it for all calls."""

    def __init__(self, local_config: SkipRole, global_config: RunConfig) -> None:
        """`local_config` has the settings of the role (`skip.<role>`); `global_config` is that of the run."""
        self.enable = local_config.enable
        self.dump_dir = local_config.dump_dir
        self.steps = Steps.parse(local_config.steps)
        self.action = next(action for action in self.support_actions if action == local_config.action)
        self.global_config = global_config
        self.context = RecordingContext()

    def is_enabled(self) -> bool:
        """Return whether calls may be skipped at all. A subclass may also define this as a property."""
        return self.enable

    def extract_step(self, *args: Any, **kwargs: Any) -> int | None:
        """Return the step of this call, or None to run it normally. Required if `support_online_step` is True."""
        raise NotImplementedError(f"{type(self).__name__} supports online steps and must define extract_step")

    def attach(self, context: RecordingContext) -> None:
        """Called by the manager of a run after the construction; `context` is what all roles of the run share."""
        self.context = context

    @abstractmethod
    def meet_precondition(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Return whether the call of `func` can be skipped."""

    @abstractmethod
    def warp_function(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the recorded result instead of calling `func`. Raises CannotSkipError if it cannot be loaded."""

    @abstractmethod
    def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
        """Record the result of a call that ran, so that a later run can replay it."""


def register_skip(role: str) -> Callable[[Kind], Kind]:
    """Register the decorated class for `role`. Raises UserError if another class is registered for it."""

    def register(kind: Kind) -> Kind:
        known = REGISTERED.get(role)
        # A module that is imported a second time defines the same class again, which replaces the first definition.
        if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise UserError(f"skip role {role!r} is served by {known.__qualname__} already; choose another role name")
        kind.role = role
        REGISTERED[role] = kind
        return kind

    return register
