"""The skip manager of a run, and the decorator that consults it (modelled on the SkipManager of verl).

    call ─► role unknown or disabled, or step not configured? ─► run the function
         └► precondition met? ─► return the recorded result
                    otherwise ─► run the function and record its result

A context variable holds the manager of a run: tasks and `asyncio.to_thread` inherit it, and other runs in the same
process have their own. A plain thread inherits no context; it uses the manager that was created last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from types import TracebackType
from typing import Any, Self, TypeVar

from miles_async.compat.verl.skip.base import REGISTERED, BaseSkip, CannotSkipError
from miles_async.config.schema import RunConfig, Skip, SkipRole
from miles_async.errors import UserError
from miles_async.json_values import shown
from miles_async.rollout.recordings import RecordingContext, identity_of
from miles_async.user_code import USER_CODE_ERRORS

F = TypeVar("F", bound=Callable[..., Any])

NO_STEP = -1
"""The step before the first call of `SkipManager.set_step`. No role can be configured to skip it."""

_current: ContextVar[SkipManager | None] = ContextVar("skip_manager", default=None)
_open: list[SkipManager] = []
"""The managers of the runs in this process, the newest last."""
_NOT_RECORDED = object()


class _CurrentManager(type):
    """Makes the manager of the calling run available as attributes of the class, as in verl."""

    @property
    def config(cls) -> Skip | None:
        manager = _manager()
        return None if manager is None else manager.config

    @property
    def skip_instances(cls) -> Mapping[str, BaseSkip]:
        manager = _manager()
        return {} if manager is None else manager.skip_instances

    @property
    def step(cls) -> int:
        manager = _manager()
        return NO_STEP if manager is None else manager.step


class SkipManager(metaclass=_CurrentManager):
    """The skip roles of one run. `with SkipManager.init(config): ...` makes it current for the block.

    `config` (the section `skip` of the configuration), `skip_instances` (by role) and `step` are attributes of each
    manager. As attributes of the class, they are those of the current manager.
    """

    def __init__(self, config: RunConfig, context: RecordingContext) -> None:
        """Raises UserError if no class is registered for a role, or if it does not support the configured action."""
        self.config = config.skip
        self.skip_instances: Mapping[str, BaseSkip] = {
            role: skip_instance(role, settings, config, context) for role, settings in role_settings(config).items()
        }
        self.step = NO_STEP

    @staticmethod
    def init(config: RunConfig, context: RecordingContext | None = None) -> SkipManager:
        """Create the manager and make it current in this context, in contexts that inherit from it, and in threads."""
        manager = SkipManager(config, context or RecordingContext(identity=identity_of(config)))
        replaced = _current.get()
        if replaced is not None and replaced in _open:
            _open.remove(replaced)
        _current.set(manager)
        _open.append(manager)
        return manager

    @staticmethod
    def set_step(step: int) -> None:
        """Set the training step for roles without online steps. Raises UserError if `init` was not called."""
        manager = _manager()
        if manager is None:
            raise UserError("SkipManager.set_step was called before SkipManager.init: call init first")
        manager.step = step

    @staticmethod
    def annotate(role: str, **kwargs: Any) -> Callable[[F], F]:
        """Let `role` skip calls of the decorated function, plain or async. An unknown role has no effect.

        As in verl, other keyword arguments are accepted and have no effect.
        """

        def decorate(function: F) -> F:
            wrapper: F = (_wrap_async if inspect.iscoroutinefunction(function) else _wrap_plain)(role, function)
            return wrapper

        return decorate

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self in _open:
            _open.remove(self)


def _manager() -> SkipManager | None:
    """Return the manager of the calling run; None if there is none, or if it is closed."""
    manager = _current.get()
    if manager is None:
        return _open[-1] if _open else None
    return manager if manager in _open else None


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that may be skipped."""

    skip: BaseSkip
    step: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def replay(self) -> Any:
        """Return the recorded result, or `_NOT_RECORDED`."""
        try:
            if self.skip.meet_precondition(self.step, self.function, *self.args, **self.kwargs):
                return self.skip.warp_function(self.step, self.function, *self.args, **self.kwargs)
        except CannotSkipError:
            pass
        return _NOT_RECORDED

    def record(self, result: Any) -> None:
        self.skip.prepare_data(self.step, result, *self.args, **self.kwargs)


def _skippable_call(
    role: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call | None:
    """Return the call if the role may skip it; None if the function runs normally."""
    manager = _manager()
    skip = manager.skip_instances.get(role) if manager is not None else None
    if manager is None or skip is None or not _enabled(skip):
        return None
    step = skip.extract_step(*args, **kwargs) if skip.support_online_step else manager.step
    return _Call(skip, step, function, args, kwargs) if step is not None and step in skip.steps else None


def _enabled(skip: BaseSkip) -> bool:
    """Return whether the role is enabled; its class may define `is_enabled` as a method or as a property."""
    enabled: Any = skip.is_enabled
    return bool(enabled() if callable(enabled) else enabled)


def _wrap_plain(role: str, function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = _skippable_call(role, function, args, kwargs)
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
        call = _skippable_call(role, function, args, kwargs)
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
    """Return the settings of each role: the built-in roles and those of the user."""
    return {"rollout": config.skip.rollout, "async_rollout": config.skip.async_rollout, **config.skip.roles}


def skip_instance(role: str, settings: SkipRole, config: RunConfig, context: RecordingContext) -> BaseSkip:
    """Create the role. Raises UserError if no class is registered for it, or if the class cannot be used."""
    if role not in REGISTERED:
        known = ", ".join(sorted(REGISTERED))
        raise UserError(
            f"skip.{role}: no class is registered for this role; registered roles are {known}. "
            f'Decorate your class with @register_skip("{role}") in a module that the run imports'
        )
    kind = REGISTERED[role]
    if settings.action not in kind.support_actions:
        known = " or ".join(sorted(kind.support_actions))
        raise UserError(f"skip.{role}.action: {kind.__qualname__} does not support {settings.action}; set {known}")
    try:
        instance = kind(settings, config)
    except UserError:
        raise
    except USER_CODE_ERRORS as error:
        raise UserError(f"skip.{role}: {kind.__qualname__} raised {shown(error)}: change its constructor") from error
    instance.attach(context)
    return instance
