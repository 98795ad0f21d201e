"""Skipping a stage by replaying what an earlier run recorded (verl's SkipManager; docs/how-to/replay.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from miles_async.recording import Steps
from miles_async.section import LONGEST_SECONDS, Section


class SkipRole(Section):
    """When one stage of a run is skipped."""

    enable: bool = False
    """Replay the selected steps if they were recorded, otherwise generate and record them."""
    dump_dir: str = "~/.cache/miles_async/skip"
    """Folder of the recordings."""
    steps: list[int | str] = []
    """Steps that may be skipped: integers, closed ranges such as 1-128, and open ranges such as 5-. All other steps are
    generated and not recorded."""
    action: str = "cache"
    """What takes the place of a step: one of the actions that the class of the role supports."""

    @field_validator("steps", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> list[Any]:
        """Accept a single step or range without brackets."""
        entries = value if isinstance(value, list) else [value]
        Steps.parse(entries)
        return entries


class SkipRollout(SkipRole):
    """Skip the generation of whole batches, in train.py and in train_async.py with a function that returns batches. A
    step is a trainer step (rollout_id)."""

    flag_prefix = "skip_rollout_"

    action: Literal["cache", "repeat"] = "cache"
    """Which recording replaces a step: cache uses the recording of the same step, repeat the recording of the nearest
    recorded step."""


class SkipAsyncRollout(SkipRole):
    """Skip the generation of single groups in fully asynchronous runs. A step is the position of a prompt in the order
    in which prompts are taken from the data."""

    flag_prefix = "skip_async_rollout_"

    action: Literal["cache", "repeat"] = "cache"
    """Which recording replaces a step: cache uses the recording of the same step, repeat the recording of the nearest
    recorded step."""


class Skip(Section):
    """Replay recorded generation instead of generating again (verl's SkipManager; see docs/how-to/replay.md)."""

    flag_prefix = "skip_"

    rollout: SkipRollout = SkipRollout()
    async_rollout: SkipAsyncRollout = SkipAsyncRollout()
    roles: dict[str, SkipRole] = {}
    """User-defined skip roles by name, each with the settings enable, dump_dir, steps and action. Write them as
    skip.<role>, such as skip.reward.enable=true."""
    replay_timing: Literal["recorded", "none"] = "recorded"
    """Duration of a replay: recorded takes as long as the recorded generation took, none takes no time."""
    drain_seconds: float = Field(60.0, ge=0, le=LONGEST_SECONDS)
    """Maximum number of seconds that a fully asynchronous run waits at the end for groups that are being recorded. 0
    does not wait."""
    mismatch: Literal["refuse", "generate"] = "refuse"
    """What happens if a recording was made under different settings: refuse stops the run and names the differences,
    generate warns, ignores the recording and generates the step."""
    max_bytes: int | None = Field(None, ge=1)
    """Maximum size of a folder of recordings in bytes. When it is reached, the run continues without recording. If
    unset, there is no limit."""
