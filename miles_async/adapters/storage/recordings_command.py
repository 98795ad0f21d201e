"""Lists or removes recordings: `python -m miles_async.skip ls|rm [--dir DIR] [--steps 1-128 …]`."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from miles_async.adapters.storage.recording_store import size_of, steps_in
from miles_async.config.schema import SkipRole
from miles_async.observability.output import protect_output
from miles_async.recording import Steps


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m miles_async.skip", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["ls", "rm"])
    parser.add_argument("--dir", default=SkipRole().dump_dir, help="folder of the recordings (the setting dump_dir)")
    parser.add_argument("--steps", nargs="+", default=["0-"], help="steps such as 3 or 1-128; default: all")
    protect_output()
    options = parser.parse_args(argv)
    try:
        steps = Steps.parse(options.steps)
    except ValueError as error:
        parser.error(str(error))
    folders = sorted(path for path in Path(options.dir).expanduser().glob("*/GBS*_N*_in*_out*") if path.is_dir())
    if not folders:
        print(f"no recordings in {options.dir}")
    for folder in folders:
        entries = [step for step in steps_in(folder) if step in steps]
        size = sum(size_of(folder / str(step)) for step in entries)
        name = folder.relative_to(Path(options.dir).expanduser())
        if options.command == "rm":
            for step in entries:
                shutil.rmtree(folder / str(step))
            print(f"{name}: removed {len(entries)} steps, {size:,} bytes")
        else:
            damaged = len(list(folder.glob("*.damaged-*")))
            aside = f", {damaged} set aside as damaged" if damaged else ""
            print(f"{name}: {len(entries)} steps ({_ranges(entries)}), {size:,} bytes{aside}")
    return 0


def _ranges(steps: Iterable[int]) -> str:
    """Format ascending steps as ranges, for example `1-3 7`."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) or "none"
