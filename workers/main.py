"""The command `miles-async`, which an installed wheel provides: each subcommand belongs to another module.

miles-async train --config my.yaml      the same as python train_async.py --config my.yaml
miles-async report runs/latest          the report of a run
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

import miles_async
from miles_async.observability.output import protect_output


def train(argv: Sequence[str]) -> NoReturn:
    """Train asynchronously, with the flags of train_async.py."""
    from miles_async.config.cli import parse_or_exit

    from .check_config import read_files

    config = parse_or_exit(argv, entry="train_async.py", command="miles-async train", read_files=read_files)
    # Ctrl-C simply ends this process until the driver has started something that it must end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The number of engines cannot change yet, see SIGHUP in docs/how-to/cluster.md.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Heavy packages such as torch and Ray are imported only after the configuration has been checked.
    from .driver import drive, leave

    leave(drive(config, argv, entry="train_async.py"))


OTHERS: Mapping[str, tuple[str, str]] = {
    "report": ("miles_async.observability.page.report", "Write one HTML file about a run, or about two."),
    "groups": (
        "miles_async.observability.trace.groups",
        "Show where the groups of a run are, or the life of one group.",
    ),
    "inspect": (".inspect_rollout", "Show a batch that a run saved."),
    "recordings": (
        "miles_async.adapters.storage.recordings_command",
        "List or remove recordings that --skip-rollout-enable or --skip-async-rollout-enable made.",
    ),
    "doctor": (".doctor", "Show what this machine has, what works on it, and what to set."),
}
"""The other subcommands by name: the module whose `main` runs it, which is imported only then, and its help."""


def main() -> int:
    """Run the subcommand that the command line names; returns its exit code, or 2 if it names none."""
    protect_output()
    match sys.argv[1:]:
        case ["--version"]:
            print(f"miles-async {miles_async.__version__}")
        case ["-h" | "--help"]:
            print(_usage())
        case ["train", *argv]:
            train(argv)
        case [name, *argv] if name in OTHERS:
            module, _ = OTHERS[name]
            return int(import_module(module, __package__).main(argv))
        case _:
            print(_usage(), file=sys.stderr)
            return 2
    return 0


def _usage() -> str:
    helps = {"train": train.__doc__, **{name: text for name, (_, text) in OTHERS.items()}}
    commands = (f"  {name:<12}{text}" for name, text in helps.items())
    return "\n".join(
        [
            "usage: miles-async COMMAND [ARGUMENT]...",
            "",
            *commands,
            "",
            "  --version   Print the version.",
            "  COMMAND --help lists the arguments of a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
