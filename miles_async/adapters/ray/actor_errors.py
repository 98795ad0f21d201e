"""Which process died, and how, in one sentence instead of Ray's page."""

from __future__ import annotations

import re

from ray.exceptions import RayActorError

_NAME = re.compile(r"^\s*name: (\S+)$", re.MULTILINE)


def death_of(error: RayActorError) -> str:
    """Names the process where Ray does, and its log."""
    text = str(error).strip()
    # Ray says at the end how a process died, and then what processes may die of.
    how = text.splitlines()[-1].partition("Worker exit detail: ")[2] or text.splitlines()[-1]
    how = how.partition(" Some common causes")[0].partition(" There are some potential root causes")[0].rstrip(". ")
    if (named := _NAME.search(text)) is None:
        return f"a process of the run died: {how}"
    log = f"logs/{named[1]}.log in the run folder"
    return f"{named[1]} died: {how}; it was killed (out of memory?) or crashed, see {log}"
