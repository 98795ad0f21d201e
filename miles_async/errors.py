"""The taxonomy of failures. What a class is decides what the run does; the message says what a person should do.

- `UserError`: the configuration, a file or a user function is wrong. One sentence, exit code 2, no traceback.
- `DataRowError`: one row of the data is broken. It is skipped, named and counted; the run goes on.
- `TrajectoryError`: one group went wrong. It is data: retried, then dead-lettered and counted; the run goes on.
- `EngineLostError`: an engine stopped answering. The group is retried elsewhere, the engine is fenced and replaced.
- `FatalError`: the run cannot go on (the learner, the producer or a disk broke). It stops within seconds, with its
  cause.
"""

from __future__ import annotations


class MilesError(Exception):
    """Base of all errors this project raises on purpose."""


class UserError(MilesError):
    """Something the user gave is wrong; the message names it and says what to set instead."""


class DataRowError(MilesError):
    """A row of the data cannot be used; the message names file, line and key."""


class TrajectoryError(MilesError):
    """A group cannot be trained as it is; the run goes on without it."""


class PromptTooLongError(TrajectoryError):
    """The prompt exceeds `rollout_max_prompt_len`: no other attempt can end otherwise, so there is none."""


class EngineLostError(MilesError):
    """An engine stopped answering or was fenced while it held a request."""


class FatalError(MilesError):
    """The run cannot go on; the message names the broken part and its cause."""


class WindowError(MilesError, ValueError):
    """The window was used against its rules (a position out of range, completed twice, or after close)."""


class LedgerError(MilesError):
    """A group took a step that its state does not allow: a bug in the scheduler, never the user's fault."""
