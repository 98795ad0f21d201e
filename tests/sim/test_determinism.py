"""The same seed gives the same trace, byte for byte, in another process and whatever Python's hash seed is."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.sim.scenario import SCENARIOS, Digest, Scenario, merge, world_of


def digest(seed: int) -> str:
    """Of the million-group scenario, faults, stalls and filter included, for 80 batches."""
    scenario = Scenario.load(SCENARIOS / "million.yaml", quick=True)
    sink = Digest()
    settings = merge(scenario.variants["million"], {"rollout": {"num_rollout": 80}})
    world_of(settings, seed, sink).run()
    return str(sink)


def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    command = [sys.executable, "-c", "from tests.sim.test_determinism import digest; print(digest(1))"]
    elsewhere = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout.strip() == digest(1)


def test_another_seed_gives_another_trace() -> None:
    assert digest(1) != digest(2)
