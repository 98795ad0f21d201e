"""The command `miles-async`, which an installed wheel provides: each subcommand belongs to another module.

miles-async train --config my.yaml      the same as python train_async.py --config my.yaml
miles-async report runs/latest          the report of a run
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
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


def report(argv: Sequence[str]) -> int:
    """Write one HTML file about a run, or about two."""
    from miles_async.observability.page.report import main

    return main(argv)


def groups(argv: Sequence[str]) -> int:
    """Show where the groups of a run are, or the life of one group."""
    from miles_async.observability.trace.groups import main

    return main(argv)


def inspect(argv: Sequence[str]) -> int:
    """Show a batch that a run saved."""
    from .inspect_rollout import main

    return main(list(argv))


def doctor(argv: Sequence[str]) -> int:
    """Show what this machine has, what works on it, and what to set."""
    from .doctor import main

    return main(argv)


def recordings(argv: Sequence[str]) -> int:
    """List or remove recordings that --skip-rollout-enable or --skip-async-rollout-enable made."""
    from miles_async.adapters.storage.recordings_command import main

    return main(argv)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    command.__name__: command for command in (train, report, groups, inspect, recordings, doctor)
}


def main() -> int:
    """Run the subcommand that the command line names; returns its exit code, or 2 if it names none."""
    protect_output()
    match sys.argv[1:]:
        case ["--version"]:
            print(f"miles-async {miles_async.__version__}")
        case ["-h" | "--help"]:
            print(_usage())
        case [name, *argv] if name in COMMANDS:
            return COMMANDS[name](argv)
        case _:
            print(_usage(), file=sys.stderr)
            return 2
    return 0


def _usage() -> str:
    commands = (f"  {name:<12}{command.__doc__}" for name, command in COMMANDS.items())
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
