"""Fixtures of simulated runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def tasks_of_killed_workers_are_gone() -> Iterator[None]:
    """Destroy the tasks while their warnings are ignored (`lost_workers.KILLS_WORKERS`), and not in a later test."""
    yield
    gc.collect()
