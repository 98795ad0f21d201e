"""The exceptions of this project. The class decides how the run reacts; the message tells the user what to do.

- `UserError`: the configuration, a file or a user function is wrong. One sentence, exit code 2, no traceback.
- `DataRowError`: one row of the data is broken. The row is reported, counted and skipped; the run continues.
- `TrajectoryError`: a sample or a whole group failed. The group is retried, then dead-lettered and counted; the run
  continues. Samples that have not failed keep their tokens if the error names those that have.
- `InfrastructureError`: samples failed for a reason outside of them. They are generated or scored again at once, alone.
- `EngineLostError`: an engine stopped answering. Its groups are retried on other engines; the engine is fenced and
  replaced.
- `RouterLostError`: the router did not answer, or had no engine to send a request to. Admission waits until the router
  serves requests again; neither prompts nor engines are charged.
- `FatalError`: the run cannot continue because the learner, the producer or a disk failed. The run stops within seconds
  and reports the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from miles_async.visible_text import visible_text

if TYPE_CHECKING:
    from miles_async.types import Sample


class MilesError(Exception):
    """The base class of every error that this project raises deliberately.

    Messages quote data, exceptions of users' code and texts of the model, so they become visible text.
    """

    def __init__(self, *sentences: str) -> None:
        super().__init__(*(visible_text(str(sentence)) for sentence in sentences))


class UserError(MilesError):
    """A setting, a file or a function of the user is invalid; the message names it and says what to change.

    Each argument is the sentence of one problem.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class DataRowError(MilesError):
    """A row of the data is unusable; the message names the file, the line and the key."""


class TrajectoryError(MilesError):
    """A group cannot be trained in its current state; the run continues without it."""

    def __init__(self, message: str, samples: Sequence[Sample] = ()) -> None:
        """`samples` are those that failed. If they are not known, the whole group is generated again."""
        super().__init__(message)
        self.samples = samples


class InfrastructureError(TrajectoryError):
    """A sample failed for a reason outside of it, such as a tool server that is down. Another attempt may succeed.

    Generate functions and reward functions may raise it.
    """


class TemplateError(TrajectoryError):
    """The chat template of the checkpoint cannot render these messages, for example because of the order of roles."""


class PromptTooLongError(TrajectoryError):
    """The prompt exceeds `rollout_max_prompt_len`. It is not retried, because every attempt would fail the same way."""


class EngineLostError(MilesError):
    """An engine stopped answering or was fenced while it held a request."""


class RouterLostError(EngineLostError):
    """A request reached no engine, because the router did not answer or had no engine available."""


class FatalError(MilesError):
    """The run cannot continue; the message names the part that failed and the cause."""


class StoreError(MilesError):
    """The state of the run could not be stored; the message names the folder and the cause. The run continues."""


class WindowError(MilesError, ValueError):
    """The window was misused: a position was out of range, ended twice, or used after close."""


class LedgerError(MilesError):
    """A group made a transition that its state does not allow. This is a bug in the scheduler, not a user error."""


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Append the sentences of a UserError that ends the block, in one line each, so that further checks can follow."""
    try:
        yield
    except UserError as error:
        problems += [" ".join(str(sentence).split()) for sentence in error.args]


def raise_collected(problems: list[str]) -> None:
    """Raise UserError with the different sentences that were collected; do nothing if there is none."""
    if problems:
        raise UserError(*dict.fromkeys(problems))


_INFRASTRUCTURE = frozenset(
    (
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "anthropic.APIConnectionError",
        "anthropic.InternalServerError",
        "anthropic.RateLimitError",
        "httpx.TransportError",
        "openai.APIConnectionError",
        "openai.InternalServerError",
        "openai.RateLimitError",
        "verifiers.errors.InfraError",
    )
)
"""Errors of libraries that users' functions call, by name, because the libraries may not be installed."""


def is_infrastructure(error: BaseException) -> bool:
    """Whether an error of a user's function, or the cause of the error, is a failure of infrastructure.

    These are `InfrastructureError`, `EngineLostError`, lost connections and timeouts of the standard library and of
    HTTP clients, and answers of a server that failed or is overloaded. Errors of files are not.
    """
    return any(
        isinstance(cause, InfrastructureError | EngineLostError)
        or (isinstance(cause, OSError) and cause.filename is None)
        or any(f"{kind.__module__}.{kind.__qualname__}" in _INFRASTRUCTURE for kind in type(cause).__mro__)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
