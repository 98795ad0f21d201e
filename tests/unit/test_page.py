"""The live page and its server."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from threading import Thread
from urllib.request import urlopen

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Gauge

from miles_async.events import EventSink, SampleDisplayed
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.http_server import HttpServer
from miles_async.observability.page.document import SOURCES, LivePage
from miles_async.observability.page.view import View
from miles_async.pipeline.sample_display import CHARACTERS_SHOWN, SampleDisplay, readable
from miles_async.scheduling.admission import Blocked
from miles_async.scheduling.ledger import LIVE
from miles_async.types import Group, Sample, VersionSpan
from tests.unit.example_events import RUN
from tests.waiting import PATIENCE_SECONDS


def words(file: str, constant: str) -> set[str]:
    """Returns the keys of one of the page's dictionaries of texts or colours."""
    found = re.search(rf"const {constant} = {{(.*?)}};", (SOURCES / file).read_text(), re.DOTALL)
    assert found is not None
    return set(re.findall(r'"?([a-z][\w-]*)"?:\s', found[1]))


def test_the_page_has_a_text_for_every_state() -> None:
    assert words("draw.js", "BLOCKED") == set(Blocked)
    assert words("draw.js", "STATES") == set(LIVE)
    assert words("base.js", "VERDICTS") == set(Bottleneck)
    assert words("draw.js", "BOTTLENECK") == set(Bottleneck) - {Bottleneck.BALANCED}
    assert words("draw.js", "DOES") == words("base.js", "TRAINER") == {"batch", "step", "publish", "save", "evaluate"}


HOSTILE = "</script><script>document.title='owned'</script><!-- <img src=x onerror=alert(1)>"


class Kept(EventSink):
    def __init__(self) -> None:
        self.events: list[SampleDisplayed] = []

    def emit(self, event: object) -> None:
        assert isinstance(event, SampleDisplayed)
        self.events.append(event)


@dataclass
class ManualClock:
    """A clock that a test sets."""

    elapsed: float = 0.0
    wall_offset: float = 100.0

    def time(self) -> float:
        return self.elapsed + self.wall_offset

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        self.elapsed += seconds


def group(response: str = "42", **fields: object) -> Group:
    sample = Sample(prompt="6 * 7 =", response=response, response_length=2, reward=1.0, spans=[VersionSpan(3, 0, 2)])
    for name, value in fields.items():
        setattr(sample, name, value)
    return Group([sample], feed_index="sample_0_5", sequence=17)


def shown(offered: Group) -> SampleDisplayed:
    sink = Kept()
    SampleDisplay(ManualClock(), sink, 5.0).offer(offered)
    return sink.events[0]


def view_with(response: str) -> View:
    view = View()
    view.observe(replace(RUN, run="tested"))
    view.observe(shown(group(response)))
    return view


def test_one_sample_is_shown_per_interval() -> None:
    sink = Kept()
    clock = ManualClock()
    shown = SampleDisplay(clock, sink, 5.0)
    for second in range(12):
        clock.elapsed = float(second)
        shown.offer(group())
    assert [event.time for event in sink.events] == [100.0, 105.0, 110.0]
    assert (sink.events[0].sequence, sink.events[0].versions, sink.events[0].rewards) == (17, (3, 3), [1.0])


@pytest.mark.parametrize("step", [600.0, -600.0])
def test_a_jump_of_the_wall_clock_changes_no_interval(step: float) -> None:
    sink, clock = Kept(), ManualClock()
    shown = SampleDisplay(clock, sink, 5.0)
    shown.offer(group())
    clock.wall_offset += step
    for second in range(1, 6):
        clock.elapsed = float(second)
        shown.offer(group())
    assert [event.time for event in sink.events] == [100.0, 105.0 + step]


def test_no_interval_shows_no_samples() -> None:
    sink = Kept()
    SampleDisplay(ManualClock(), sink, None).offer(group())
    assert sink.events == []


def test_control_characters_become_visible_and_lone_surrogates_are_replaced() -> None:
    assert readable("a\x00b\x1b[2J\x7f\tc\nd") == "a␀b␛[2J␡\tc\nd"
    assert readable("\x9b\ud800\u202egnp.exe") == "\ufffd?<U+202E>gnp.exe"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = readable("a" * CHARACTERS_SHOWN + "b" * CHARACTERS_SHOWN)
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert f"{CHARACTERS_SHOWN} characters" in text
    assert len(text) < CHARACTERS_SHOWN + 60


