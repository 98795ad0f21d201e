"""Checks what works on this machine's GPUs, in minutes: `make gpu-check`.

    python -m benchmarks.gpu_check [--device cuda|cpu] [--only NAME ...] [--sglang attention_backend=triton ...]

Each check is a process with a time limit, so that a crash of one does not stop the others. Prints a table with the
result of each part, its figure and the figure of a CPU, and writes benchmarks/results/gpu-check-NAME.json, where NAME
is the name of the GPU, or `cpu`. Models have random weights; nothing is downloaded. With `--device cpu` the same checks
run without a GPU. Exits with 1 if a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import Row, run_check, table
from benchmarks.gpu_check.worker import CHECKS
from benchmarks.records import record, recorded, stamp
from miles_async.adapters.sglang.launch import WITHOUT_COMPILER

PACKAGES = (
    "torch",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "sglang-router",
    "flashinfer-python",
    "megatron-core",
    "transformer-engine",
    "torch-memory-saver",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "ray",
    "transformers",
    "triton",
)
"""Packages whose versions are recorded if they are installed."""
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE", **WITHOUT_COMPILER}
"""Environment variables of checks with `--device cpu`."""
DEVICES = """
import json, torch
properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "gpus": [[one.name, one.total_memory / 2**30] for one in properties]}))
"""
"""Asked in another process, because CUDA takes memory of the GPU in every process that initializes it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where to run (default: cuda)")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="NAME", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds per check (default: 600)")
    parser.add_argument(
        "--sglang", nargs="+", default=[], metavar="NAME=VALUE", help="further arguments of SGLang, in all checks"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu-check"), help="for logs (default: %(default)s)")
    options = parser.parse_args()
    environment = WITHOUT_GPU if options.device == "cpu" else {}
    versions = installed_versions(environment)
    if options.device == "cuda" and not versions["gpus"]:
        print("torch finds no GPU; run `make doctor` to see why, or try the checks with --device cpu", file=sys.stderr)
        return 2
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    on_cpu = {(row["check"], row["part"]): row["value"] for row in recorded("gpu-check-cpu").get("rows", [])}
    figures = {key: value for key, value in on_cpu.items() if value is not None}
    arguments = json.dumps(dict(map(parsed, options.sglang)))
    rows: list[Row] = []
    for name in options.only or CHECKS:
        print(f"{name} …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu_check.worker", name, str(folder), arguments]
        rows += run_check(name, command, folder, environment, options.limit)
    print(table(rows, figures))
    result = {"versions": versions, "rows": [asdict(row) for row in rows]}
    (folder / "result.json").write_text(json.dumps({**stamp(), "result": result}, indent=2) + "\n")
    if not options.only:
        device = versions["gpus"][0][0] if options.device == "cuda" else "cpu"
        record(f"gpu-check-{device.lower().replace(' ', '-')}", result)
    return int(any(row.status == "fail" for row in rows))


def parsed(word: str) -> tuple[str, Any]:
    """Split NAME=VALUE. Values are JSON, or else text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def installed_versions(environment: Mapping[str, str]) -> dict[str, Any]:
    """Versions of the packages, of CUDA and of the driver, and name and memory in GiB of each GPU."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    command, variables = [sys.executable, "-c", DEVICES], {**os.environ, **environment}
    asked = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    found |= json.loads(asked.stdout) if asked.returncode == 0 else {"cuda": None, "gpus": []}
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
