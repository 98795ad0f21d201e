"""Proves that the test which the table names for a setting fails when the setting is ignored.

    python -m tests.mutate_settings                     # every setting whose test is a unit test or a simulation
    python -m tests.mutate_settings --tier stack        # those whose test needs real engines or torch: an hour
    python -m tests.mutate_settings num_rollout trace   # these settings
    python -m tests.mutate_settings --skip trace load   # all of the tier but these, for instance after an interruption

`tests/unit/config/test_every_setting_changes_behaviour.py` names a test for each setting whose effect it does not
compute itself. For each of them this script runs the test in processes in which reading the setting gives its default,
whatever was configured, and reports the tests that pass nevertheless. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_async.config.fields import SETTINGS
from tests.unit.config.test_every_setting_changes_behaviour import NAMED

ROOT = Path(__file__).parents[1]

# Python runs a module of this name at the start of every process, the test's own children and Ray's workers included.
SITECUSTOMIZE = """
import importlib.util, os, sys

SCHEMA = "miles_async.config.schema"


def ignore(section, path):
    for part in path[:-1]:
        section = section.model_fields[part].annotation
    name, default = path[-1], section.model_fields[path[-1]].get_default(call_default_factory=True)
    items = section.__iter__
    section.__iter__ = lambda self: ((key, default if key == name else value) for key, value in items(self))
    setattr(section, name, property(lambda self: default))


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != SCHEMA:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_ignore(module):
            execute(module)
            ignore(module.RunConfig, os.environ["IGNORED_SETTING"].split("."))

        spec.loader.exec_module = execute_and_ignore
        return spec


sys.meta_path.insert(0, Finder())
"""


def is_slow(test: str) -> bool:
    """Whether the test needs real engines or torch."""
    return test.partition("/")[0] in ("run", "stack", "torch")


def survivors(named: Mapping[str, str], limit: float) -> Iterator[str]:
    """Yields the settings whose test passes although the setting is ignored."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SITECUSTOMIZE)
        for name, test in named.items():
            environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "IGNORED_SETTING": SETTINGS[name].dotted}
            words = [sys.executable, "-m", "pytest", f"tests/{test}", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
            began = time.monotonic()
            try:
                done = subprocess.run(
                    words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
                )
            except subprocess.TimeoutExpired:
                outcome, last = "noticed", f"the test did not end within {limit:.0f} s"
            else:
                outcome = {0: "NOT NOTICED", 1: "noticed"}.get(done.returncode, "NOT RUN")
                failed = [line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR", "/"))]
                last = failed[0] if failed else done.stdout.strip().rpartition("\n")[2]
            print(
                f"{outcome:11} {name} ({time.monotonic() - began:.0f} s) {test}\n            {last[:200]}", flush=True
            )
            if outcome != "noticed":
                yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="settings; all of the tier if none is given")
    parser.add_argument("--tier", choices=("fast", "stack"), default="fast")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="settings to leave out")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds per test")
    options = parser.parse_args()
    chosen = {
        name: test
        for name, test in NAMED.items()
        if (name in options.names if options.names else is_slow(test) == (options.tier == "stack"))
        and name not in options.skip
    }
    found = list(survivors(chosen, options.limit))
    print(f"{len(chosen) - len(found)} of {len(chosen)} tests noticed that their setting was ignored")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
