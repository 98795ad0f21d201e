"""A real Prometheus on runs of this machine: live ones, or one that has ended.

python -m dashboards.prometheus [--runs runs] [--port 9090]
python -m dashboards.prometheus --recorded runs/latest
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from dashboards.recorded import write_openmetrics
from miles_async.adapters.system.network_ports import free_port
from miles_async.errors import UserError

FOLDER = Path(__file__).parent
START_SECONDS = 30.0


class Prometheus:
    """Runs while the context lasts; keeps what it scrapes in `storage`, or forgets it."""

    def __init__(self, runs: Path, *, port: int = 0, scrape_seconds: int = 5, storage: Path | None = None) -> None:
        """`runs` is the `--run-dir` of the runs it looks at; engines and router are asked every `scrape_seconds`."""
        self.url = f"http://127.0.0.1:{port or free_port()}"
        self._runs = runs
        self._scrape_seconds = scrape_seconds
        self._storage = storage

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="prometheus-")
        folder = Path(self._folder.name)
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration(self._runs.absolute(), self._scrape_seconds)))
        command = [
            binary("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={self._storage or folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            "--storage.tsdb.retention.time=100y",
            "--log.level=warn",
        ]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log)
        try:
            self._until_ready(folder / "log")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query, now or `at` a time. Raises ValueError for an expression that is none."""
        result: list[dict[str, Any]] = self._ask("query", query=expression, **({"time": at} if at else {}))["result"]
        return result

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self._ask("alerts")["alerts"] if alert["state"] == "firing"}

    def up(self) -> dict[str, bool]:
        """Whether each process could be scraped, by its name."""
        return {series["metric"]["process"]: series["value"][1] == "1" for series in self.query("up")}

    def wait(self) -> None:
        self._process.wait()

    def _ask(self, what: str, **parameters: Any) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            raise ValueError(f"{parameters}: {json.load(refused)['error']}") from refused

    def _until_ready(self, log: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready") as answer:
                if answer.status == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"prometheus did not start at {self.url} (--port takes another):\n{log.read_text()}")
            time.sleep(0.1)


def configuration(runs: Path, scrape_seconds: int) -> dict[str, Any]:
    """`prometheus.yml` with the paths of this machine."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": f"{scrape_seconds}s", "scrape_timeout": f"{scrape_seconds}s"}
    config["rule_files"] = [str(FOLDER / rules) for rules in config["rule_files"]]
    config["scrape_configs"][0]["file_sd_configs"][0]["files"] = [str(runs / "targets" / "*.json")]
    return config


def binary(name: str) -> str:
    """Where `prometheus` or `promtool` is: beside this Python, where setting up puts it, or on the path."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=places)
    if found is None:
        raise SystemExit(f"{name} is not installed. On Debian and Ubuntu: sudo apt-get install prometheus")
    return found


def load_recorded(run: Path, storage: Path) -> float:
    """Fill `storage` with the run's metrics as they were, recording rules included; returns when the run ended."""
    with tempfile.TemporaryDirectory() as folder:
        exposition = Path(folder) / "metrics.txt"
        began, ended = write_openmetrics(run, exposition)
        _promtool("create-blocks-from", "openmetrics", str(exposition), str(storage))
    rules = str(FOLDER / "rules" / "recording.yml")
    with Prometheus(run, storage=storage) as prometheus:
        span = [f"--start={began:.0f}", f"--end={ended:.0f}", "--eval-interval=2s"]
        _promtool("create-blocks-from", "rules", *span, f"--url={prometheus.url}", f"--output-dir={storage}", rules)
    return ended


def _promtool(*arguments: str) -> None:
    ended = subprocess.run([binary("promtool"), "tsdb", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"promtool {' '.join(arguments)}: {ended.stderr or ended.stdout}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the runs' --run-dir")
    parser.add_argument("--recorded", type=Path, help="folder of a run that has ended")
    parser.add_argument("--port", type=int, default=9090)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as storage:
        try:
            ended = load_recorded(arguments.recorded, Path(storage)) if arguments.recorded else None
        except (OSError, UserError) as error:
            raise SystemExit(f"monitoring: {arguments.recorded} is no run folder that can be read: {error}") from error
        with Prometheus(arguments.runs, port=arguments.port, storage=Path(storage)) as prometheus:
            when = f"&g0.end_input={time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(ended))}" if ended else ""
            shown = urllib.parse.quote("miles_async_verdict == 1")
            print(f"Prometheus: {prometheus.url}/graph?g0.expr={shown}&g0.tab=0{when.replace(' ', '%20')}")
            print(f"Alerts:     {prometheus.url}/alerts")
            print("Dashboards: import dashboards/grafana/*.json into a Grafana whose data source is that address")
            with suppress(KeyboardInterrupt):
                prometheus.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
