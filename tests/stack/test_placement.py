"""A placement on a real Ray of several nodes with logical GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray

from tests.stack.conftest import Stack
from tests.stack.job import ROOT
from tests.waiting import START_SECONDS


def test_a_run_is_placed_by_node_and_device_or_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.stack.placement_on_three_nodes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second, third = ([[f"127.0.0.{last}", device] for device in (0, 1)] for last in (2, 3, 4))
    assert (found["learner"], found["engines"]) == (first, [second, third])
    assert found["given_back"] == [third], "the devices of a removed engine"
    assert found["learner_remains"]
    assert (found["unit"], found["local"]) == ("GPU", False)
    assert found["settled"] == [["127.0.0.2", [0]], ["127.0.0.2", [1]]]
    assert found["surroundings"] == [[str(tmp_path), "1"]] * 2, "processes on a Ray that was there find the run's own"
    assert "the run needs 8 GPUs (4 for the learner, 4 for 2 engines), but the Ray cluster has 6" in found["too_many"]
    assert "the run needs 1 GPUs (1 for the learner, 0 for 0 engines), but only 0 became free" in found["taken"]


class Process:
    def niceness(self) -> int:
        return os.nice(0)


def test_processes_of_a_run_have_the_priority_of_the_driver(stack: Stack) -> None:
    """Ray's default niceness of 15 would let any other program on the machine starve them."""
    process: Any = ray.remote(Process).options(num_cpus=0).remote()
    assert ray.get(process.niceness.remote()) == os.nice(0)
