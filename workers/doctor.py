"""`make doctor`: shows what this machine has, what works on it, and what to set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from miles_async.adapters.system.machine import read_machine
from miles_async.config.schema import RunConfig
from miles_async.doctor.findings import diagnose
from miles_async.doctor.text import INDENT, render
from miles_async.observability.console.logging import fit_to_terminal
from miles_async.observability.output import protect_output


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 1 if `make run` cannot work on this machine."""
    parser = argparse.ArgumentParser(
        prog="doctor", description="Show what this machine has, what works on it, and what to set."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports and scripts")
    protect_output()
    arguments = parser.parse_args(argv)
    config = RunConfig()
    runs, cache = config.observability.run_dir, config.warm_start.cache_dir
    machine = read_machine(Path(runs), Path(cache).expanduser())
    diagnosis = diagnose(machine)
    if arguments.json:
        values = {"machine": machine, "diagnosis": diagnosis}
        print(msgspec.json.format(msgspec.json.encode(values), indent=2).decode())
    else:
        for line in render(machine, diagnosis).splitlines():
            print(fit_to_terminal(line, sys.stdout, indent=INDENT))
    return 0 if diagnosis.run_works else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
