"""Starts and ends the cluster: one network namespace per node, and one with the bridge that joins them.

    miles0-head      10.77.0.1   Ray's head node, and the driver: rollout worker and router
    miles0-learner   10.77.0.2   the learner
    miles0-engines   10.77.0.3   the engines
    miles0-switch    no address; has the bridge and one port per node

The machine's own network is not connected to the bridge, so no packet leaves these namespaces. To unplug a node, its
port at the bridge is set down: the node keeps its address and reaches itself, as if a cable had been pulled.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.errors import UserError

HEAD, LEARNER, ENGINES = NODES = ("head", "learner", "engines")
"""In order of their addresses. The learner takes the first devices of a run, so the engines get those of the last."""
ADDRESSES = dict(zip(NODES, ("10.77.{}.1", "10.77.{}.2", "10.77.{}.3"), strict=True))
RAY_PORT = 6379
RAY_SETTINGS = {
    "RAY_worker_niceness": "0",
    # A node that does not answer is dead after 3 checks of 3 s with pauses of 2 s: 13 s instead of about 60 s.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    # A connection without answers is closed after 20 s, and a node that does not reach the head node ends all its
    # processes 10 s later. The first time must exceed the 13 s above, or calls over a link that heals would fail.
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
"""Environment variables of `ray start`. With Ray's defaults, a lost node is noticed after a minute."""
KERNEL_SETTINGS = {"tcp_keepalive_intvl": 5, "tcp_keepalive_probes": 3}
"""With them, sglang-router gives up its connections to a lost node after 45 seconds instead of twelve minutes."""
START_SECONDS = 120.0
END_SECONDS = 10.0
"""Time for processes to end after SIGTERM; then they are killed."""
OBJECT_STORE_BYTES = 200_000_000
_STARTED = "Ray runtime started."


