"""Whole jobs on this machine: colocated on one device, and with the learner and the engine on one device each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu_check.report import NotPossibleError, Report
from benchmarks.gpu_check.surroundings import MEMORY_FRACTION, ON_GPU, SMALL, Precision, Surroundings, require_rdma
from benchmarks.settings import TRAINING
from miles_async.events import Event, PublishEnded, StepEnded
from miles_async.observability.trace.event_log import read_events
from tests.audit import Audit

ROOT = Path(__file__).parents[2]
STEPS = 3
SHORT = ("--num-rollout", str(STEPS), "--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--eval-size", "0")
COLOCATED = ("--colocate", *SHORT, "--lr", "1e-4")
"""Settings of `train.py`."""
COLOCATED_ADAPTER = ("--colocate", *SHORT, "--lr", "3e-3", "--lora-rank", "4", "--lora-alpha", "4")
"""The same with an adapter, which three steps change by more than the engine may differ."""
SEPARATE = (
    *SHORT,
    *("--rollout-function-path", "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"),
    *("--max-weight-staleness", "2", "--lr", "1e-6"),
)
"""Settings of `train_async.py`. Tokens are up to two versions old, so versions have to differ little if only rounding
shall tell the engine from the learner."""
GAP_LIMIT = {"bf16": 5e-2, "fp32": 1e-4}
"""Between the log-probabilities of the engine and of the learner in the same step, over all tokens of a run, in nats.
With bf16 the engine has the weights of the learner, but rounds in other places."""


def check_colocated(report: Report, surroundings: Surroundings) -> None:
    with report.part("run"):
        judge(report, "run", play(surroundings, "train.py", *COLOCATED), "bf16")


def check_colocated_adapter(report: Report, surroundings: Surroundings) -> None:
    with report.part("run"):
        judge(report, "run", play(surroundings, "train.py", *COLOCATED_ADAPTER), "bf16")


def check_disaggregated(report: Report, surroundings: Surroundings) -> None:
    for transport in ("broadcast", "p2p"):
        with report.part(transport):
            if ON_GPU and torch.cuda.device_count() == 1:
                raise NotPossibleError("this machine has one GPU; the learner and the engine need one each")
            if transport == "p2p" and ON_GPU:
                require_rdma()
            events = play(surroundings, "train_async.py", *SEPARATE, "--weight-transfer", transport)
            judge(report, transport, events, "bf16")


def play(surroundings: Surroundings, entry: str, *flags: str, precision: Precision = "bf16") -> list[Event]:
    """Run a job to its end. Raises RuntimeError with its last line of output if it fails."""
    runs, data = surroundings.folder / entry.removesuffix(".py"), surroundings.folder / "data.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"prompt": f"{number} + {number} ="}) + "\n" for number in range(100)))
    command = [sys.executable, entry, "--run-dir", str(runs), *flags]
    command += ["--prompt-data", str(data), "--input-key", "prompt"]
    command += ["--hf-checkpoint", str(surroundings.checkpoint(SMALL)), "--precision", precision]
    command += ["--rollout-max-response-len", "16", "--sglang-server-concurrency", "64"]
    command += ["--custom-rm-path", "tests.stack.user_functions.share_of_even_bytes"]
    for setting, value in TRAINING.items():
        command += [f"--{setting.replace('_', '-')}", str(value)]
    arguments = {"mem_fraction_static": MEMORY_FRACTION, **surroundings.server_args} if ON_GPU else {}
    for name, value in arguments.items():
        command.append(f"--sglang-{name.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}")
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, flush=True)
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:]
        raise RuntimeError(f"{entry} ended with code {done.returncode}: {' '.join(last)} (run folder: {runs}/latest)")
    return list(read_events(runs / "latest" / "events.jsonl"))


def judge(report: Report, part: str, events: Sequence[Event], precision: str) -> None:
    """Report what a run of `STEPS` steps did."""
    audit = Audit(2)
    for event in events:
        audit.observe(event)
    if audit.violations:
        raise RuntimeError(f"the audit found: {audit.violations[0]}")
    steps = [event for event in events if isinstance(event, StepEnded)]
    report.figure(f"{part}: optimizer steps", len(steps), "steps", at_least=STEPS)
    gap = max(event.metrics["logprob_gap_max"] for event in steps)
    report.figure(f"{part}: engine against learner", gap, "nats", at_most=GAP_LIMIT[precision])
    paused = [event.paused_seconds for event in events if isinstance(event, PublishEnded)]
    report.figure(f"{part}: longest pause of a publish", max(paused), "s")
