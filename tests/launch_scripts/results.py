"""What the recorded launch scripts of verl mean here: `python -m tests.launch_scripts.results` prints a table.

Each row has the script, the number of its keys, how many of them are mapped to settings, compared with what a run does,
without effect and refused, and how `--check-config` ends. A script for vLLM is run as it is and with SGLang.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_async.config import model_source
from miles_async.config.flags import parse_flags
from miles_async.config.load import checked_config
from tests.launch_scripts.replay import Script, scripts

ENGINE = "actor_rollout_ref.rollout.name"
SGLANG: Mapping[str, str] = {ENGINE: "sglang"}
"""The edit of a script whose engines run vLLM."""


@dataclass(frozen=True)
class Result:
    """What the keys of a script mean here."""

    mapped: Sequence[str]
    without_effect: Sequence[str]
    refused: Sequence[str]
    compared: Sequence[str]
    problems: Sequence[str]
    """The sentences with which `--check-config` refuses the script."""

    @classmethod
    def of(cls, script: Script, folder: Path, changed: Mapping[str, str] | None = None) -> Result:
        """Check a script, whose paths are in `folder`, with other values of the keys in `changed`."""
        flags = parse_flags(script.command(folder, changed))
        refused = " ".join(flags.problems)
        problems = checked_config(flags, entry=script.entry)[1]
        sources = {word for one in flags.assignments for word in one.source.split()}
        kinds: dict[str, list[str]] = {name: [] for name in ("mapped", "without_effect", "refused", "compared")}
        for key in dict.fromkeys(row[0].lstrip("+~") for row in script.arguments):
            if re.search(rf"{re.escape(key)}(?![\w.])", refused):
                kinds["refused"].append(key)
            elif key in sources:
                kinds["mapped"].append(key)
            else:
                kinds["without_effect" if key in flags.idle else "compared"].append(key)
        return cls(**kinds, problems=problems)


def main() -> None:
    # Models of Megatron-Bridge are checked as if it were installed.
    model_source._bridge_complaint = lambda: None
    print("script | keys | mapped | compared | without effect | refused | --check-config")
    for script in scripts("verl"):
        with tempfile.TemporaryDirectory() as folder:
            result = Result.of(script, Path(folder))
            ends = _end(result)
            if script.words(ENGINE) == ["vllm"]:
                with_sglang = Result.of(script, Path(folder), SGLANG)
                ends += f"; with SGLang {_end(with_sglang)}"
        counts = map(len, (result.mapped, result.compared, result.without_effect, result.refused))
        keys = len({row[0].lstrip("+~") for row in script.arguments})
        print(" | ".join(map(str, (script.name, keys, *counts, ends))))


def _end(result: Result) -> str:
    return f"exit 2, {len(result.problems)} problems" if result.problems else "exit 0"


if __name__ == "__main__":
    main()
