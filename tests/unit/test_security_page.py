"""Every test that SECURITY.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)(?:::)?)?(test_\w+)?`")


def test_every_test_that_the_security_page_names_exists() -> None:
    page = Path("SECURITY.md").read_text()
    named = [(file, function) for file, function in NAMED.findall(page) if file or function]
    assert len(named) > 15
    functions = "".join(path.read_text() for path in Path("tests").rglob("test_*.py"))
    missing = [file for file, _ in named if file and not Path(file).is_file()]
    for file, function in named:
        text = Path(file).read_text() if file else functions
        if function and f"def {function}(" not in text:
            missing.append(function)
    assert missing == []
