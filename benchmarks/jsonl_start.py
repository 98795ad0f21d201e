"""Measures how long a large JSONL file takes until its first prompt, and how much memory it needs.

    python -m benchmarks.jsonl_start [--rows 1000000] [--row-bytes 500]

Writes a JSONL file and opens it in a new process like a run, shuffled and with 512 held-out problems. Prints the
seconds until the first group and the growth of peak memory in MiB (without imports), and writes
benchmarks/results/jsonl-start.json. Exits with 1 if the first prompt takes 2 s or more, or if memory grows by 200 MiB
or more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.records import record

LIMIT_SECONDS = 2.0
LIMIT_MIB = 200.0
OPEN = """
import json, resource, sys, time
from miles_async.adapters.datasets.factory import open_data
from miles_async.config.schema import RunConfig

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

keys = {"input_key": "prompt", "label_key": "label"}
data = {"prompt_data": sys.argv[1], **keys, "eval_size": 512, "rollout_shuffle": True}
config = RunConfig.model_validate({"data": data, "rollout": {"n_samples_per_prompt": 8}})
before, began = peak(), time.perf_counter()
source = open_data(config)
[group] = source.get_samples(1)
first = time.perf_counter() - began
began = time.perf_counter()
source.get_samples(1000)
print(json.dumps({"first_prompt_seconds": first, "growth_mib": peak() - before,
                  "group_microseconds": (time.perf_counter() - began) * 1000}))
"""


def write_rows(path: Path, rows: int, row_bytes: int) -> None:
    filler = "x" * row_bytes
    with path.open("w") as file:
        for row in range(rows):
            # Rows have different lengths, so that no result depends on where a line ends.
            text = f"{row}: {filler[: row_bytes // 2 + row * 7919 % row_bytes]}"
            file.write(json.dumps({"prompt": text, "label": str(row)}) + "\n")


def measure(rows: int, row_bytes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, rows, row_bytes)
        size = path.stat().st_size / 2**20
        done = subprocess.run([sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return {"rows": rows, "file_mib": size, **figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of rows (default: 1000000)")
    parser.add_argument("--row-bytes", type=int, default=500, help="average size of a row in bytes (default: 500)")
    arguments = parser.parse_args()
    figures = measure(arguments.rows, arguments.row_bytes)
    for name, value in figures.items():
        print(f"{name:<22}{value:>12.2f}")
    record("jsonl-start", figures)
    return int(figures["first_prompt_seconds"] >= LIMIT_SECONDS or figures["growth_mib"] >= LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
