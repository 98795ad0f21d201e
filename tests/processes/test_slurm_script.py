"""`examples/slurm.sh` with stand-ins for Slurm, Ray and the driver, which write down how they are called."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
RECORD = '#!/bin/bash\necho "${0##*/} $*" >>calls\n'
STAND_INS = {
    "scontrol": '[ "$1" = show ] && printf "first\\nsecond\\n"',
    "srun": "",
    # One more node has joined at each call.
    "ray": """if [ "$1" = status ]; then grep "ray status" calls | sed "s/.*/ 1 node_x/"; fi""",
    "python": "trap 'kill $!; exit 143' TERM; [ $DRIVER = waits ] && { sleep 100 & wait; }; exit $DRIVER",
}


def start(folder: Path, driver: str) -> subprocess.Popen[bytes]:
    """Start the script on two nodes, with a driver that waits for a signal or exits with the given code."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(RECORD + text + "\n")
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first,second", "SLURM_NNODES": "2", "DRIVER": driver}
    return subprocess.Popen([ROOT / "examples/slurm.sh", "--config", "my.yaml"], cwd=folder, env={**os.environ, **job})


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def test_the_driver_starts_when_all_nodes_have_joined(tmp_path: Path) -> None:
    assert start(tmp_path, driver="0").wait(PATIENCE_SECONDS) == 0
    recorded = calls(tmp_path)
    assert any(call.startswith("srun --nodes=1 --ntasks=1 --exclude=first ray start --address=") for call in recorded)
    assert sum(call.startswith("ray status") for call in recorded) == 2
    assert recorded[-1].startswith("python train_async.py --ray-address ")
    assert recorded[-1].endswith(" --resume auto --drain-seconds 90 --config my.yaml")


def test_a_job_whose_driver_was_stopped_by_its_signal_is_requeued(tmp_path: Path) -> None:
    script = start(tmp_path, driver="waits")
    wait_until(lambda: any(call.startswith("python") for call in calls(tmp_path)), "the driver runs")
    script.send_signal(signal.SIGTERM)
    assert script.wait(PATIENCE_SECONDS) == 143
    assert calls(tmp_path)[-1] == "scontrol requeue 7"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_job_that_ended_or_failed_by_itself_is_not_requeued(tmp_path: Path, code: int) -> None:
    assert start(tmp_path, driver=str(code)).wait(PATIENCE_SECONDS) == code
    assert not any("requeue" in call for call in calls(tmp_path))
