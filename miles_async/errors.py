"""The exceptions of this project. The class decides how the run reacts; the message tells the user what to do.

- `UserError`: the configuration, a file or a user function is wrong. One sentence, exit code 2, no traceback.
- `DataRowError`: one row of the data is broken. The row is reported, counted and skipped; the run continues.
- `TrajectoryError`: one group failed. The group is retried, then dead-lettered and counted; the run continues.
- `EngineLostError`: an engine stopped answering. Its groups are retried on other engines; the engine is fenced and
  replaced.
- `RouterLostError`: the router did not answer, or had no engine to send a request to. Admission waits until the router
  serves requests again; neither prompts nor engines are charged.
- `FatalError`: the run cannot continue because the learner, the producer or a disk failed. The run stops within seconds
  and reports the cause.
"""

from __future__ import annotations


class MilesError(Exception):
    """The base class of every error that this project raises deliberately."""


class UserError(MilesError):
    """A setting, a file or a function of the user is invalid; the message names it and says what to change."""


class DataRowError(MilesError):
    """A row of the data is unusable; the message names the file, the line and the key."""


class TrajectoryError(MilesError):
    """A group cannot be trained in its current state; the run continues without it."""


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
