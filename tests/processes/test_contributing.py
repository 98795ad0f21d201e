"""The steps of CONTRIBUTING.md, followed as they are written, in a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCORE = """
import asyncio
from miles_async.rewards.factory import RunRewards
from miles_async.types import Group, Sample
from miles_async.config.load import load_config

config = load_config(["--config", "configs/arithmetic-cpu.yaml", "--rm-type", "starts_with_label"], entry="train.py")
group = Group([Sample(index=index, prompt="", response=text, label="7") for index, text in enumerate(("7!", "8"))])

async def score():
    rewards = RunRewards(config, None)
    await rewards.score(group)
    await rewards.close()

asyncio.run(score())
print(*(sample.reward for sample in group))
"""


def test_the_steps_for_a_reward_give_a_reward_that_a_run_can_use(tmp_path: Path) -> None:
    for folder in ("miles_async", "workers", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    steps = re.search(r"## Add a reward\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert steps is not None
    [source] = re.findall(r" *```python\n(.*?) *```\n", steps[1], re.DOTALL)
    [folder] = re.findall(r"`(miles_async/rewards/\w+/)`", steps[1])
    (tmp_path / folder / "starts_with_label.py").write_text(textwrap.dedent(source))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCORE], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == ["1.0", "0.0"], done.stderr
