"""Records what a new user sees, for the README and the tutorial.

    python -m benchmarks.pictures [flags of the run]

Runs the job of `make run` in a terminal of 88 columns, and writes

    docs/first-run.cast   the recording, for `asciinema play`
    docs/first-run.svg    everything that stays on the screen
    docs/first-run.png    the live page after most of the batches

Extra flags shorten the run: `--num-rollout 4 --eval-size 8`. The page needs Chromium (`make browser`).
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.stack.browser import chromium

DOCS = Path("docs")
COMMAND = [sys.executable, "train_async.py", "--config", "configs/smollm2-cpu.yaml"]
COLUMNS, ROWS = 88, 40
PAGE_AT = 0.75
"""Share of the batches after which the page is photographed."""

_PAGE = re.compile(r"^page +(\S+)", re.MULTILINE)
_ROW = re.compile(r"^ *(\d+)/(\d+) ", re.MULTILINE)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-HJKST]")
"""Control sequences that move the cursor or clear; those that set colors stay."""


def main() -> None:
    output = record(sys.argv[1:])
    (DOCS / "first-run.cast").write_text(
        json.dumps({"version": 2, "width": COLUMNS, "height": ROWS, "title": "make run"})
        + "".join(f"\n{json.dumps([round(seconds, 2), 'o', text])}" for seconds, text in output)
        + "\n"
    )
    draw("".join(text for _, text in output), DOCS / "first-run.svg")


def record(flags: list[str]) -> list[tuple[float, str]]:
    """Run the job in a terminal; returns its output as pairs of seconds since the start and text."""
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    output: list[tuple[float, str]] = []
    photographed = False
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMMAND, "--run-dir", f"{folder}/runs", *flags]
        run = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)
        while True:
            try:
                read = os.read(terminal, 65536)
            except OSError:  # Linux reports the end of a terminal's output as an error
                break
            text = read.decode(errors="replace").replace(f"{folder}/", "")
            output.append((time.monotonic() - started, text))
            screen = shown("".join(text for _, text in output))
            rows, page = _ROW.findall(screen), _PAGE.search(screen)
            if not photographed and rows and page and int(rows[-1][0]) >= PAGE_AT * int(rows[-1][1]):
                photographed = True
                photograph(page[1], DOCS / "first-run.png")
        if run.wait():
            raise SystemExit(f"the run ended with {run.returncode}:\n{shown(''.join(text for _, text in output))}")
    return output


def shown(output: str) -> str:
    """Return the lines that stay on the screen: after a carriage return, text is written over the line."""
    lines = _CONTROL.sub("", output).replace("\r\n", "\n").split("\n")
    return "\n".join(_overwritten(line.split("\r")).rstrip() for line in lines)


def _overwritten(parts: list[str]) -> str:
    line = ""
    for part in parts:
        line = part + line[len(part) :]
    return line


def draw(output: str, path: Path) -> None:
    """Write a picture of the terminal."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make run"))
    console.print(Text.from_ansi(shown(output)))
    console.save_svg(str(path), title="make run")


def photograph(url: str, path: Path) -> None:
    """Write a picture of the upper part of the live page."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 1500})
        page.goto(url)
        page.wait_for_timeout(3000)
        page.screenshot(path=path)


if __name__ == "__main__":
    main()