@dataclass(frozen=True)
class LocalCluster:
    """The cluster with a given number. Clusters with different numbers do not disturb each other."""

    number: int = 0
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list, compare=False, repr=False)
    """The processes that this object has started, one per node."""

    @property
    def folder(self) -> Path:
        """Folder of the logs, and of the files of Ray. Its path is short, because Ray puts sockets into it."""
        return Path(tempfile.gettempdir()) / f"miles{self.number}-cluster"

    @property
    def address(self) -> str:
        """The value of `--ray-address`."""
        return f"{ADDRESSES[HEAD].format(self.number)}:{RAY_PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of Ray and of the jobs that join it: a job must use tokens only if Ray does."""
        return {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"}

    def namespace(self, node: str) -> str:
        return f"miles{self.number}-{node}"

    def inside(self, node: str, *command: str) -> list[str]:
        """Return the command line that runs `command` on a node."""
        return ["ip", "netns", "exec", self.namespace(node), *command]

    def up(self, engines: int = 1) -> None:
        """Start the cluster; does nothing if it runs. Its nodes have room for one learner rank and so many engines.

        Ray fills one node before it uses another one, so a job with fewer engines would share a node with the learner.

        Raises UserError if this machine has no network namespaces, or if Ray does not start.
        """
        require_namespaces()
        if self._is_up():
            return
        self.down()
        self.folder.mkdir(parents=True)
        self._connect()
        head = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        self._wait_for_ray(HEAD, self._start_ray(HEAD, 0, *head))
        sizes = {LEARNER: 1, ENGINES: engines}
        started = {node: self._start_ray(node, cores, f"--address={self.address}") for node, cores in sizes.items()}
        for node, process in started.items():
            self._wait_for_ray(node, process)

    def down(self) -> None:
        """End all processes on the nodes, then remove the namespaces; does nothing if there are none."""
        namespaces = [self.namespace(node) for node in (*NODES, "switch")]
        existing = [name for name in namespaces if name in _namespaces()]
        for number, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
            deadline = time.monotonic() + patience
            for pid in _processes(existing):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            while _processes(existing) and time.monotonic() < deadline:
                time.sleep(0.1)
        while self._started:
            self._started.pop().wait(END_SECONDS)
        for name in existing:
            _ip("netns", "delete", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def unplug(self, node: str) -> None:
        """Cut the link between a node and the others."""
        _ip("-netns", self.namespace("switch"), "link", "set", "dev", node, "down")

    def plug(self, node: str) -> None:
        """Restore the link of a node."""
        _ip("-netns", self.namespace("switch"), "link", "set", "dev", node, "up")

    def lose(self, node: str) -> None:
        """Lose a node for good, as in a power failure: the others get no packet from it any more."""
        self.unplug(node)
        while pids := self.processes(node):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def processes(self, node: str) -> list[int]:
        """Return the process ids of all processes on a node."""
        return _processes([self.namespace(node)])

    def log(self, node: str) -> Path:
        """Return the log of Ray on a node."""
        return self.folder / f"{node}.log"

    def _is_up(self) -> bool:
        existing = _namespaces()
        if not all(self.namespace(node) in existing and self.processes(node) for node in NODES):
            return False
        return all(_STARTED in self.log(node).read_text() for node in NODES if self.log(node).exists())

    def _connect(self) -> None:
        switch = self.namespace("switch")
        for name in (switch, *map(self.namespace, NODES)):
            _ip("netns", "add", name)
        _ip("-netns", switch, "link", "add", "name", "bridge0", "type", "bridge")
        _ip("-netns", switch, "link", "set", "dev", "bridge0", "up")
        for node in NODES:
            name, address = self.namespace(node), ADDRESSES[node].format(self.number)
            _ip("-netns", switch, "link", "add", "name", node, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-netns", switch, "link", "set", "dev", node, "master", "bridge0")
            _ip("-netns", switch, "link", "set", "dev", node, "up")
            _ip("-netns", name, "address", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-netns", name, "link", "set", "dev", interface, "up")
            for option, value in KERNEL_SETTINGS.items():
                command = f"echo {value} > /proc/sys/net/ipv4/{option}"
                subprocess.run(self.inside(node, "sh", "-c", command), check=True)

    def _start_ray(self, node: str, cores: int, *flags: str) -> subprocess.Popen[bytes]:
        """Start Ray on a node. A node other than the head starts it again when it ends, as Kubernetes would."""
        ray = str(Path(sys.executable).with_name("ray"))
        address = f"--node-ip-address={ADDRESSES[node].format(self.number)}"
        sizes = (f"--num-cpus={cores}", f"--object-store-memory={OBJECT_STORE_BYTES}")
        files = f"--temp-dir={self.folder / node}"
        command = shlex.join([ray, "start", "--block", "--disable-usage-stats", address, files, *sizes, *flags])
        script = command if node == HEAD else f"while true; do {command}; sleep 1; done"
        with self.log(node).open("wb") as log:
            started = subprocess.Popen(
                self.inside(node, "bash", "-c", script),
                env={**self.environment, **RAY_SETTINGS},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def _wait_for_ray(self, node: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while _STARTED not in (log := self.log(node).read_text()):
            if time.monotonic() > deadline or process.poll() is not None:
                self.down()
                last = (log.strip().splitlines() or ["it printed nothing"])[-1]
                raise UserError(f"Ray did not start on node {node} of the cluster: {last}")
            time.sleep(0.2)


def require_namespaces() -> None:
    """Raises UserError if this process cannot make network namespaces."""
    if shutil.which("ip") is None:
        raise UserError("a cluster on one machine needs the command `ip`: install the package iproute2")
    if os.geteuid() != 0:
        raise UserError("a cluster on one machine needs network namespaces, which only root may create: run it as root")
    name = f"miles-check-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        raise UserError(f"this machine does not allow network namespaces: {error.stderr.strip()}") from error


def _namespaces() -> list[str]:
    """The names of all network namespaces of this machine."""
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _processes(namespaces: Sequence[str]) -> list[int]:
    return [int(pid) for name in namespaces for pid in _ip("netns", "pids", name).split()]


def _ip(*arguments: str) -> str:
    """Run `ip`; return its output. Raises CalledProcessError if it fails."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
