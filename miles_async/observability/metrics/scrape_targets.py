"""Where Prometheus finds a run: one file per run for its file-based discovery, rewritten as engines come and go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from miles_async.observability.run_folder import RunFolder

OFTEN = {"__scrape_interval__": "2s", "__scrape_timeout__": "2s"}
"""The driver answers in milliseconds and knows first when something hangs; an engine under load may take a second."""


class ScrapeTargets:
    """`<run_dir>/targets/<run>.json`; it is gone when the run is, so that nobody asks at addresses of the dead."""

    def __init__(self, folder: RunFolder, metrics_url: str) -> None:
        self._run = folder.path.name
        self._path = folder.path.parent / "targets" / f"{self._run}.json"
        self._driver = urlsplit(metrics_url).netloc
        self._addresses: dict[str, str] | None = None

    def write(self, addresses: Mapping[str, str]) -> None:
        """`addresses` are host and port by process; the driver's own is added. Writes only what has changed."""
        if addresses == self._addresses:
            return
        self._addresses = dict(addresses)
        entries = [self._entry("miles_async", "driver", self._driver, OFTEN)]
        entries += [self._entry(_job(process), process, address, {}) for process, address in sorted(addresses.items())]
        self._path.parent.mkdir(exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(entries, indent=2) + "\n")
        partial.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _entry(self, job: str, process: str, address: str, further: Mapping[str, str]) -> dict[str, Any]:
        return {"targets": [address], "labels": {"job": job, "run": self._run, "process": process, **further}}


def _job(process: str) -> str:
    return "sglang_router" if process == "router" else "sglang"
