"""One-file packages add plug-ins to `--help`, to `--check-config` and to runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_async.plugins import Kind
from miles_async.rewards.plugin import REWARDS
from tests.plugin_packages import write_package

ROOT = Path(__file__).parents[2]
CONFIGURATION = ("--config", str(ROOT / "configs/arithmetic-cpu.yaml"))
REWARD = '''
from pydantic import Field
from miles_async.rewards.plugin import Reward, RunsIn
from miles_async.section import Section


class Evaluates(Reward):
    """The value of the response, at most evaluates_limit."""

    runs_in = RunsIn.CHILD

    class Settings(Section):
        """Limits."""

        evaluates_limit: float = Field(2.0, gt=0)
        """The largest reward."""

    def score(self, args, sample):
        return min(float(eval(sample.response)), args.evaluates_limit)

    def missing(self, config):
        return "rewards nothing: set reward_key" if config.rollout.reward_key == "nothing" else None
'''
SCORE = """
import asyncio, sys
from miles_async.config.load import load_config
from miles_async.rewards.factory import RunRewards
from miles_async.types import Group, Sample

async def score():
    rewards = RunRewards(load_config(sys.argv[1:], entry="train.py"), None)
    group = Group([Sample(index=0, response="1+0.5"), Sample(index=1, response="7")])
    await rewards.score(group)
    await rewards.close()
    print(*(sample.reward for sample in group))

asyncio.run(score())
"""


def package(folder: Path, kind: Kind[Any], name: str, entry_point: str, source: str) -> dict[str, str]:
    """The environment of a process that has a package with one plug-in."""
    site = write_package(folder, kind, name, entry_point, source, package="users")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


def test_a_package_adds_a_reward_with_settings_that_evaluates_responses_in_confined_processes(tmp_path: Path) -> None:
    environment = package(tmp_path, REWARDS, "evaluates", "of_users:Evaluates", REWARD)
    text = " ".join(run(environment, "train_async.py", "--help").stdout.split())
    assert "|deepscaler|evaluates|exact|" in text
    assert "evaluates: The value of the response, at most evaluates_limit." in text
    assert "--evaluates-limit FLOAT The largest reward. (default 2.0)" in text
    chosen = (*CONFIGURATION, "--rm-type", "evaluates")
    assert run(environment, "-c", SCORE, *chosen).stdout.split() == ["1.5", "2.0"]
    assert run(environment, "-c", SCORE, *chosen, "--evaluates-limit", "1").stdout.split() == ["1.0", "1.0"]


def test_the_settings_and_checks_of_a_packages_reward_are_checked_before_the_start(tmp_path: Path) -> None:
    environment = package(tmp_path, REWARDS, "evaluates", "of_users:Evaluates", REWARD)
    chosen = (*CONFIGURATION, "--rm-type", "evaluates")
    refused = run(environment, "train_async.py", *chosen, "--evaluates-limit", "-1", "--check-config")
    assert "--evaluates-limit: input should be greater than 0, got -1" in refused.stderr
    refused = run(environment, "train_async.py", *chosen, "--reward-key", "nothing", "--check-config")
    assert "rm_type evaluates rewards nothing: set reward_key" in refused.stderr
    unused = run(environment, "train_async.py", *CONFIGURATION, "--evaluates-limit", "3", "--check-config")
    assert "evaluates_limit has no effect: it needs rm_type evaluates" in unused.stderr


TAKEN = "from miles_async.rewards.plugin import Reward\nclass Mine(Reward):\n    pass\n"
CLASHING = """
from miles_async.rewards.plugin import Reward
from miles_async.section import Section


class Mine(Reward):
    class Settings(Section):
        rollout_batch_size: int = 3
"""


@pytest.mark.parametrize(
    "name, source, sentence",
    [
        ("mine", "import wheels_of_nobody", "cannot be imported: ModuleNotFoundError: No module named 'wheels_of_nob"),
        ("exact", TAKEN, "declares the name of a reward of miles_async, which is used: give it another name"),
        ("mine", CLASHING, "declares the setting rollout_batch_size, which miles_async has too: rename it"),
        ("mine", f"import torch\n{TAKEN}", "imports numpy and torch: import large libraries inside the methods that n"),
        ("mine", f"sum(range(10**8))\n{TAKEN}", "is slow to import: import large libraries inside the methods that ne"),
    ],
)
def test_a_plugin_that_is_wrong_is_named_by_check_config_and_by_the_doctor(
    tmp_path: Path, name: str, source: str, sentence: str
) -> None:
    environment = package(tmp_path, REWARDS, name, "of_users:Mine", source)
    expected = f"the entry point {name} = of_users:Mine of the distribution users {sentence}"
    checked = run(environment, "train_async.py", *CONFIGURATION, "--check-config")
    assert checked.returncode == 0
    assert f"note: {expected}" in checked.stderr
    printed = " ".join(run(environment, "-m", "workers.doctor").stdout.replace("→", "").split())
    about, _, advice = expected.rpartition(": ")
    assert about in printed
    assert advice in printed
