"""The process of one check: `python -m benchmarks.gpu_check.worker NAME FOLDER SERVER_ARGS`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import Report

CHECKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "engine-bf16": ("engine", "check", {"precision": "bf16"}),
    "engine-fp32": ("engine", "check", {"precision": "fp32"}),
    "learner": ("learner", "check", {}),
    "attention": ("attention", "check", {}),
    "output-layer": ("output_layer", "check", {}),
    "gae": ("gae", "check", {}),
    "experts": ("experts", "check", {}),
    "step": ("step", "check", {}),
    "deterministic": ("step", "check_deterministic", {}),
    "parallel": ("parallel", "check", {}),
    "state": ("state", "check", {}),
    "optimizer": ("optimizer", "check", {}),
    "ipc": ("ipc", "check", {}),
    "publish-bf16": ("publish", "check", {"precision": "bf16"}),
    "publish-fp32": ("publish", "check", {"precision": "fp32"}),
    "publish-rdma": ("publish", "check_rdma", {}),
    "broadcast": ("broadcast", "check", {}),
    "offload": ("offload", "check", {}),
    "job-colocated": ("job", "check_colocated", {}),
    "job-colocated-adapter": ("job", "check_colocated_adapter", {}),
    "job-disaggregated": ("job", "check_disaggregated", {}),
}
"""Module, function and arguments of each check, in the order in which they run. Modules are imported in the process of
the check, because an import may fail with other versions of SGLang, Megatron or torch."""


def main() -> None:
    name, folder, server_args = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    report = Report(name, folder / f"{name}.jsonl")
    module, function, arguments = CHECKS[name]
    with report.part("start"):
        check = getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), function)
        shared = importlib.import_module("benchmarks.gpu_check.surroundings")
        surroundings = shared.Surroundings(folder=folder / name, models=folder / "models", server_args=server_args)
        check(report, surroundings, **arguments)


if __name__ == "__main__":
    main()
