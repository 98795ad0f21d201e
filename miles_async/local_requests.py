"""Recognizes requests that web pages send to a server on this machine.

Every web page that a user opens can send requests to ports of the user's machine. A browser hides the answer from a
page of another origin, unless the page uses DNS rebinding: its site lets its own name resolve to 127.0.0.1, so that
the browser takes the local server for the site. Both are visible in the headers of a request.
"""

from __future__ import annotations

from urllib.parse import urlsplit

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


def foreign_request(host: str | None, origin: str | None) -> str | None:
    """Return a sentence if a web page of another site sent the request; None if the request may be answered.

    `host` and `origin` are the HTTP headers. Programs such as Prometheus send no origin. Through a tunnel (`ssh -L`),
    the port in both headers differs from that of the server.
    """
    try:
        address = urlsplit(f"//{host or ''}")
        # A host has no user name: `evil.com@127.0.0.1` is the address of something else in other programs.
        name = address.hostname if address.netloc == host and "@" not in host else None
    except ValueError:
        name = None
    if name not in LOCAL_NAMES:
        return "refused: this server answers only requests to 127.0.0.1 or localhost"
    if origin is not None and origin.removeprefix("http://") != host:
        return f"refused: a web page of another origin sent this request; open http://{host} itself"
    return None
