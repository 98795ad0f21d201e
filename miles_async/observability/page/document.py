"""Self-contained HTML documents: style, scripts and data are embedded.

Text that a model or a data set produced is displayed and never interpreted as HTML. The data is embedded as JSON, the
scripts insert it as text, and the Content-Security-Policy allows only the scripts of this package to run.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from miles_async.events import encode_json
from miles_async.observability.page.earlier import comparison, earlier_runs
from miles_async.observability.page.status import status
from miles_async.observability.state.charts import Span
from miles_async.observability.view import RunView

SOURCES = Path(__file__).parent / "html"


def document(template: str, data: Any) -> bytes:
    """Return `html/<template>` with the parts of pages that it names, its style, its scripts and `data` (as JSON)."""
    before, after = _frame(template)
    # Without `<`, the data cannot end a script element or begin a comment.
    return before + encode_json(data).replace(b"<", b"\\u003c") + after


@cache
def _frame(template: str) -> tuple[bytes, bytes]:
    """Return the parts of the document before and after its data."""
    text = (SOURCES / template).read_text()
    text = re.sub(r"\{\{(\w+\.(?:html|js|css))\}\}", lambda match: (SOURCES / match[1]).read_text(), text)
    # The policy names each script by its hash, so that a script which slips into the page some other way cannot run.
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    before, after = text.replace("{{policy}}", policy).split("{{data}}")
    return before.encode(), after.encode()


class LivePage:
    """The live page, the state that it requests once a second, and the samples that it requests when they change.

    The threads of the HTTP server call the methods.
    """

    def __init__(self, view: RunView, folder: Path | None = None) -> None:
        """The page compares the run with earlier runs beside `folder`, the run folder; None compares with none."""
        self._view = view
        self._folder = folder

    def html(self, now: float) -> bytes:
        """Return the page with the current state embedded, so that the browser can draw it without a second request."""
        with self._view.lock:
            state = page_state(self._view, "recent", now)
        earlier = comparison(earlier_runs(self._view.run, self._folder))
        return document("page.html", {"state": state, "earlier": earlier})

    def state(self, span: Span, now: float) -> bytes:
        """Return the current state as JSON, with the series of `span`."""
        with self._view.lock:
            state = page_state(self._view, span, now)
        return encode_json(state)

    def samples(self) -> bytes:
        """Return the newest samples as JSON, newest first, and the revision that changes with them."""
        with self._view.lock:
            samples = {"revision": self._view.samples.revision, "samples": self._view.samples.newest()}
        return encode_json(samples)


def page_state(view: RunView, span: Span, now: float) -> dict[str, Any]:
    """Return the status at `now` (wall-clock seconds) and the series of a span, as plain values for JSON."""
    return {
        "now": status(view, now),
        "span": span,
        "figures": view.charts.figures(span, view.until(now)),
        "rewards": view.charts.rewards(),
        "samples_revision": view.samples.revision,
    }
