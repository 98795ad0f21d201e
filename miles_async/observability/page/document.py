"""HTML documents that need nothing but themselves: style, scripts and data are put inside.

The data travels as JSON that a script sets as text, and the policy lets only our own scripts run: whatever a model or a
data set writes is shown, never interpreted.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from miles_async.observability.page.view import Span, View

SOURCES = Path(__file__).parent / "html"


def document(template: str, data: Any) -> bytes:
    """`html/<template>` with everything it names put inside, and `data` as JSON."""
    before, after = _frame(template)
    return before + json_in_html(data) + after


def json_in_html(data: Any) -> bytes:
    """JSON that ends no script element and begins no comment."""
    return msgspec.json.encode(data).replace(b"<", b"\\u003c")


@cache
def _frame(template: str) -> tuple[bytes, bytes]:
    """The document before and after its data."""
    text = (SOURCES / template).read_text()
    text = re.sub(r"\{\{([\w.]+\.(?:js|css))\}\}", lambda match: (SOURCES / match[1]).read_text(), text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    before, after = text.replace("{{policy}}", policy).split("{{data}}")
    return before.encode(), after.encode()


class LivePage:
    """The page, and the state it asks for once a second."""

    def __init__(self, view: View) -> None:
        self._view = view

    def html(self, now: float) -> bytes:
        """The whole page with the state of this moment in it, so that it is drawn as soon as it is there."""
        return document("page.html", self._view.state("recent", now))

    def state(self, span: Span, now: float) -> bytes:
        return msgspec.json.encode(self._view.state(span, now))
