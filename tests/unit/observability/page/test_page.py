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

from miles_async.events import EventSink, GroupMoved, SampleDisplayed, Segment, StepStarted, decode, encode
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.http_server import HttpServer
from miles_async.observability.page.document import SOURCES, LivePage, document
from miles_async.observability.state.charts import INTERRUPTED
from miles_async.observability.state.samples import MAX_BYTES, MAX_SAMPLES, SampleLog
from miles_async.observability.view import RunView
from miles_async.pipeline.sample_display import CHARACTERS_SHOWN, TOKENS_SHOWN, SampleDisplay, readable
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
    assert words("base.js", "VERDICTS") == {*Bottleneck, INTERRUPTED}
    assert words("draw.js", "BOTTLENECK") == set(Bottleneck) - {Bottleneck.BALANCED}
    assert words("draw.js", "DOES") == {"batch", "step", "publish", "save", "evaluate"}
    assert words("base.js", "TRAINER") == {*words("draw.js", "DOES"), INTERRUPTED}


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
    """A group with one sample, whose tokens are the code points of its text."""
    length = len(response)
    sample = Sample(
        prompt="6 * 7 =",
        tokens=[*b"6 * 7 =", *map(ord, response)],
        response=response,
        response_length=length,
        reward=1.0,
        spans=[VersionSpan(3, 0, length)],
    )
    for name, value in fields.items():
        setattr(sample, name, value)
    return Group([sample], feed_index="sample_0_5", sequence=17)


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def shown(offered: Group) -> SampleDisplayed:
    sink = Kept()
    SampleDisplay(ManualClock(), sink, 5.0, text_of).offer(offered)
    return sink.events[0]


def view_with(response: str) -> RunView:
    view = RunView()
    view.apply(replace(RUN, run="tested"))
    view.apply(shown(group(response)))
    return view


def test_one_sample_is_shown_per_interval() -> None:
    sink = Kept()
    clock = ManualClock()
    shown = SampleDisplay(clock, sink, 5.0, text_of)
    for second in range(12):
        clock.elapsed = float(second)
        shown.offer(group())
    assert [event.time for event in sink.events] == [100.0, 105.0, 110.0]
    assert (sink.events[0].sequence, sink.events[0].versions, sink.events[0].rewards) == (17, (3, 3), [1.0])


@pytest.mark.parametrize("step", [600.0, -600.0])
def test_a_jump_of_the_wall_clock_changes_no_interval(step: float) -> None:
    sink, clock = Kept(), ManualClock()
    shown = SampleDisplay(clock, sink, 5.0, text_of)
    shown.offer(group())
    clock.wall_offset += step
    for second in range(1, 6):
        clock.elapsed = float(second)
        shown.offer(group())
    assert [event.time for event in sink.events] == [100.0, 105.0 + step]


def test_no_interval_shows_no_samples() -> None:
    sink = Kept()
    SampleDisplay(ManualClock(), sink, None, text_of).offer(group())
    assert sink.events == []


def test_control_characters_become_visible_and_lone_surrogates_are_replaced() -> None:
    assert readable("a\x00b\x1b[2J\x7f\tc\nd") == "a␀b␛[2J␡\tc\nd"
    assert readable("\x9b\ud800\u202egnp.exe") == "<U+009B>?<U+202E>gnp.exe"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = readable("a" * CHARACTERS_SHOWN + "b" * CHARACTERS_SHOWN)
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert f"{CHARACTERS_SHOWN} characters" in text
    assert len(text) < CHARACTERS_SHOWN + 60


def test_a_chat_prompt_is_shown_message_by_message() -> None:
    chat = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 1"}]
    assert shown(group(prompt=chat)).prompt == "system: add\nuser: 1 + 1"


def test_the_tokens_of_each_weight_version_are_one_segment_of_the_response() -> None:
    spans = [VersionSpan(3, 0, 2), VersionSpan(4, 2, 5), VersionSpan(6, 8, 10)]
    event = shown(group("abcde[x]yz", spans=spans))
    assert event.response == "abcde[x]yz"
    assert event.segments == [Segment(3, 2, 2), Segment(4, 3, 3), Segment(None, 3, 3), Segment(6, 2, 2)]
    assert event.versions == (3, 6)


