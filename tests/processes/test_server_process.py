"""The processes of engines and routers: their key, environment and log, and the error of one that does not start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_async.adapters.sglang import launch
from miles_async.adapters.sglang.process import ServerProcess
from miles_async.adapters.system.network_ports import free_port
from miles_async.adapters.system.sessions import kill_sessions, members
from miles_async.errors import FatalError
from miles_async.observability import redacted_log
from miles_async.visible_text import visible_text
from tests.waiting import PATIENCE_SECONDS, wait_until

KEY = "key-of-the-run"


def test_a_server_that_starts_too_slowly_is_ended_with_an_error_message(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}/health"
    server = ServerProcess(
        "engine e", "http.server", [str(free_port()), "--bind", "127.0.0.1"], address, tmp_path / "l"
    )
    with pytest.raises(FatalError, match=r"was not healthy after 0 s \(is engine_start_timeout_seconds too short\?\)"):
        server.start({}, None, timeout=0.4, key=KEY)
    assert not server.alive()


def test_a_server_process_receives_the_key_through_its_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reversed, because the log leaves out the key itself.
    program = "from miles_async.adapters.sglang.server_key import receive_key\nraise SystemError(receive_key()[::-1])"
    (tmp_path / "repeats.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = ServerProcess("it", "repeats", [], "http://127.0.0.1:1/", tmp_path / "log")
    with pytest.raises(FatalError, match=f"SystemError: {KEY[::-1]} "):
        process.start({}, None, PATIENCE_SECONDS, KEY)


def test_a_server_imports_the_project_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an external Ray cluster, the copy of the project that a job uses differs from the installed one."""
    (tmp_path / "tells.py").write_text("import os; raise SystemError(os.environ['PYTHONPATH'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ServerProcess("it", "tells", [], "http://127.0.0.1:1/", tmp_path / "log")
    project = Path(launch.__file__).parents[3]
    with pytest.raises(FatalError, match=f"SystemError: {project}:{tmp_path} "):
        server.start({}, None, PATIENCE_SECONDS, KEY)


def test_the_cause_of_a_failed_start_is_found_although_the_log_was_rotated_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text("import os, sys; os.truncate(sys.argv[1], 0); raise SystemError('no memory')")
    (tmp_path / "log").write_text("of an earlier server\n" * 1000)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ServerProcess("it", "fails", [str(tmp_path / "log")], "http://127.0.0.1:1/", tmp_path / "log")
    with pytest.raises(FatalError, match="SystemError: no memory"):
        server.start({}, None, PATIENCE_SECONDS, KEY)


def test_the_log_of_a_server_holds_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells.py").write_text(
        "import os, sys; key = sys.stdin.readline();"
        "print(sys.argv, dict(os.environ), key, 'http://me:hunter2@judge/', flush=True); raise SystemError"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_inherited")
    arguments = ["--api-key", "sk-argument", "--max-total-tokens", "4096"]
    server = ServerProcess("it", "tells", arguments, "http://127.0.0.1:1/", tmp_path / "log")
    variables = {"JUDGE_PASSWORD": "pw-of-engine", "WANDB_API_KEY": "no"}
    with pytest.raises(FatalError, match="SystemError"):
        server.start(variables, None, timeout=PATIENCE_SECONDS, key=KEY)
    log = (tmp_path / "log").read_text()
    assert [secret for secret in ("hf_inherited", "sk-argument", "pw-of-engine", KEY, "hunter2") if secret in log] == []
    assert "'--max-total-tokens', '4096'" in log
    assert "'WANDB_API_KEY': 'no'" in log, "a word that short occurs in ordinary text"


def slowly(text: str) -> str:
    time.sleep(0.05)
    return visible_text(text)


def test_a_server_that_has_ended_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "serves_once.py").write_text(
        "import http.server, sys\n"
        "class Answers(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Answers).handle_request()\n"
        "sys.stdin.buffer.read(2)\n"
        "raise MemoryError('no block is free')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # The last lines of the output reach the log some time after the process has ended.
    monkeypatch.setattr(redacted_log, "visible_text", slowly)
    port = free_port()
    server = ServerProcess("it", "serves_once", [str(port)], f"http://127.0.0.1:{port}/", tmp_path / "log")
    server.start({}, None, PATIENCE_SECONDS, KEY)
    try:
        wait_until(lambda: not server.alive(), "the server ends")
        assert server.end() == f"its server ended with code 1: MemoryError: no block is free (log: {tmp_path / 'log'})"
    finally:
        server.stop()


SERVES_WITH_A_CHILD = """
import http.server, os, sys, time
from miles_async.adapters.sglang.server_key import receive_key

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

receive_key()
if os.fork() == 0:
    time.sleep(600)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
STARTS_IT = """
import sys, time
from pathlib import Path
from miles_async.adapters.sglang.process import ServerProcess

server = ServerProcess("it", "serves", [sys.argv[1]], f"http://127.0.0.1:{sys.argv[1]}/", Path(sys.argv[2]))
server.start({}, None, timeout=60, key="key")
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_server_ends_with_its_owner_even_if_all_its_processes_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    (tmp_path / "serves.py").write_text(SERVES_WITH_A_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-c", STARTS_IT, str(free_port()), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(launch.__file__).parents[3]) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        try:
            if stopped:
                os.killpg(server, signal.SIGSTOP)
            assert len(members({server})) == 2
            os.kill(owner.pid, signal.SIGKILL)
            wait_until(lambda: not members({server}), "all processes of the server ended")
        finally:
            kill_sessions({server})
