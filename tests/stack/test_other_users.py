"""What another user of the machine, and a web page, find of a run: each socket, file and variable is listed here.

Whatever is not in the tables fails a test, so that nothing new is open without a reason.
"""

from __future__ import annotations

import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_async.events import Event, StepEnded
from tests.stack.browser import Visit, chromium
from tests.stack.conftest import Stack
from tests.stack.listeners import Listener, listeners_of
from tests.waiting import START_SECONDS

LISTENERS = {
    r"pytest|train": "the driver: the live page without a key, and Ray's port with its token",
    r"gcs_server|raylet|ray/dashboard|ray::": "Ray: its token. The endpoint for agents and weights have their own rows",
    r"sglang|engine_process": "the engine: its key; Mooncake: addresses other than loopback are dropped",
    r"router_process": "the router: its key; its metrics: nothing, on loopback",
}
"""Words in the command of a process that listens on TCP, and what a client needs."""
UNIX_SOCKETS = {
    r"/ray-\w+/ray/session_[\w-]+/sockets/(plasma_store|raylet)": "in the private folder of Ray",
    r"/tmp\w{8}": "messages between SGLang's processes; other users lack the right to write, which connecting needs",
}
"""Names of Unix sockets, and why other users cannot connect."""
FILES = {
    r"/ray-\w+": (0o700, "sockets and logs of Ray"),
    r"/tmp\w{8}": (0o755, "sockets of SGLang: see above; files and folders of Python's tempfile have no rights"),
    r"/tmp\w+wandb-(artifacts|media)": (0o700, "made by wandb when Python imports it"),
    r"/shm/sglang_loads_\w+\.shm": (0o600, "the load of an engine, for its processes"),
}
"""Names of files and folders outside of the run folder, the most that their modes allow, and what they are."""
VARIABLES = {
    r"RAY_\w+|LD_PRELOAD|SPT_NOENV": "set by Ray for its workers: no secrets",
    r"SGLANG_\w+|GLOO_SOCKET_IFNAME|NCCL_SOCKET_IFNAME|HOST_IP|MOONCAKE_\w+|MC_\w+": "settings of SGLang",
    "MILES_ASYNC_MAX_KV_STALENESS": "a setting of an engine's plug-in",
    r"OMP_\w+|TORCHDYNAMO_DISABLE|CUDA_VISIBLE_DEVICES|NO_PROXY|PYTHONPATH|COLUMNS|LINES": "settings of libraries",
    "OF_THE_ENGINE": "of the engine of other tests, which runs beside the cluster",
}
"""Variables that processes of a run have and its driver has not, and why they may."""
SHARED = re.compile(r"/(tmp|dev/shm)/")
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
BECOME_NOBODY = "os.setgroups([]); os.setgid(65534); os.setuid(65534)"
"""After the imports: the other user may be unable to read the interpreter, as one in a home folder of root."""
OPEN_TO_ALL = {
    r"sglang|engine_process": r"/health|/health_generate|/metrics",
    r"router_process": r"/health|/health_generate|/liveness|/readiness|/engine_metrics|/v1/models|/get_server_info",
}
"""Paths that servers answer without a key, by words in the command of the server. The router tells the path of the
model (`/v1/models`) and the number of engines (`/get_server_info`)."""
CONNECT = """
import os, socket, sys
{become_nobody}
for name in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(name)
        except OSError:
            continue
        print(name)
"""

