"""The live page and the run report of a real run, in a real browser."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, expect

from miles_async.events import (
    CollapseRiskChanged,
    Event,
    GroupGenerated,
    GroupMoved,
    ProcessSilent,
    RunEnded,
    SampleDisplayed,
    StepEnded,
)
from miles_async.observability.page.report import main as make_report
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.trace.perfetto import REQUESTS
from tests.stack.browser import Visit, chromium
from tests.stack.conftest import Played, Stack

ROLLOUTS = 6
HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"


@pytest.fixture(scope="module")
def played(stack: Stack) -> Played:
    size = ("--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "8")
    return stack.play("train_async.py", *size, "--sample-interval-seconds", "0.2", "--trace")


@pytest.fixture(scope="module")
def browser(played: Played) -> Iterator[Browser]:
    """After the run was played: while Playwright is open, no other event loop runs in this thread."""
    with chromium() as browser:
        yield browser


def halves(played: Played) -> tuple[list[Event], list[Event]]:
    """The events up to the third step, and the others."""
    third = played.events.index(played.of(StepEnded)[2]) + 1
    return played.events[:third], played.events[third:]


@pytest.fixture
def subscribers(played: Played) -> Iterator[EventSubscribers]:
    """As the driver has them, after the first half of the run."""
    with EventSubscribers(played.config, RunFolder.create(played.config)) as subscribers:
        subscribers.emit(*halves(played)[0])
        yield subscribers


def test_the_page_shows_the_run_and_follows_it(played: Played, subscribers: EventSubscribers, browser: Browser) -> None:
    visit = Visit.to(browser, subscribers.page_url)
    page = visit.page
    expect(page.locator("h1")).to_have_text(played.folder.path.name)
    train = page.locator("#pipeline li", has=page.get_by_text("Train", exact=True))
    expect(train).to_contain_text(f"3 of {ROLLOUTS}")
    assert page.locator("#slots .slot").count() > 0
    assert "in the learner's batch" in (page.locator("#slots").get_attribute("aria-label") or "")
    subscribers.emit(*halves(played)[1])
    expect(train).to_contain_text(f"{ROLLOUTS} of {ROLLOUTS}")
    subscribers.emit(RunEnded(time=played.events[-1].time, reason="done"))
    expect(page.locator("#verdict-name")).to_have_text("Ended: done")
    admitted = page.locator("#pipeline li", has_text="Data").locator(".big").inner_text()
    assert int(admitted.split()[0].replace(",", "")) >= len(played.of(GroupGenerated))
    page.click("text=whole run")
    expect(page.locator("#plot-reward svg")).to_have_attribute("aria-label", re.compile("now [0-9.]+, between"))
    assert visit.complaints == []
    assert {url.split("/")[2] for url in visit.requests} == {subscribers.page_url.split("/")[2]}
    page.close()


def test_the_page_shows_a_banner_while_a_collapse_is_announced(
    played: Played, subscribers: EventSubscribers, browser: Browser
) -> None:
    visit = Visit.to(browser, subscribers.page_url)
    banner = visit.page.locator("#collapse")
    expect(banner).to_be_hidden()
    risk = CollapseRiskChanged(
        time=played.events[-1].time, rollout=3, high=True, why="the effective sample size is 0.21", knob="lower --lr"
    )
    subscribers.emit(risk)
    expect(banner).to_have_text(
        "The policy may collapse soon. After rollout 3, the effective sample size is 0.21: lower --lr"
    )
    subscribers.emit(replace(risk, high=False, knob=""))
    expect(banner).to_be_hidden()
    assert visit.complaints == []
    visit.page.close()


def test_the_first_paint_needs_only_the_document(subscribers: EventSubscribers, browser: Browser) -> None:
    """benchmarks/page.py measures the time. Here no other request is answered, and the page is painted all the same."""
    context = browser.new_context()
    context.route("**", lambda route: route.continue_() if route.request.url == subscribers.page_url else None)
    visit = Visit(context.new_page())
    visit.page.goto(subscribers.page_url)
    assert visit.first_paint_ms > 0
    context.close()


def test_the_page_is_served_before_there_is_data(played: Played, browser: Browser) -> None:
    with EventSubscribers(played.config, RunFolder.create(played.config)) as subscribers:
        visit = Visit.to(browser, subscribers.page_url)
        expect(visit.page.locator("#verdict-name")).to_contain_text("are starting")
        subscribers.emit(played.events[0])
        expect(visit.page.locator("h1")).to_have_text(played.folder.path.name)
        assert visit.complaints == []
        visit.page.close()


def test_the_output_of_a_model_is_shown_as_text(
    played: Played, subscribers: EventSubscribers, browser: Browser
) -> None:
    [*_, real] = played.of(SampleDisplayed)
    subscribers.emit(replace(real, response=HOSTILE))
    visit = Visit.to(browser, subscribers.page_url)
    newest = visit.page.locator("#samples .sample").first
    expect(newest.locator(".response")).to_have_text(HOSTILE)
    assert newest.locator("img, script").count() == 0
    assert "owned" not in visit.page.title()
    subscribers.emit(replace(real, response=HOSTILE + "again", sequence=real.sequence + 1))
    expect(newest.locator(".response")).to_have_text(HOSTILE + "again")
    assert "owned" not in visit.page.title()
    assert visit.complaints == []
    visit.page.close()


def test_the_page_works_in_a_narrow_window_and_without_a_mouse(subscribers: EventSubscribers, browser: Browser) -> None:
    visit = Visit.to(browser, subscribers.page_url, width=320)
    assert not visit.scrolls_sideways
    reached = visit.tab_through()
    assert reached.index("pause") > reached.index("plot-reward") > reached.index("plot-queue") >= 2
    visit.page.focus("#plot-queue")
    visit.page.keyboard.press("ArrowLeft")
    expect(visit.page.locator("#spoken")).to_contain_text("Queue queued")
    visit.page.focus("[data-span=whole]")
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("[data-span=whole]")).to_have_attribute("aria-pressed", "true")
    visit.page.close()


def test_a_screen_reader_hears_names_and_figures(subscribers: EventSubscribers, browser: Browser) -> None:
    visit = Visit.to(browser, subscribers.page_url)
    heard = visit.page.locator("body").aria_snapshot()
    for part in (
        'heading "Pipeline"',
        'img "Queue, groups: queued now',
        "progressbar",
        'button "pause"',
        "status",
    ):
        assert part in heard, f"{part} is not in\n{heard}"
    assert visit.page.locator("svg:not([aria-label])").count() == 0
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(scheme: str, subscribers: EventSubscribers, browser: Browser) -> None:
    visit = Visit.to(browser, subscribers.page_url, color_scheme=scheme)
    assert {name: ratio for name, ratio in visit.contrasts().items() if ratio < 4.0} == {}
    visit.page.close()


def test_the_page_names_processes_that_do_not_answer(
    played: Played, subscribers: EventSubscribers, browser: Browser
) -> None:
    visit = Visit.to(browser, subscribers.page_url)
    subscribers.emit(ProcessSilent(time=time.time(), process="learner-0", seconds=7.0))
    expect(visit.page.locator("#silent")).to_contain_text("learner-0 has not answered for")
    subscribers.emit(ProcessSilent(time=time.time(), process="learner-0", seconds=0.0))
    expect(visit.page.locator("#silent")).not_to_contain_text("learner-0")
    visit.page.close()


def test_the_page_shows_that_the_run_has_ended(played: Played, browser: Browser) -> None:
    with EventSubscribers(played.config, RunFolder.create(played.config)) as subscribers:
        subscribers.emit(*halves(played)[0])
        visit = Visit.to(browser, subscribers.page_url)
        expect(visit.page.locator("#lost")).to_be_hidden()
    expect(visit.page.locator("#lost")).to_contain_text("no longer answers")
    visit.page.close()


def test_a_report_compares_two_runs_and_is_one_self_contained_file(
    played: Played, browser: Browser, tmp_path: Path
) -> None:
    folder = watched_to_its_end(played)
    output = tmp_path / "report.html"
    assert make_report([str(folder.path), "--with", str(folder.path), "--output", str(output)]) == 0
    for path in (folder.report, output):
        visit = Visit.to(browser, path.as_uri())
        runs = 1 if path != output else 2
        expect(visit.page.locator("#plot-reward path.curve")).to_have_count(runs)
        shares = visit.page.locator("figure[id^=plot-trainer]")
        expect(shares).to_have_count(runs)
        assert all(plot.locator("path").count() for plot in shares.all())
        for table in ("ages", "outcomes", "scores"):
            expect(visit.page.locator(f"#{table} th", has_text=folder.path.name)).to_have_count(0 if runs == 1 else 2)
        expect(visit.page.locator("#figures")).to_contain_text("groups trained per second")
        assert visit.complaints == []
        assert visit.requests == [path.as_uri()]
        visit.page.close()


def test_the_trace_holds_requests_steps_and_every_group_that_ended(played: Played) -> None:
    entries = json.loads(watched_to_its_end(played).trace.read_text())["traceEvents"]
    slices = [entry for entry in entries if entry["ph"] == "X"]
    names = Counter(entry["name"] for entry in slices)
    assert [names[f"rollout {rollout}"] for rollout in range(ROLLOUTS)] == [1] * ROLLOUTS
    assert [names[f"publish version {version}"] for version in range(ROLLOUTS + 1)] == [1] * (ROLLOUTS + 1)
    asked = [entry for entry in slices if entry["pid"] == REQUESTS]
    assert len(asked) >= len(played.of(GroupGenerated))
    assert all(entry["dur"] > 0 and entry["args"]["samples"] > 0 for entry in asked)
    fed = {event.sequence for event in played.of(GroupMoved) if event.before is None}
    assert all(names[f"group {sequence}"] >= 1 for sequence in fed)


def watched_to_its_end(played: Played) -> RunFolder:
    folder = RunFolder.create(played.config)
    with EventSubscribers(played.config, folder) as subscribers:
        subscribers.emit(*played.events, RunEnded(time=played.events[-1].time, reason="done"))
    return folder
