"""What a check reports, how it runs in a process with a time limit, and the table of all checks.

A check writes each result to a file as soon as it has it, so that the results before a crash are kept.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from miles_async.adapters.sglang.process import cause

Status = Literal["pass", "fail", "not possible here"]
OWN_PACKAGES = ("miles_async", "workers", "benchmarks", "tests")
GRACE_SECONDS = 20.0
"""Time for a check that ran into its limit to end the processes that it has started."""


class NotPossibleError(Exception):
    """This machine lacks what a part of a check needs; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    check: str
    part: str
    status: Status
    value: float | None = None
    unit: str = ""
    limit: str = ""
    """What `value` had to be, such as `<= 0.01`; empty if it is only measured."""
    reason: str = ""
    """Why the part failed or is not possible."""


class Report:
    """Writes the results of one check to `path`, one JSON object per line."""

    def __init__(self, check: str, path: Path) -> None:
        self._check = check
        self._path = path

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the check. If it raises, the reason is reported, and the check goes on after the block."""
        self._write({"begun": name})
        try:
            yield
        except NotPossibleError as error:
            self._row(name, "not possible here", reason=str(error))
        except ImportError as error:
            # Other versions of SGLang, Megatron or torch may lack a name; the project's own modules must not.
            own = (error.name or "").partition(".")[0] in OWN_PACKAGES
            self._row(name, "fail" if own else "not possible here", reason=_described(error))
        except Exception as error:
            traceback.print_exc()
            self._row(name, "fail", reason=_described(error))
        self._write({"ended": name})

    def figure(
        self, part: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """Report a figure. It fails if it is above `at_most`, below `at_least` or not a number."""
        good = not math.isnan(value)
        limits = []
        if at_most is not None:
            good, limits = good and value <= at_most, [f"<= {at_most:g}"]
        if at_least is not None:
            good, limits = good and value >= at_least, [*limits, f">= {at_least:g}"]
        self._row(part, "pass" if good else "fail", value=value, unit=unit, limit=", ".join(limits))

    def not_possible(self, part: str, reason: str) -> None:
        """Report that a figure cannot be measured here."""
        self._row(part, "not possible here", reason=reason)

    def _row(self, part: str, status: Status, **fields: Any) -> None:
        self._write({"row": asdict(Row(check=self._check, part=part, status=status, **fields))})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run_check(
    name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str], limit: float
) -> list[Row]:
    """Run a check as a process, and return its rows. The process appends lines to `folder/NAME.jsonl`.

    A process that crashes, or has not ended after `limit` seconds, adds a row that says so. Its output is in
    `folder/NAME.log`.
    """
    results, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    results.write_text("")
    ended = ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            if code:
                ended = f"it ended with {_described_exit(code)}"
        except subprocess.TimeoutExpired:
            ended = f"it had not ended after {limit:g} s"
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(GRACE_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    rows = [Row(**line["row"]) for line in lines if "row" in line]
    if ended:
        over = {line["ended"] for line in lines if "ended" in line}
        current = [line["begun"] for line in lines if "begun" in line and line["begun"] not in over]
        text = log.read_text(errors="replace")
        reason = f"{ended}; its last error: {cause(text)} (log: {log})" if text.strip() else ended
        rows.append(Row(check=name, part=current[-1] if current else "start", status="fail", reason=reason))
    elif not rows:
        rows.append(Row(check=name, part="start", status="fail", reason=f"it reported nothing (log: {log})"))
    return rows


def table(rows: Sequence[Row], on_cpu: Mapping[tuple[str, str], float]) -> str:
    """Return the table as text. `on_cpu` are the figures of a CPU, by check and part."""
    header = ("check", "part", "result", "figure", "must be", "on a CPU")
    lines = [header]
    for row in rows:
        cpu = on_cpu.get((row.check, row.part))
        lines.append(
            (
                row.check,
                row.part,
                row.status,
                "" if row.value is None else f"{row.value:.3g} {row.unit}",
                row.limit,
                "" if cpu is None else f"{cpu:.3g} {row.unit}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = []
    for line, reason in zip(lines, ["", *(row.reason for row in rows)], strict=True):
        text.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if reason:
            text.append(f"    {reason}")
    return "\n".join(text)


def _described(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__


def _described_exit(code: int) -> str:
    return f"code {code}" if code > 0 else f"the signal {signal.Signals(-code).name}"