ASK = """
import encodings.idna, http.client, os, sys
from concurrent.futures import ThreadPoolExecutor
{become_nobody}
READS = "/", "/metrics", "/health", "/health_generate", "/liveness", "/readiness", "/get_model_info", "/v1/models"
READS += "/engine_metrics", "/get_server_info", "/workers", "/list_workers", "/state.json", "/samples.json", "/logs"
CHANGES = "/flush_cache", "/abort_request", "/pause_generation", "/update_weights_from_disk", "/generate", "/workers"
CHANGES += "/sessions", "/trajectories", "/api/jobs/", "/update_weights_from_tensor", "/open_session", "/start_profile"
def answered(port):
    found = []
    for method, path in [*(("GET", path) for path in READS), *(("POST", path) for path in CHANGES)]:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
        try:
            client.request(method, path, body="{}" if method == "POST" else None)
            answer = client.getresponse()
        except TimeoutError:
            break  # it speaks another protocol
        except (OSError, http.client.HTTPException):
            continue
        finally:
            client.close()
        if answer.status < 400 or answer.status == 422:
            found.append(f"{port} {method} {path}")
    return found
ports = list(map(int, sys.argv[1:]))
with ThreadPoolExecutor(len(ports)) as threads:
    for found in threads.map(answered, ports):
        for line in found:
            print(line)
"""
"""Sends requests without a key. Most ports speak another protocol and never answer, so all are asked at once. A request
that is refused for its content (422) was not refused for want of a key."""

ATTACK_OF_A_PAGE = """async (ports) => {
  const read = [], limit = () => ({ signal: AbortSignal.timeout(3000) });
  const paths = ["/", "/metrics", "/state.json", "/samples.json", "/v1/models", "/get_model_info", "/workers"];
  const changes = ["/flush_cache", "/abort_request", "/sessions", "/trajectories", "/update_weights_from_disk"];
  const attempts = [];
  for (const port of ports) for (const host of ["127.0.0.1", "localhost"]) {
    const root = `http://${host}:${port}`;
    for (const path of paths) attempts.push(
      fetch(root + path, limit()).then((answer) => answer.text()).then((text) => read.push(`${root}${path} ${text}`)));
    for (const path of changes) attempts.push(
      fetch(root + path, { method: "POST", mode: "no-cors", body: '{"abort_all": true}', ...limit() }));
    attempts.push(new Promise((done) => {
      const web = new WebSocket(`ws://${host}:${port}/`);
      web.onopen = () => { read.push(`ws ${root}`); done(); };
      web.onerror = web.onclose = done;
      setTimeout(done, 3000);
    }));
  }
  await Promise.allSettled(attempts);
  return read;
}"""
"""What a page of another origin may try: to read answers, to send requests that change something, and web sockets."""


@dataclass
class Seen:
    """What there is of a run while it trains."""

    folder: Path = Path()
    listeners: list[Listener] = field(default_factory=list)
    unix_sockets: list[str] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)
    """Names and modes of files outside of the run folder."""
    variables: dict[str, set[str]] = field(default_factory=dict)
    """Variables of processes, by command, that the driver has not."""
    texts: dict[str, bytes] = field(default_factory=dict)
    """Command line and environment of each process, by command."""
    opened_by_nobody: list[str] = field(default_factory=list)
    """What another user could read, write, or connect to."""
    answered_without_a_key: list[str] = field(default_factory=list)
    """Words in the command of a server, and the requests of another user that it answered."""
    read_by_a_page: list[str] = field(default_factory=list)
    """Answers that a web page could read."""
    violations: list[str] = field(default_factory=list)
    """What was wrong with the run, which all of this happened to."""
    steps: int = 0
    keys: list[bytes] = field(default_factory=list)


def entries_of(parent: psutil.Process) -> list[psutil.Process]:
    return [parent, *parent.children(recursive=True)]


