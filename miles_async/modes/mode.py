"""What a rollout mode says: all that a run must know about its rollout function before it calls the function.

A mode is declared, never guessed. It is a subclass of `RolloutMode` (see `miles_async/plugins.py`), and there are two
ways to declare that a function generates in a mode:

- The mode names the function. Every shipped function is named in this way, and so is the function of a package with an
  entry point. The name of the mode is then a value of `--rollout-function-path`.
- An object of the mode is the decorator of the function, as `@fully_async` of `miles_async.rollout` is. A wrapper that
  is made with `functools.wraps` or `functools.partial` has the mode of the function that it wraps.

A function without a declaration has the mode `Undeclared`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

from miles_async.plugins import Kind, Plugin
from miles_async.scheduling.bounds import Schedule

Function = TypeVar("Function", bound=Callable[..., Any])


class RolloutMode(Plugin):
    """How a rollout function generates. A mode overrides what differs from a function that generates one batch per
    call, with the engines of the run."""

    summary: ClassVar[str] = "returns one batch per call"
    """What the function does, as the end of a sentence about it."""
    function: ClassVar[str] = ""
    """The path of the function that the mode names; empty if functions declare the mode."""
    schedule: ClassVar[Schedule] = Schedule.ONE_STEP_OFF
    """The schedule under `train_async.py` if the setting `schedule` is unset."""
    needs_engines: ClassVar[bool] = True
    """Whether engines generate the groups. Without this, a run starts engines only to evaluate."""
    uses_window: ClassVar[bool] = False
    """Whether the window limits which group may enter a batch before an older one."""
    collects_only: ClassVar[bool] = False
    """Whether the function that the mode names only collects what the pipeline has generated. A fully asynchronous run
    then takes its batches directly from the queue."""
    keeps_groups: ClassVar[bool | None] = False
    """Whether the function has a worker that generates between calls. The pipeline's producer then does not run. None
    means that the run finds out: a function that holds prompts when it returns a batch keeps groups."""
    takes_posted_groups: ClassVar[bool] = False
    """Whether an external program posts the groups to the run's endpoint for agents."""
    scores: ClassVar[bool] = True
    """Whether the run computes rewards. Without this, the groups have rewards when the function returns them."""
    renders_chats: ClassVar[bool] = True
    """Whether prompts that are chats are rendered before the function gets them."""
    loss_type: ClassVar[str] = ""
    """The only loss that the groups can be trained with; empty if there are several."""

    def __call__(self, function: Function) -> Function:
        """Declare that `function` generates in this mode. The function itself stays as it is."""
        function.rollout_mode = self  # type: ignore[attr-defined]
        return function

    @property
    def may_be_continuous(self) -> bool:
        """Whether the groups may be generated all the time, which the schedule `fully_async` does."""
        return self.needs_engines and not self.takes_posted_groups


class Undeclared(RolloutMode):
    """A function that declares no mode: it may generate in its calls, or generate in its own thread.

    It is called for the next batch while the current batch trains, as by slime's `train_async.py`. The prompts that it
    takes are tracked until they come back. A sample without weight versions is dated by when its prompt was taken.
    """

    summary = "declares no mode"
    uses_window = True
    keeps_groups = None


MODES = Kind("rollout mode", RolloutMode, "miles_async.modes", by_path=False)


def mode_of(function: Callable[..., Any]) -> RolloutMode:
    """The mode that a function declares, or that it has from the function that it wraps."""
    if isinstance(function, partial):
        return mode_of(function.func)
    try:
        declared = function.rollout_mode  # type: ignore[attr-defined]
    except AttributeError:
        return Undeclared()
    return declared if isinstance(declared, RolloutMode) else Undeclared()
