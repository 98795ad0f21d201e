"""The skip manager of a run, and the decorator that consults it (modelled on the SkipManager of verl).

    call ─► role unknown or disabled, or step not configured? ─► run the function
         └► precondition met? ─► return the recorded result
                    otherwise ─► run the function and record its result

A context variable holds the manager of a run: tasks and `asyncio.to_thread` inherit it, and other runs in the same
process have their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from types import TracebackType
from typing import Any, Self, TypeVar

from miles_async.config.schema import RunConfig, SkipRole
from miles_async.errors import UserError
from miles_async.skip.base import REGISTERED, BaseSkip, CannotSkipError, SkipContext
from miles_async.skip.identity import identity_of

F = TypeVar("F", bound=Callable[..., Any])

_current: ContextVar[SkipManager | None] = ContextVar("skip_manager", default=None)
_NOT_RECORDED = object()


class SkipManager:
    """The skip roles of one run. `with SkipManager.init(config): ...` makes it current for the block."""

    def __init__(self, context: SkipContext) -> None:
        """Raises UserError if no class is registered for a role, or if it does not support the configured action."""
        self.context = context
        self.roles = {
            role: _registered_class(role)(role, settings, context)
            for role, settings in role_settings(context.config).items()
        }
        self.step: int | None = None

    @staticmethod
    def init(config: RunConfig, context: SkipContext | None = None) -> SkipManager:
        """Create the manager and make it current in this context and in contexts that inherit from it."""
        manager = SkipManager(context or SkipContext(config=config, identity=identity_of(config)))
        _current.set(manager)
        return manager

    @staticmethod
    def set_step(step: int) -> None:
        """Set the training step for roles without online steps. Raises UserError if `init` was not called."""
        manager = _current.get()
        if manager is None:
            raise UserError("SkipManager.set_step was called before SkipManager.init: call init first")
        manager.step = step

    @staticmethod
    def annotate(role: str) -> Callable[[F], F]:
        """Let `role` skip calls of the decorated function, plain or async. An unknown role has no effect."""

        def decorate(function: F) -> F:
            wrapper: F = (_wrap_async if inspect.iscoroutinefunction(function) else _wrap_plain)(role, function)
            return wrapper

        return decorate

    @property
    def any_enabled(self) -> bool:
        return any(skip.is_enabled for skip in self.roles.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.set(None)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that may be skipped."""

    skip: BaseSkip
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def replay(self) -> Any:
        """Return the recorded result, or `_NOT_RECORDED`."""
        try:
            if self.skip.meet_precondition(self.step, *self.args, **self.kwargs):
                return self.skip.warp_function(self.step, *self.args, **self.kwargs)
        except CannotSkipError:
            pass
        return _NOT_RECORDED

    def record(self, result: Any) -> None:
        self.skip.prepare_data(result, self.step, *self.args, **self.kwargs)


def _skippable_call(role: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """Return the call if the role may skip it; None if the function runs normally."""
    manager = _current.get()
    skip = manager.roles.get(role) if manager is not None else None
    if manager is None or skip is None or not skip.is_enabled:
        return None
    step = skip.extract_step(*args, **kwargs) if skip.support_online_step else manager.step
    return _Call(skip, step, args, kwargs) if step is not None and skip.is_eligible(step) else None


def _wrap_plain(role: str, function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = _skippable_call(role, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        replayed = call.replay()
        if replayed is not _NOT_RECORDED:
            return replayed
        result = function(*args, **kwargs)
        call.record(result)
        return result

    return wrapper


def _wrap_async(role: str, function: Any) -> Any:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = _skippable_call(role, args, kwargs)
        if call is None:
            return await function(*args, **kwargs)
        offload = call.skip.context.offload
        replayed = await offload(call.replay)
        if replayed is not _NOT_RECORDED:
            return replayed
        result = await function(*args, **kwargs)
        await offload(partial(call.record, result))
        return result

    return wrapper


def role_settings(config: RunConfig) -> Mapping[str, SkipRole]:
    """Return the settings of each role: the built-in roles and those in `skip.roles`."""
    return {"rollout": config.skip.rollout, "async_rollout": config.skip.async_rollout, **config.skip.roles}


def _registered_class(role: str) -> type[BaseSkip]:
    if role not in REGISTERED:
        known = ", ".join(sorted(REGISTERED))
        raise UserError(
            f"skip.roles.{role}: no class is registered for this role; registered roles are {known}. "
            f'Decorate your class with @register_skip("{role}") in a module that the run imports'
        )
    return REGISTERED[role]
