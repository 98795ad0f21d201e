"""`make doctor` on this machine: every fact is read or has a reason, and the verdict is in the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from miles_async.doctor.facts import Machine
from miles_async.doctor.findings import Diagnosis

ROOT = Path(__file__).parents[2]
HEAVY = "torch ray transformers sglang sglang_router megatron mooncake aiohttp".split()
REPORT = f"""
import sys
from workers.doctor import main
code = main(sys.argv[1:])
print(*(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)
sys.exit(code)
"""


class Printed(msgspec.Struct, forbid_unknown_fields=True):
    machine: Machine
    diagnosis: Diagnosis


@pytest.fixture(scope="module")
def as_json() -> tuple[subprocess.CompletedProcess[str], Printed]:
    # Without PATH no tool of the system is found.
    environment = {name: value for name, value in os.environ.items() if name != "PATH"}
    command = [sys.executable, "-c", REPORT, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    return done, msgspec.json.decode(done.stdout, type=Printed)


def test_the_json_holds_facts_and_diagnosis_and_nothing_heavy_is_imported(
    as_json: tuple[subprocess.CompletedProcess[str], Printed],
) -> None:
    done, printed = as_json
    assert done.stderr.split() == []
    machine = printed.machine
    assert machine.system == "Linux"
    assert machine.processor.usable_cores == len(os.sched_getaffinity(0))
    assert isinstance(machine.memory.total, int)
    assert isinstance(machine.cuda.gpus, tuple)
    assert isinstance(machine.limits.open_files.hard, int | None)
    assert machine.packages["ray"] == machine.pins["ray"]


def test_the_exit_code_says_whether_make_run_can_work(
    as_json: tuple[subprocess.CompletedProcess[str], Printed],
) -> None:
    done, printed = as_json
    problems = [finding for finding in printed.diagnosis.findings if finding.level == "problem"]
    assert (done.returncode, printed.diagnosis.run_works) == ((1, False) if problems else (0, True))


def test_make_doctor_prints_text_and_a_limit_that_is_too_low_is_a_problem() -> None:
    limited = "ulimit -n 200; make --no-print-directory doctor"
    # `make test` with ARGS would pass these on.
    environment = {**os.environ, "MAKEFLAGS": "", "ARGS": ""}
    command = ["bash", "-c", limited]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode != 0
    assert "problem: ulimit -n allows 200 open files, and Ray and torch alone need more" in done.stdout
    assert "Weight transports" in done.stdout
    assert done.stdout.strip().endswith("make run cannot work here: see the problems above")
