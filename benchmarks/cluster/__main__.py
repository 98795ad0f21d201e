"""The command behind `make cluster-up` and `make cluster-down`; it also unplugs nodes by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from miles_async.errors import UserError

from .broken_links import run_series
from .nodes import HEAD, NODES, LocalCluster


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the cluster; does nothing if it runs")
    up.add_argument("--engines", type=int, default=1, help="engines of each job: its --rollout-num-gpus (default: 1)")
    commands.add_parser("down", help="end all processes on the nodes and remove their network namespaces")
    for name, what in (
        ("unplug", "cut the link of a node"),
        ("plug", "restore the link of a node"),
        ("lose", "cut the link of a node and kill its processes"),
    ):
        commands.add_parser(name, help=what).add_argument("node", choices=NODES)
    series = commands.add_parser("break", help="run a job for each broken link, and judge it; continues a series")
    series.add_argument("--results", type=Path, default=Path("benchmarks/results/broken_links.jsonl"))
    series.add_argument("--only", default="", help="only the cases whose description contains this text")
    options = parser.parse_args(argv)
    cluster = LocalCluster()
    try:
        match options.command:
            case "up":
                cluster.up(options.engines)
                print(instructions(cluster))
            case "down":
                cluster.down()
            case "unplug":
                cluster.unplug(options.node)
            case "plug":
                cluster.plug(options.node)
            case "lose":
                cluster.lose(options.node)
            case "break":
                return run_series(options.results, options.only)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def instructions(cluster: LocalCluster) -> str:
    """Return the text that `up` prints."""
    job = cluster.inside(HEAD, ".venv/bin/python", "train_async.py")
    return f"""The cluster is up: {", ".join(NODES)}, each in a network namespace. Run a job on it:

    {" ".join(job)} --config configs/arithmetic-cpu.yaml \\
        --rollout-function-path miles_async.rollout.fully_async_rollout.generate_rollout_fully_async \\
        --ray-address {cluster.address}

Break its network: .venv/bin/python -m benchmarks.cluster unplug engines (or plug, or lose)
Logs of Ray: {cluster.folder}/*.log
End it: make cluster-down"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