def test_the_characters_of_a_segment_are_counted_as_they_are_displayed() -> None:
    event = shown(group("\x1b\u200bé😀", spans=[VersionSpan(3, 0, 2), VersionSpan(4, 2, 4)]))
    assert event.response == "␛<U+200B>é😀"
    assert event.segments == [Segment(3, 2, 9), Segment(4, 2, 2)]


def test_the_middle_of_a_long_response_is_replaced_by_a_note_that_no_version_sampled() -> None:
    half = TOKENS_SHOWN // 2
    spans = [VersionSpan(3, 0, half + 10), VersionSpan(4, half + 10, 2 * half + 50)]
    event = shown(group("a" * (half + 10) + "b" * (half + 40), spans=spans))
    note = "\n[… 50 tokens …]\n"
    assert event.response == "a" * half + note + "b" * half
    assert event.segments == [Segment(3, half, half), Segment(None, 0, len(note)), Segment(4, half, half)]


def test_the_event_of_an_earlier_version_has_no_segments() -> None:
    event = shown(group())
    fields = json.loads(encode(event))
    del fields["segments"]
    assert decode(json.dumps(fields).encode()) == replace(event, segments=[])


def displayed(sequence: int, text: str = "42", version: int = 3) -> SampleDisplayed:
    segments = [Segment(version, len(text), len(text))]
    return replace(shown(group()), sequence=sequence, response=text, segments=segments)


def test_a_sample_shows_the_version_that_trained_it_or_why_it_was_dropped() -> None:
    log = SampleLog()
    for sequence in (17, 18, 19):
        log.observe(displayed(sequence))
    log.observe(StepStarted(time=1.0, rollout=4, version=5, staleness=[2], groups=[18, 30]))
    log.observe(
        GroupMoved(
            time=2.0, sequence=19, feed_index="", attempt=0, before="queued", after="dropped", reason="stale", counts={}
        )
    )
    found = [(each["sequence"], each["trained"], each["dropped"]) for each in log.newest()]
    assert found == [(19, None, "stale"), (18, 5, None), (17, None, None)]


def test_the_revision_changes_with_the_samples_and_only_with_them() -> None:
    log = SampleLog()
    revisions = []
    for event in (displayed(1), StepStarted(time=1.0, rollout=0, version=0, staleness=[0], groups=[2]), displayed(2)):
        log.observe(event)
        revisions.append(log.revision)
    assert revisions[0] == revisions[1] != revisions[2]


def test_the_newest_samples_are_kept_up_to_a_number_and_a_size() -> None:
    log = SampleLog()
    for sequence in range(3 * MAX_SAMPLES):
        log.observe(displayed(sequence))
    assert [each["sequence"] for each in log.newest()] == list(range(3 * MAX_SAMPLES - 1, 2 * MAX_SAMPLES - 1, -1))
    large = "x" * (MAX_BYTES // 5)
    for sequence in range(1000, 1010):
        log.observe(displayed(sequence, large))
    assert [each["sequence"] for each in log.newest()] == [1009, 1008, 1007, 1006]
    log.observe(displayed(2000, "x" * (2 * MAX_BYTES)))
    assert [each["sequence"] for each in log.newest()] == [2000]


def test_html_in_a_sample_stays_inside_the_data_of_the_report() -> None:
    html = document("report.html", {"samples": view_with(HOSTILE).samples.newest()}).decode()
    assert HOSTILE not in html
    assert html.count("<script") == 2
    data = re.search(r'<script type="application/json" id="state">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["samples"][0]["response"] == HOSTILE


def test_the_page_names_no_outside_resource_and_lets_only_its_own_script_run() -> None:
    html = LivePage(RunView()).html(101.0).decode()
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
    samples = json.load(urlopen(f"{server.page_url}samples.json", timeout=PATIENCE_SECONDS))
    assert samples["revision"] == state["samples_revision"]
    assert [sample["response"] for sample in samples["samples"]] == ["42"]


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
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE_SECONDS)
    connection.request("GET", path, headers=headers)
    assert connection.getresponse().status == status
    connection.close()


def test_a_scrape_during_shutdown_is_answered_completely_or_refused() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("miles_async_tested", "Something.", ["place"], registry=registry)
    for position in range(500):
        gauge.labels(str(position)).set(position)
    server = HttpServer(registry, LivePage(RunView()), 0)
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
    server = HttpServer(CollectorRegistry(), LivePage(RunView()), 0)
    with socket.create_connection(("127.0.0.1", server.server_port)):
        server.close()  # returns while the client is still connected
