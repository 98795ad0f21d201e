"""How old a group is, and when that is too old.

Staleness is counted when a group's batch enters the optimizer step: trainer version minus the oldest version that
sampled any of its tokens. Admission makes too old a group rare (`scheduling/bounds.py`); this gate makes it impossible.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessGate:
    """`limit` is `--max-weight-staleness`; None lets everything pass."""

    limit: int | None

    def too_old(self, oldest_version: int, trainer_version: int) -> bool:
        """Whether a group whose oldest token is of `oldest_version` may no longer enter a step."""
        return self.limit is not None and staleness(oldest_version, trainer_version) > self.limit


def staleness(oldest_version: int, trainer_version: int) -> int:
    """Age in weight versions. Negative ages cannot be: an engine never runs ahead of the trainer."""
    if oldest_version > trainer_version:
        raise ValueError(f"tokens of version {oldest_version} before the trainer handed out version {trainer_version}")
    return trainer_version - oldest_version