def unix_sockets_of(processes: list[psutil.Process]) -> Iterator[str]:
    """The names of the Unix sockets on which processes listen; those without a file begin with @."""
    own = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue  # it was closed
            own.add(target.removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split()
        if int(flags, 16) & 0x10000 and inode in own:
            yield name[0] if name else "without a name"


@pytest.fixture(scope="module")
def seen(stack: Stack) -> Seen:
    found = Seen()

    def look(event: Event) -> None:
        if not isinstance(event, StepEnded) or found.listeners:
            return
        processes = entries_of(psutil.Process())
        found.folder = stack.latest.resolve()
        found.listeners = list(listeners_of(psutil.Process()))
        found.unix_sockets = list(unix_sockets_of(processes))
        own_sockets = {Path(name) for name in found.unix_sockets if name.startswith("/tmp/tmp")}
        shared = shared_files_of(processes) - OF_THE_TESTS | own_sockets
        found.files = [(str(path), path.lstat().st_mode & 0o777) for path in sorted(shared)]
        for process in processes:
            command = " ".join(process.cmdline())
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            names = {entry.partition(b"=")[0].decode() for entry in environment.split(b"\0") if b"=" in entry}
            found.variables.setdefault(command, set()).update(names - set(os.environ))
            found.texts[command] = command.encode() + environment
        cluster: Any = stack.cluster
        found.keys = [cluster._key.encode(), (Path.home() / ".ray" / "auth_token").read_bytes()]
        if os.geteuid() == 0:
            found.opened_by_nobody = opened_by_nobody(found, processes)
            found.answered_without_a_key = answered_without_a_key(found.listeners)
        with ThreadPoolExecutor() as thread:  # Playwright needs a thread without an event loop
            found.read_by_a_page = thread.submit(read_by_a_page, {entry.port for entry in found.listeners}).result()

    size = ("--num-rollout", "4", "--rollout-batch-size", "4", "--eval-size", "0")
    played = stack.play("train_async.py", *size, watch=look)
    found.violations, found.steps = played.violations, len(played.of(StepEnded))
    return found


def read_by_a_page(ports: set[int]) -> list[str]:
    """Open a page of another origin in a browser, and let it ask all ports."""
    page = socketserver.TCPServer(("127.0.0.1", 0), EmptyPage)
    with page, chromium() as browser:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        visit = Visit.to(browser, f"http://127.0.0.1:{page.server_address[1]}/")
        read: list[str] = visit.page.evaluate(ATTACK_OF_A_PAGE, sorted(ports))
        page.shutdown()
    return read


class EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>another origin</title>")

    def log_message(self, format: str, *args: object) -> None: ...


def shared_files_of(processes: list[psutil.Process]) -> set[Path]:
    """The files and folders that processes use, directly in the folders that all users share."""
    names = set[str]()
    for process in processes:
        for entry in (*Path(f"/proc/{process.pid}/fd").iterdir(), *Path(f"/proc/{process.pid}/map_files").iterdir()):
            try:
                names.add(os.readlink(entry))
            except OSError:
                continue  # it was closed
    used = {Path(*Path(name).parts[: 4 if name.startswith("/dev") else 3]) for name in names if SHARED.match(name)}
    # The tests keep the folder of the run in pytest's folder.
    return {path for path in used if path.exists() and not path.name.startswith("pytest-of-")}


OF_THE_TESTS = shared_files_of([psutil.Process()])
"""Before any run: the checkout and the output of the tests may be there, too."""


def opened_by_nobody(found: Seen, processes: list[psutil.Process]) -> list[str]:
    """Let another user connect to Unix sockets, and read and write files, folders and the memory of processes."""
    connect = [sys.executable, "-c", CONNECT.replace("{become_nobody}", BECOME_NOBODY), *found.unix_sockets]
    connected = subprocess.run(
        connect, stdout=subprocess.PIPE, text=True, timeout=START_SECONDS, check=True
    ).stdout.split()
    files = [str(Path.home() / ".ray" / "auth_token"), str(found.folder / "config.yaml")]
    files += [f"/proc/{process.pid}/{file}" for process in processes for file in ("environ", "mem", "maps")]
    files += [name for name, _ in found.files if Path(name).is_file()]
    folders = [str(found.folder), str(found.folder / "logs"), *(name for name, _ in found.files if Path(name).is_dir())]
    attempts = (
        (files, 'head -c 1 "$name" > /dev/null'),
        (files, '(: >> "$name")'),
        (folders, 'ls "$name" > /dev/null'),
        (folders, 'touch "$name/of-another-user"'),
    )
    for names, attempt in attempts:
        program = f'for name; do {attempt} && echo "$name"; done 2> /dev/null'
        command = [*AS_NOBODY, "sh", "-c", program, "sh", *names]
        connected += subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS).stdout.split()
    return connected


