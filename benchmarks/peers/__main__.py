"""Compares this project with others, side by side on this machine.

    python -m benchmarks.peers [step] [reward] [worker] [waits] [--slime CHECKOUT] [--miles CHECKOUT]

    step    seconds per step of the same job in TRL's `GRPOTrainer` and in an asynchronous run: a model with the shape
            of SmolLM2-135M and random weights, float32, two cores, 8 prompts of 44 tokens with 8 samples of 12 tokens,
            generation included
    reward  seconds until SmolLM2-135M-Instruct has reached a mean reward of 0.7 in the job of `make run`, in both
    worker  groups per second of the fully asynchronous rollout workers, with 512 samples in flight at a fake engine
            that answers after 50 ms
    waits   the same under a limit of staleness, while each sample waits for a tool and the learner publishes; it takes
            16 minutes (`benchmarks/peers/waits.py`)

Without names all parts but `waits` are run. TRL needs its own environment, which `make bench-peers` installs; without
it, only this project is measured. The rollout workers of slime and Miles are imported from the checkouts that are
named. Prints a table and writes benchmarks/results/peers.json, or peers-waits.json for `waits`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.peers.jobs import TRL_PYTHON, measure_reward, measure_step, trl_version
from benchmarks.peers.waits import measure_waits
from benchmarks.peers.workers import measure_workers
from benchmarks.records import record, recorded

PARTS = ("step", "reward", "worker", "waits")
UNITS = {"step": "seconds per step", "reward": "seconds to reward 0.7", "worker": "groups per second"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part", help=", ".join(PARTS))
    parser.add_argument("--slime", type=Path, help="a checkout of slime")
    parser.add_argument("--miles", type=Path, help="a checkout of Miles")
    parser.add_argument("--trl-steps", type=int, default=4, help="steps of TRL in `step` (default: 4)")
    parser.add_argument("--steps", type=int, default=9, help="steps of this project in `step` (default: 9)")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each worker in `worker` (default: 10)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each worker in `waits` (default: 3)")
    parser.add_argument(
        "--small", action="store_true", help="a small model in `step`, few steps in `reward`; record nothing"
    )
    options = parser.parse_args()
    checkouts = {name: path for name, path in (("slime", options.slime), ("Miles", options.miles)) if path is not None}
    parts = options.parts or list(UNITS)
    if "waits" in parts:
        record("peers-waits", measure_waits(checkouts, options.seeds))
        parts.remove("waits")
    if not parts:
        return
    results = recorded("peers")
    if TRL_PYTHON.exists():
        results["TRL version"] = trl_version()
    else:
        print(f"{TRL_PYTHON} does not exist, so TRL is not measured; `make bench-peers` installs it.")
    for part in parts:
        if part == "step":
            results[part] = measure_step(options.trl_steps, options.steps, small=options.small)
        elif part == "reward":
            results[part] = measure_reward(small=options.small)
        else:
            results[part] = measure_workers(checkouts, options.seconds)
        figures = ", ".join(f"{name} {_text(value)}" for name, value in results[part].items())
        print(f"{part} ({UNITS[part]}): {figures}", flush=True)
    if not options.small:
        record("peers", results)


def _text(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
