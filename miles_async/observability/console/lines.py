"""Lines and progress bars that share a terminal."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

from miles_async.observability.output import controls_of
from miles_async.visible_text import visible_text


def write_line(text: str, stream: TextIO) -> None:
    """Write visible text and a newline. A progress bar on the same terminal is cleared and drawn again below."""
    with tqdm.external_write_mode(file=controls_of(sys.stderr if stream is sys.stdout else stream)):
        stream.write(f"{visible_text(text)}\n")
        stream.flush()


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no annotations
    """A progress bar that shows names and numbers as visible text in one line. It is drawn on stderr by default."""

    def __init__(self, *arguments: Any, file: TextIO | None = None, **settings: Any) -> None:
        super().__init__(*arguments, file=controls_of(sys.stderr if file is None else file), **settings)

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        # tqdm never ends if it has to shorten a line with an escape sequence, so it gets visible text.
        super().set_description_str(None if desc is None else visible_text(desc).replace("\n", "\u240a"), refresh)
