"""Shows that a change of structure changes no behaviour: the event streams of all simulated runs, before and after.

    pytest tests/sim -p tests.sim.event_streams --event-streams before      # and later, with the change: after
    python -m tests.sim.event_streams before after [--renamed renamed.json]

Each simulated run that a test plays becomes one file of `events.jsonl`'s format. `renamed.json` maps old names to new
ones: `{"types": {...}, "fields": {...}, "values": {...}}`. The exit code is 1 if a stream differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from miles_async.events import Event, encode
from miles_async.identity import IdentityMap
from tests.sim.world import World

TEMPORARY = re.compile(rb"/tmp\w{8}/")
"""The random name of a temporary folder."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--event-streams", type=Path, help="folder for the event stream of each simulated run")


@pytest.fixture(autouse=True)
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder: Path = request.config.getoption("--event-streams")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", request.node.nodeid.removeprefix("tests/sim/"))
    streams = IdentityMap[World, gzip.GzipFile]()
    emit = World.emit

    def record(world: World, event: Event) -> None:
        if world not in streams:
            path = folder / f"{name}-{len(streams)}.jsonl.gz"
            streams[world] = files.enter_context(gzip.open(path, "wb", compresslevel=1))  # noqa: SIM115
        streams[world].write(encode(event) + b"\n")
        emit(world, event)

    monkeypatch.setattr(World, "emit", record)
    with ExitStack() as files:
        yield


def difference(before: Path, after: Path, renamed: Mapping[str, Mapping[str, str]]) -> str | None:
    """Describe the first event that differs between two files; None if there is none."""
    with gzip.open(before) as old, gzip.open(after) as new:
        for number, (was, now) in enumerate(zip_longest(old, new), 1):
            if was is None or now is None:
                return f"line {number}: the stream {'ended here' if was is None else 'ends here now'}"
            was, now = (TEMPORARY.sub(b"/tmp/", line) for line in (was, now))
            if was != now and (expected := _renamed(json.loads(was), renamed)) != json.loads(now):
                return f"line {number}:\n  {json.dumps(expected)}\n  {now.decode().rstrip()}"
    return None


def _renamed(event: dict[str, Any], renamed: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    fields, values, types = (renamed.get(kind, {}) for kind in ("fields", "values", "types"))
    changed = {
        fields.get(name, name): values.get(value, value) if isinstance(value, str) else value
        for name, value in event.items()
    }
    return changed | {"type": types.get(event["type"], event["type"])}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.event_streams")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--renamed", type=Path, help="JSON with the names that changed")
    options = parser.parse_args()
    renamed = {} if options.renamed is None else json.loads(options.renamed.read_text())
    old, new = ({path.name for path in folder.iterdir()} for folder in (options.before, options.after))
    differences = {name: difference(options.before / name, options.after / name, renamed) for name in sorted(old & new)}
    for name, found in differences.items():
        if found is not None:
            print(f"{name}, {found}")
    different = sum(found is not None for found in differences.values())
    print(f"{len(old & new)} streams compared, {different} different")
    print(f"{len(old - new)} only before, {len(new - old)} only after")
    return 1 if different or old - new else 0


if __name__ == "__main__":
    sys.exit(main())
