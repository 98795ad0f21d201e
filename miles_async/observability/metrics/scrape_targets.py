"""The targets file of a run, with which Prometheus discovers the run and its engines (`file_sd_configs`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from miles_async.atomic_files import write_atomically
from miles_async.config.schema.observability import TARGETS_FOLDER
from miles_async.observability.run_folder import RunFolder

DRIVER_SCRAPE = {"__scrape_interval__": "2s", "__scrape_timeout__": "2s"}
"""The driver is scraped more often than the engines. It answers within milliseconds and notices first when a process
hangs, whereas an engine under load may take a second to answer."""


class ScrapeTargets:
    """Keeps `<run_dir>/targets/<run>.json` up to date, and removes it when the run ends."""

    def __init__(self, folder: RunFolder, metrics_url: str) -> None:
        self._run = folder.path.name
        self.path = folder.path.parent / TARGETS_FOLDER / f"{self._run}.json"
        self._driver = urlsplit(metrics_url).netloc
        self._addresses: dict[str, str] | None = None

    def write(self, addresses: Mapping[str, str]) -> None:
        """Write the file if `addresses` (`host:port` by process name) have changed. The driver is always included.

        Raises OSError if the file cannot be written.
        """
        if addresses == self._addresses:
            return
        self._addresses = dict(addresses)
        entries = [self._entry("miles_async", "driver", self._driver, DRIVER_SCRAPE)]
        for process, address in sorted(addresses.items()):
            job = "sglang_router" if process == "router" else "sglang"
            entries.append(self._entry(job, process, address, {}))
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self.path, (json.dumps(entries, indent=2) + "\n").encode())

    def remove(self) -> None:
        """Remove the file. Raises OSError if the folder cannot be written."""
        self.path.unlink(missing_ok=True)

    def _entry(self, job: str, process: str, address: str, labels: Mapping[str, str]) -> dict[str, Any]:
        return {"targets": [address], "labels": {"job": job, "run": self._run, "process": process, **labels}}