def answered_without_a_key(listeners: list[Listener]) -> list[str]:
    """Let another user send requests without a key to all ports, and return what was answered.

    The port with the metrics of the router has nothing else, and answers every path.
    """
    processes = {
        str(listener.port): listener.process
        for listener in listeners
        if f'"prometheus_port": {listener.port}' not in listener.process
    }
    command = [sys.executable, "-c", ASK.replace("{become_nobody}", BECOME_NOBODY), *processes]
    answered = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=START_SECONDS, check=True
    ).stdout.splitlines()
    return [f"{processes[line.split()[0]]}: {line}" for line in answered]


def test_every_process_that_listens_is_known(seen: Seen) -> None:
    assert [
        listener for listener in seen.listeners if not any(re.search(one, listener.process) for one in LISTENERS)
    ] == []


def test_every_unix_socket_is_known_and_has_a_file(seen: Seen) -> None:
    assert seen.unix_sockets
    assert [name for name in seen.unix_sockets if not any(re.search(f"{one}$", name) for one in UNIX_SOCKETS)] == []


def test_every_file_in_a_shared_folder_is_known_and_no_other_user_can_write_it(seen: Seen) -> None:
    for name, mode in seen.files:
        allowed = [most for pattern, (most, _) in FILES.items() if re.search(f"{pattern}$", name)]
        assert allowed, f"{name} (mode {mode:o}) is not in the table"
        assert any(mode & ~most == 0 for most in allowed), f"{name} has the mode {mode:o}"


def test_every_variable_that_a_run_sets_is_known(seen: Seen) -> None:
    names = set().union(*seen.variables.values())
    assert sorted(name for name in names if not any(re.fullmatch(pattern, name) for pattern in VARIABLES)) == []


def test_no_key_is_in_a_command_or_an_environment(seen: Seen) -> None:
    assert len(seen.texts) > 5
    for command, text in seen.texts.items():
        assert not any(key in text for key in seen.keys), command


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_open_nothing_of_a_run(seen: Seen) -> None:
    assert seen.opened_by_nobody == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_a_key_servers_answer_only_what_says_nothing_of_the_run(seen: Seen) -> None:
    allowed = [f"({command}).*: [0-9]+ GET ({paths})" for command, paths in OPEN_TO_ALL.items()]
    assert [
        line for line in seen.answered_without_a_key if not any(re.fullmatch(f".*{one}", line) for one in allowed)
    ] == []
    assert any("/health" in line for line in seen.answered_without_a_key)


def test_a_web_page_reads_nothing_and_the_run_goes_on(seen: Seen) -> None:
    assert seen.read_by_a_page == []
    assert (seen.steps, seen.violations) == (4, [])


def test_a_web_page_would_read_what_permits_it() -> None:
    """Otherwise the test above could not fail."""

    class Permits(EmptyPage):
        def end_headers(self) -> None:
            self.send_header("Access-Control-Allow-Origin", "*")
            super().end_headers()

    with socketserver.TCPServer(("127.0.0.1", 0), Permits) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with ThreadPoolExecutor() as thread:
            read = thread.submit(read_by_a_page, {port}).result()
        server.shutdown()
    assert any(f"127.0.0.1:{port}/metrics" in entry for entry in read)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_attempts_of_another_user_would_succeed_on_what_is_open(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    name = f"/tmp/open-to-all-{os.getpid()}"
    file = Path(f"{name}.txt")
    file.touch()
    file.chmod(0o666)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        os.chmod(name, 0o777)
        server.listen()
        try:
            found = Seen(folder=Path("/"), unix_sockets=[name], files=[("/etc/passwd", 0o644), (str(file), 0o666)])
            opened = opened_by_nobody(found, [])
            assert {name, "/etc/passwd", "/"} <= set(opened)
            assert opened.count(str(file)) == 2  # read and written
        finally:
            os.unlink(name)
            file.unlink()
