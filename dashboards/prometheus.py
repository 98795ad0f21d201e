"""Starts a Prometheus server for the runs on this machine, whose samples are kept, or for one finished run.

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
    """A Prometheus server that runs while its context is open.

    Samples are stored in `storage`, or in a temporary folder that is deleted at the end.
    """

    def __init__(self, runs: Path, *, port: int = 0, scrape_seconds: int = 5, storage: Path | None = None) -> None:
        """`runs` is the `--run-dir` of the runs to scrape. Engines and router are scraped every `scrape_seconds`."""
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
            self._wait_until_ready(folder / "log")
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
        """Return the series of an instant query, now or at a given time. Raises ValueError if it is invalid."""
        result: list[dict[str, Any]] = self._call("query", query=expression, **({"time": at} if at else {}))["result"]
        return result

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series between two times, with values `step` seconds apart. Raises ValueError if it is invalid."""
        series: list[dict[str, Any]] = self._call("query_range", query=expression, start=start, end=end, step=step)[
            "result"
        ]
        return series

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self._call("alerts")["alerts"] if alert["state"] == "firing"}

    def up(self) -> dict[str, bool]:
        """Return whether each process could be scraped, by its name."""
        return {series["metric"]["process"]: series["value"][1] == "1" for series in self.query("up")}

    def wait(self) -> None:
        self._process.wait()

    def _call(self, endpoint: str, **parameters: Any) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            raise ValueError(f"{parameters}: {json.load(refused)['error']}") from refused

    def _wait_until_ready(self, log: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready") as answer:
                if answer.status == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"prometheus did not start at {self.url} (set --port to use another port):\n{log.read_text()}"
                )
            time.sleep(0.1)


def configuration(runs: Path, scrape_seconds: int) -> dict[str, Any]:
    """Return the contents of `prometheus.yml` with absolute paths and the given scrape interval."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": f"{scrape_seconds}s", "scrape_timeout": f"{scrape_seconds}s"}
    config["rule_files"] = [str(FOLDER / rules) for rules in config["rule_files"]]
    config["scrape_configs"][0]["file_sd_configs"][0]["files"] = [str(runs / "targets" / "*.json")]
    return config


def binary(name: str) -> str:
    """Return the path of `prometheus` or `promtool`, which is next to this Python (after `make setup`) or on PATH."""
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=search_path)
    if found is None:
        raise SystemExit(f"{name} is not installed. On Debian and Ubuntu: sudo apt-get install prometheus")
    return found


def load_recorded(run: Path, storage: Path) -> tuple[float, float]:
    """Fill `storage` with the metrics of a finished run and its recording rules. Return when it began and ended."""
    with tempfile.TemporaryDirectory() as folder:
        exposition = Path(folder) / "metrics.txt"
        began, ended = write_openmetrics(run, exposition)
        _promtool("create-blocks-from", "openmetrics", str(exposition), str(storage))
    rules = str(FOLDER / "rules" / "recording.yml")
    with Prometheus(run, storage=storage) as prometheus:
        span = [f"--start={began:.0f}", f"--end={ended:.0f}", "--eval-interval=2s"]
        _promtool("create-blocks-from", "rules", *span, f"--url={prometheus.url}", f"--output-dir={storage}", rules)
    return began, ended


def _promtool(*arguments: str) -> None:
    ended = subprocess.run([binary("promtool"), "tsdb", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"promtool {' '.join(arguments)}: {ended.stderr or ended.stdout}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        help="folder of the runs, the same as --run-dir of the runs (default: runs)",
    )
    parser.add_argument(
        "--recorded", type=Path, help="folder of a finished run, whose recorded metrics are shown instead"
    )
    parser.add_argument("--port", type=int, default=9090, help="port of the Prometheus server (default: 9090)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        # The events of a finished run can be replayed again. The metrics of runs in progress exist only here.
        storage = Path(temporary) if arguments.recorded else arguments.runs.absolute() / "prometheus"
        try:
            ended = load_recorded(arguments.recorded, storage)[1] if arguments.recorded else None
        except (OSError, UserError) as error:
            raise SystemExit(f"monitoring: {arguments.recorded} is not a readable run folder: {error}") from error
        with Prometheus(arguments.runs, port=arguments.port, storage=storage) as prometheus:
            end = f"&g0.end_input={time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(ended))}" if ended else ""
            query = urllib.parse.quote("miles_async_verdict == 1")
            print(f"Prometheus: {prometheus.url}/graph?g0.expr={query}&g0.tab=0{end.replace(' ', '%20')}")
            print(f"Alerts:     {prometheus.url}/alerts")
            print("Dashboards: import dashboards/grafana/*.json into a Grafana whose data source is that address")
            with suppress(KeyboardInterrupt):
                prometheus.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
