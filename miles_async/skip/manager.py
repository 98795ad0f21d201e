"""The roles of one run, and the decorator that asks them (seed `skip-manager`, "Decorator flow").

    call ─► disabled, no such role, step not configured? ─► run
         └► precondition met? ─► replay     otherwise ─► run, then keep what it gave

The manager of a run is found through a context variable: tasks and `asyncio.to_thread` inherit it, other runs in the
same process do not see it, and nothing is kept on the class.
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
_MISS = object()


class SkipManager:
    """Made by `init`; `with SkipManager.init(config): …` forgets it again at the end of the block."""

    def __init__(self, context: SkipContext) -> None:
        """Raises UserError for a role that nobody registered or an action that its module does not know."""
        self.context = context
        self.roles = {
            role: _kind(role)(role, settings, context) for role, settings in role_settings(context.config).items()
        }
        self.step: int | None = None

    @staticmethod
    def init(config: RunConfig, context: SkipContext | None = None) -> SkipManager:
        """The manager of `config`, which `annotate` finds from now on in this context and those that inherit it."""
        manager = SkipManager(context or SkipContext(config=config, identity=identity_of(config)))
        _current.set(manager)
        return manager

    @staticmethod
    def set_step(step: int) -> None:
        """The trainer step, for roles without online steps. Raises UserError before `init`."""
        manager = _current.get()
        if manager is None:
            raise UserError("SkipManager.set_step was called before SkipManager.init(config)")
        manager.step = step

    @staticmethod
    def annotate(role: str) -> Callable[[F], F]:
        """Let `role` skip calls of the decorated function, plain or async. Unknown roles change nothing."""

        def decorate(function: F) -> F:
            around: F = (_async if inspect.iscoroutinefunction(function) else _plain)(role, function)
            return around

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
    """One call that may be skipped."""

    skip: BaseSkip
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def replay(self) -> Any:
        """What is replayed, or _MISS."""
        try:
            if self.skip.meet_precondition(self.step, *self.args, **self.kwargs):
                return self.skip.warp_function(self.step, *self.args, **self.kwargs)
        except CannotSkipError:
            pass
        return _MISS

    def keep(self, result: Any) -> None:
        self.skip.prepare_data(result, self.step, *self.args, **self.kwargs)


def _call(role: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """None: the call runs as ever."""
    manager = _current.get()
    skip = manager.roles.get(role) if manager is not None else None
    if manager is None or skip is None or not skip.is_enabled:
        return None
    step = skip.extract_step(*args, **kwargs) if skip.support_online_step else manager.step
    return _Call(skip, step, args, kwargs) if step is not None and skip.is_eligible(step) else None


def _plain(role: str, function: Any) -> Any:
    @wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        call = _call(role, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        replayed = call.replay()
        if replayed is not _MISS:
            return replayed
        result = function(*args, **kwargs)
        call.keep(result)
        return result

    return around


def _async(role: str, function: Any) -> Any:
    @wraps(function)
    async def around(*args: Any, **kwargs: Any) -> Any:
        call = _call(role, args, kwargs)
        if call is None:
            return await function(*args, **kwargs)
        offload = call.skip.context.offload
        replayed = await offload(call.replay)
        if replayed is not _MISS:
            return replayed
        result = await function(*args, **kwargs)
        await offload(partial(call.keep, result))
        return result

    return around


def role_settings(config: RunConfig) -> Mapping[str, SkipRole]:
    """The shipped roles and the user's own."""
    return {"rollout": config.skip.rollout, "async_rollout": config.skip.async_rollout, **config.skip.roles}


def _kind(role: str) -> type[BaseSkip]:
    if role not in REGISTERED:
        known = ", ".join(sorted(REGISTERED))
        raise UserError(
            f"skip.roles.{role}: no class is registered for this role; known are {known}. "
            f'Decorate yours with @register_skip("{role}") in a module that the run imports'
        )
    return REGISTERED[role]