def test_a_chat_prompt_is_shown_message_by_message() -> None:
    chat = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 1"}]
    assert shown(group(prompt=chat)).prompt == "system: add\nuser: 1 + 1"


def test_html_in_a_sample_stays_inside_the_data_of_the_page() -> None:
    html = LivePage(view_with(HOSTILE)).html(101.0).decode()
    assert HOSTILE not in html
    assert html.count("<script") == 2
    data = re.search(r'<script type="application/json" id="state">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["now"]["samples"][0]["response"] == HOSTILE


def test_the_page_names_no_outside_resource_and_lets_only_its_own_script_run() -> None:
    html = LivePage(View()).html(101.0).decode()
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []
    assert [url for url in re.findall(r"https?://[\w.]+", html) if "w3.org" not in url] == []
    assert re.search(r"default-src 'none'; script-src 'sha256-[\w+/]+=';", html)
    assert "{{" not in html


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    registry = CollectorRegistry()
    Gauge("miles_async_tested", "Something.", registry=registry).set(3)
    server = HttpServer(registry, LivePage(view_with("42")), 0)
    yield server
    server.close()


def test_one_port_serves_metrics_page_and_state(server: HttpServer) -> None:
    assert b"miles_async_tested 3.0" in urlopen(server.url, timeout=PATIENCE_SECONDS).read()
    assert b"<!doctype html>" in urlopen(server.page_url, timeout=PATIENCE_SECONDS).read()
    state = json.load(urlopen(f"{server.page_url}state.json?span=whole", timeout=PATIENCE_SECONDS))
    assert (state["span"], state["now"]["run"]["run"]) == ("whole", "tested")


@pytest.mark.parametrize(
    "path, headers, status",
    [
        ("/", {"Host": "evil.example:80"}, 403),
        ("/metrics", {"Host": "evil.example:80"}, 403),
        ("/state.json", {"Host": "localhost:80", "Origin": "http://evil.example"}, 403),
        ("/state.json", {"Host": "localhost:80", "Origin": "http://localhost:81"}, 403),
        ("/state.json", {"Host": "localhost:80", "Origin": "null"}, 403),
        ("/metrics", {"Host": "["}, 403),
        # Through a tunnel (`ssh -L 80:127.0.0.1:…`) the port is another one.
        ("/state.json", {"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
        ("/metrics", {"Host": "[::1]:80"}, 200),
        ("/etc/passwd", {"Host": "localhost:80"}, 404),
    ],
)
def test_other_host_names_other_origins_and_other_paths_are_refused(
    server: HttpServer, path: str, headers: dict[str, str], status: int
) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    connection.request("GET", path, headers=headers)
    assert connection.getresponse().status == status
    connection.close()


def test_a_scrape_during_shutdown_is_answered_completely_or_refused() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("miles_async_tested", "Something.", ["place"], registry=registry)
    for position in range(500):
        gauge.labels(str(position)).set(position)
    server = HttpServer(registry, LivePage(View()), 0)
    answers: list[bytes | None] = []

    def scrape() -> None:
        try:
            # A body shorter than its Content-Length raises IncompleteRead, which is no OSError and fails the test.
            answers.append(urlopen(server.url, timeout=PATIENCE_SECONDS).read())
        except OSError:
            answers.append(None)

    scrapes = [Thread(target=scrape) for _ in range(24)]
    for each in scrapes:
        each.start()
    while not answers:
        time.sleep(0.001)
    server.close()
    for each in scrapes:
        each.join()
    whole = [answer for answer in answers if answer is not None]
    assert whole
    assert all(answer.endswith(b'miles_async_tested{place="499"} 499.0\n') for answer in whole)
    assert len(answers) == 24


def test_a_silent_client_does_not_delay_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.observability.http_server._Handler.timeout", 0.05)
    server = HttpServer(CollectorRegistry(), LivePage(View()), 0)
    with socket.create_connection(("127.0.0.1", server.port)):
        server.close()  # returns while the client is still connected
