"""The router is gone while the run evaluates, and again while it trains: the run waits, and no prompt is charged."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest
import ray

from miles_async.events import AdmissionBlocked, Evaluated, Event, GroupMoved, PublishEnded, RouterChanged, StepEnded
from tests.stack.conftest import Played, Stack
from tests.waiting import wait_until

REFUSED_CHECKS = 3
"""An outage ends when the run has looked for the router that often."""
ROLLOUTS = 4
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Outage:
    """Kills the router and takes its port, so that the run cannot start the router again until the outage ends."""

    def __init__(self, router_url: str, pid: int) -> None:
        port = urlsplit(router_url).port
        os.killpg(pid, signal.SIGKILL)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: self._bound(port), "the port of the killed router is free")
        self._listener.listen(128)
        self.began = self.ended = time.time()
        self._thread = threading.Thread(target=self._refuse, daemon=True)
        self._thread.start()

    def _bound(self, port: int | None) -> bool:
        try:
            self._listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

    def _refuse(self) -> None:
        checks = 0
        while checks < REFUSED_CHECKS:
            connection, _ = self._listener.accept()
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
                checks += connection.recv(4096).startswith(b"GET /workers")
        self.ended = time.time()
        self._listener.close()

    def wait(self) -> None:
        self._thread.join()


class Outages:
    """The first outage begins when the first evaluation begins, the second one when the first step has ended."""

    def __init__(self, stack: Stack) -> None:
        self._handles = stack.cluster.handles
        self.all: list[Outage] = []
        self._published = self._stepped = False

    def watch(self, event: Event) -> None:
        if isinstance(event, PublishEnded) and not self._published:
            self._published = True
            self._begin()
        elif isinstance(event, StepEnded) and not self._stepped:
            self._stepped = True
            self._begin()

    def _begin(self) -> None:
        assert self._handles.router_actor is not None
        pid = ray.get(self._handles.router_actor.pid.remote())
        self.all.append(Outage(self._handles.router_url, pid))


@pytest.fixture(scope="module")
def played(stack: Stack) -> tuple[Played, list[Outage]]:
    outages = Outages(stack)
    sizes = ("--num-rollout", str(ROLLOUTS), "--eval-size", "512")
    return stack.play("train_async.py", *sizes, watch=outages.watch), outages.all


def test_no_prompt_is_charged_and_training_continues(played: tuple[Played, list[Outage]]) -> None:
    run, outages = played
    assert len(outages) == 2
    assert [event.rollout for event in run.of(StepEnded)] == list(range(ROLLOUTS))
    moves = run.of(GroupMoved)
    assert [move for move in moves if move.reason == "router_lost"], "nothing was in flight when the router was killed"
    assert {move.attempt for move in moves} == {0}
    assert not (run.folder.path / "dead_letters.jsonl").exists()
    assert run.violations == []
    assert [event.up for event in run.of(RouterChanged)].count(False) == len(outages)
    assert sum(event.seconds for event in run.of(AdmissionBlocked) if event.cause == "no_engine") > 0


def test_an_evaluation_waits_for_the_router(played: tuple[Played, list[Outage]]) -> None:
    run, [outage, _] = played
    before, after = run.of(Evaluated)
    assert before.time - before.seconds < outage.began < outage.ended < before.time
    assert before.problems == after.problems
