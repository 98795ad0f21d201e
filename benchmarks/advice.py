"""Does the advice of the verdict help? Real runs with a known bottleneck, and again with what the advice names.

    python -m benchmarks.advice [reward tools evaluation]

Each run trains a tiny model with small batches in less than a minute. The table has the groups per second of both runs
and the estimate that the summary of the first one printed.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import record, recorded

FLAGS = (
    *("--config", "configs/arithmetic-cpu.yaml", "--warm-start-max-steps", "0", "--num-rollout", "24"),
    *("--rollout-batch-size", "8", "--over-sampling-batch-size", "8", "--n-samples-per-prompt", "4"),
)
STREAM = ("--rollout-function-path", "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async")
ESTIMATE = re.compile(r"about (\S+) groups/s instead of (\S+) with")


@dataclass(frozen=True)
class Case:
    verdict: str
    script: str
    shared: tuple[str, ...]
    """Flags of both runs."""
    before: tuple[str, ...]
    after: tuple[str, ...]


CASES = {
    "reward": Case(
        "reward-bound",
        "train_async.py",
        (*STREAM, "--eval-size", "0", "--rm-type", "null"),
        ("--custom-rm-path", "benchmarks.advice.slow_reward"),
        ("--custom-rm-path", "benchmarks.advice.faster_reward"),
    ),
    "tools": Case(
        "tool-bound",
        "train_async.py",
        (*STREAM, "--eval-size", "0"),
        ("--custom-generate-function-path", "benchmarks.advice.slow_tool"),
        ("--custom-generate-function-path", "benchmarks.advice.faster_tool"),
    ),
    "evaluation": Case(
        "evaluation-bound", "train.py", ("--eval-size", "1000"), ("--eval-interval", "1"), ("--eval-interval", "2")
    ),
}


async def slow_reward(args: Any, sample: Any) -> float:
    return await _reward(4.0)


async def faster_reward(args: Any, sample: Any) -> float:
    return await _reward(2.0)


async def slow_tool(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return await _call_tool(args, sample, sampling_params, 4.0)


async def faster_tool(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return await _call_tool(args, sample, sampling_params, 2.0)


async def _reward(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return 1.0


async def _call_tool(args: Any, sample: Any, sampling_params: dict[str, Any], seconds: float) -> Any:
    sample = await args.turns.sample(sample, sampling_params)
    await asyncio.sleep(seconds)
    return sample


def run(case: Case, flags: tuple[str, ...]) -> dict[str, Any]:
    """Run a job to its end and return its summary. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, case.script, *FLAGS, *case.shared, *flags, "--run-dir", folder]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads((Path(folder) / "latest" / "summary.json").read_text())
        return summary


def main() -> None:
    results = recorded("advice")
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        before, after = run(case, case.before), run(case, case.after)
        found = ESTIMATE.search(before["knob"] or "")
        promised = float(found[1]) / float(found[2]) - 1 if found is not None else None
        results[name] = {
            "expected_verdict": case.verdict,
            "verdict": before["verdict"],
            "advice": before["knob"],
            "promised": promised,
            "gained": after["groups_per_second"] / before["groups_per_second"] - 1,
            "groups_per_second": [before["groups_per_second"], after["groups_per_second"]],
        }
    record("advice", results)
    print(f"{'case':<12}{'verdict':<18}{'promised':>10}{'gained':>10}  groups/s before and after")
    for name, result in results.items():
        hoped = "-" if result["promised"] is None else f"{result['promised']:+.0%}"
        rates = ", ".join(f"{rate:.2f}" for rate in result["groups_per_second"])
        print(f"{name:<12}{result['verdict']:<18}{hoped:>10}{result['gained']:>+10.0%}  {rates}")


if __name__ == "__main__":
    main()
