"""Prints a batch that a run saved: `python -m workers.inspect_rollout FILE [--sample INDEX]`.

Without `--sample`, it prints a table of the groups. With `--sample`, it prints one sample in full.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from miles_async.adapters.storage.rollout_file import load_groups
from miles_async.errors import UserError
from miles_async.observability.output import protect_output
from miles_async.types import Group, Sample
from miles_async.visible_text import visible_text


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="make inspect ARGS=", description=__doc__)
    parser.add_argument("file", type=Path, help="file that --save-debug-rollout-data or --dump-details wrote")
    parser.add_argument("--sample", type=int, help="index of a sample to print in full")
    protect_output()
    options = parser.parse_args(argv)
    try:
        rollout_id, groups = load_groups(options.file)
        print(table(rollout_id, groups) if options.sample is None else sample_details(groups, options.sample))
    except UserError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    return 0


def table(rollout_id: int, groups: list[Group]) -> str:
    """Return a table with a headline, and one line per group."""
    head = f"{'group':<18}{'samples':<12}{'rewards':<28}{'tokens':<22}{'versions':<10}{'status'}"
    return "\n".join([f"rollout {rollout_id}: {len(groups)} groups", head, *map(_row, groups)])


def _row(group: Group) -> str:
    indices = [sample.index or 0 for sample in group]
    rewards = " ".join(_reward(sample) for sample in group)
    lengths = " ".join(str(sample.response_length) for sample in group)
    versions = [span.version for sample in group for span in sample.spans]
    span = f"{min(versions)}-{max(versions)}" if versions else "none"
    status = ", ".join(f"{count} {name}" for name, count in Counter(sample.status.value for sample in group).items())
    removed = sum(sample.remove_sample for sample in group)
    status += f", {removed} removed from the loss" if removed else ""
    index_range = f"{min(indices)}-{max(indices)}"
    rewards, lengths = _shorten(rewards, 26), _shorten(lengths, 20)
    return f"{group.feed_index:<18}{index_range:<12}{rewards:<28}{lengths:<22}{span:<10}{status}"


def sample_details(groups: list[Group], index: int) -> str:
    """Return prompt, response and all fields of a sample, or of each segment of a trajectory.

    Raises UserError if there is no sample with this index.
    """
    segments = [sample for group in groups for sample in group if sample.index == index]
    if not segments:
        known = sorted({sample.index for group in groups for sample in group if sample.index is not None})
        raise UserError(
            f"the file has no sample {index}: choose one from {known[0]} to {known[-1]}"
            if known
            else "the file has no samples"
        )
    return visible_text("\n\n".join(map(_details, segments)))


def _details(sample: Sample) -> str:
    fields = {
        "status": sample.status.value,
        "reward": sample.reward,
        "label": sample.label,
        "tokens": f"{len(sample.tokens)}, {sample.response_length} of them in the response",
        "trained": "all response tokens"
        if sample.loss_mask is None
        else f"{sum(sample.loss_mask)} of the response tokens",
        "turns": ", ".join(f"{'model' if t.sampled else 'other'} [{t.start}, {t.end})" for t in sample.turns) or "none",
        "versions": ", ".join(f"{s.version} for [{s.start}, {s.end})" for s in sample.spans) or "none",
        "metadata": sample.metadata,
    }
    lines = [f"{name:<10}{value}" for name, value in fields.items()]
    return "\n".join([*lines, "--- prompt", str(sample.prompt), "--- response", sample.response])


def _reward(sample: Sample) -> str:
    reward = sample.reward
    if isinstance(reward, dict):
        reward = None if sample.reward_key is None else reward.get(sample.reward_key)
    return "-" if reward is None else f"{reward:g}"


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
