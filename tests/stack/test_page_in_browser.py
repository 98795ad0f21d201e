"""The live page and the report of an example run, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Locator, expect
from prometheus_client import CollectorRegistry

from miles_async.events import (
    ClusterReady,
    EngineChanged,
    Evaluated,
    Event,
    GroupGenerated,
    RouterChanged,
    RunEnded,
    SampleDisplayed,
    Segment,
    StepEnded,
    StepStarted,
    VerdictChanged,
    encode,
)
from miles_async.observability.diagnosis.verdict import KNOBS, Bottleneck
from miles_async.observability.http_server import HttpServer
from miles_async.observability.page.document import LivePage
from miles_async.observability.page.report import write_report
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.summary import write_summary
from miles_async.observability.view import RunView
from tests.stack.browser import Visit, chromium
from tests.unit.example_events import RUN, moved

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
CONFIG = """
rollout: {rollout_function_path: miles_async.rollout.fully_async_rollout.generate_rollout_fully_async, rollout_stop: []}
learner: {max_tokens_per_microbatch_in_train: null, virtual_pipeline_model_parallel_size: 1}
"""


def sample(sequence: int, prompt: str, *parts: tuple[int | None, str], reward: float = 1.0) -> SampleDisplayed:
    versions = [version for version, _ in parts if version is not None]
    return SampleDisplayed(
        time=120.0,
        sequence=sequence,
        feed_index="sample_0_0",
        prompt=prompt,
        response="".join(text for _, text in parts),
        label="15",
        reward=reward,
        rewards=[0.0, reward],
        tokens=sum(len(text) for _, text in parts),
        versions=(min(versions), max(versions)),
        truncated=False,
        segments=[Segment(version, len(text), len(text)) for version, text in parts],
    )


def evaluated(rollout: int, accuracy: float) -> Evaluated:
    return Evaluated(
        time=112.0 + rollout,
        name="held_out",
        rollout=rollout,
        accuracy=accuracy,
        reward=accuracy,
        problems=128,
        seconds=1.0,
        truncated=0.0,
        versions=(rollout + 1, rollout + 1),
    )


def example(name: str, started: float, reward: float) -> list[Event]:
    events: list[Event] = [
        replace(RUN, time=started, run=name, configuration="c1"),
        ClusterReady(time=110.0, weight_transfer="p2p", warm_start_seconds=1.0, warm_start_cached=True),
        RouterChanged(time=110.0, up=True, engines=2, healthy=1),
        EngineChanged(time=110.0, engine="engine-0", state="routed", version=10, reason=None),
        EngineChanged(time=110.0, engine="engine-1", state="fenced", version=10, reason="a weight write failed"),
        VerdictChanged(
            time=111.0, verdict="rollout-bound", why="the learner waited", knob=KNOBS[Bottleneck.ROLLOUT], shares={}
        ),
        evaluated(-1, 0.25),
    ]
    for rollout in range(9):
        time = 113.0 + rollout
        events += [
            StepStarted(time=time, rollout=rollout, version=rollout, staleness=[0, 1, 2], groups=[rollout]),
            StepEnded(
                time=time + 0.5,
                rollout=rollout,
                seconds=0.5,
                tokens=64,
                finite=True,
                reward=reward + rollout / 20,
                response_length=3.0,
                metrics={"loss": 0.1},
            ),
        ]
    return [*events, evaluated(8, 0.75)]


SAMPLES = [
    sample(20, "6 + 7 + 2 =", (6, "thirteen, "), (None, "[tool] 15 "), (8, "😀15")),
    sample(21, HOSTILE, (9, HOSTILE), reward=0.0),
    sample(22, "1 + 1 =", (9, "3"), reward=0.5),
]


def generated(dataset: str, reward: float, epochs: float) -> GroupGenerated:
    return GroupGenerated(
        time=125.0,
        sequence=0,
        generation_seconds=1.0,
        reward_seconds=0.1,
        versions=(9, 9),
        response_tokens=8,
        reward=reward,
        truncated=0,
        dataset=dataset,
        epochs=epochs,
    )


OF_DATASETS = [
    generated("dapo-math", 0.25, 0.5),
    generated("code", 1.0, 1.25),
    *(replace(moved(sequence, "trained", "published"), dataset="dapo-math") for sequence in range(3)),
    replace(moved(3, "trained", "published"), dataset="code"),
    replace(moved(4, "finished", "dropped", "filtered"), dataset="code"),
]
TRAINED = StepStarted(time=130.0, rollout=9, version=9, staleness=[3], groups=[20])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run, beside two earlier runs and a folder that is none."""
    parent = tmp_path_factory.mktemp("runs")
    for name, started, reward in (("20260101-010101-earlier", 90.0, 0.1), ("20260102-010101-earlier", 95.0, 0.3)):
        (parent / name).mkdir()
        view = RunView()
        for event in [*example(name, started, reward), RunEnded(time=140.0, reason="done")]:
            view.apply(event)
        write_summary(view, parent / name / "summary.json")
    (parent / "foreign").mkdir()
    (parent / "foreign" / "summary.json").write_text(json.dumps(["no summary"]))
    folder = RunFolder(parent / "20260103-010101-this")
    folder.path.mkdir()
    (folder.path / "config.yaml").write_text(CONFIG)
    events = [*example(folder.path.name, 100.0, 0.2), *SAMPLES, *OF_DATASETS, TRAINED]
    folder.events.write_bytes(b"".join(encode(event) + b"\n" for event in events))
    write_report(folder, None, None)
    return folder


@pytest.fixture(scope="module")
def view() -> RunView:
    view = RunView()
    for event in [
        *example("20260103-010101-this", 100.0, 0.2),
        *SAMPLES,
        *OF_DATASETS,
        TRAINED,
        RunEnded(time=140.0, reason="done"),
    ]:
        view.apply(event)
    return view


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def addresses(folder: RunFolder, view: RunView) -> Iterator[dict[str, str]]:
    server = HttpServer(CollectorRegistry(), LivePage(view, folder.path), 0)
    yield {"live page": server.page_url, "report": folder.report.as_uri()}
    server.close()


@pytest.fixture(params=["live page", "report"])
def address(request: pytest.FixtureRequest, addresses: dict[str, str]) -> str:
    return addresses[request.param]


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_no_word_is_broken_and_nothing_overflows(address: str, width: int, browser: Browser) -> None:
    visit = Visit.to(browser, address, width=width)
    visit.page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    expect(visit.page.locator("#samples .sample")).to_have_count(3)
    assert not visit.scrolls_sideways
    assert visit.page.evaluate(BROKEN_WORDS) == []
    assert visit.page.evaluate(OVERFLOWS) == []
    assert visit.complaints == []
    visit.page.close()


def plain(element: Locator) -> str:
    """The text with a hyphen for each en dash between word joiners."""
    return element.inner_text().replace("\u2060\u2013\u2060", "-")


def test_accuracies_are_shown_with_their_confidence_intervals(address: str, browser: Browser) -> None:
    visit = Visit.to(browser, address)
    scores = plain(visit.page.locator("#scores"))
    assert "25% (18-33%)" in scores
    assert "75% (67-82%)" in scores
    visit.page.close()


def test_each_data_set_is_shown_with_what_it_contributed(address: str, browser: Browser) -> None:
    visit = Visit.to(browser, address)
    rows = visit.page.locator("#datasets tbody tr").all()
    cells = [[plain(cell) for cell in row.locator("td").all()] for row in rows]
    assert cells == [["dapo-math", "0.25", "3", "75%", "0", "0.5"], ["code", "1", "1", "25%", "1", "1.25"]]
    visit.page.close()


def test_the_reward_plot_has_the_confidence_intervals_of_evaluations(address: str, browser: Browser) -> None:
    visit = Visit.to(browser, address)
    if address.startswith("http"):
        visit.page.click("text=whole run")
    expect(visit.page.locator("#plot-reward path.whisker")).to_have_count(2)
    heights = visit.page.locator("#plot-reward path.whisker").evaluate_all(
        "(all) => all.map((e) => e.getBBox().height)"
    )
    assert all(height > 5 for height in heights)
    visit.page.close()


def test_the_tiles_of_the_report_have_confidence_intervals(addresses: dict[str, str], browser: Browser) -> None:
    visit = Visit.to(browser, addresses["report"])
    tile = visit.page.locator("#figures div", has_text="held-out accuracy after").last
    assert "75% (67-82%)" in plain(tile)
    visit.page.close()


def test_each_token_shows_its_age_when_it_was_trained(address: str, browser: Browser) -> None:
    visit = Visit.to(browser, address)
    card = visit.page.locator("#samples .sample", has_text="6 + 7 + 2 =")
    expect(card).to_contain_text("trained from v9")
    shown = [(part.inner_text(), part.get_attribute("title")) for part in card.locator(".response span").all()]
    assert shown == [
        ("thirteen, ", "10 tokens of v6, 3 versions old when v9 was trained"),
        ("[tool] 15 ", "10 tokens that the model did not sample"),
        ("😀15", "3 tokens of v8, 1 version old when v9 was trained"),
    ]
    colours = card.locator(".response span").evaluate_all(
        "(all) => all.map((e) => getComputedStyle(e).backgroundColor)"
    )
    legend = visit.page.locator("#ages-legend .age").evaluate_all(
        "(all) => all.map((e) => getComputedStyle(e).backgroundColor)"
    )
    assert colours == [legend[3], legend[4], legend[1]]
    assert len(set(legend)) == 5
    untrained = visit.page.locator("#samples .sample", has_text="1 + 1 =")
    expect(untrained).to_contain_text("not trained yet")
    visit.page.close()


def test_samples_are_found_by_text_and_by_reward(address: str, browser: Browser) -> None:
    visit = Visit.to(browser, address)
    page, cards = visit.page, visit.page.locator("#samples .sample")
    expect(cards).to_have_count(3)
    page.fill("#search", "THIRTEEN")
    expect(cards).to_have_count(1)
    expect(page.locator("#found")).to_have_text("1 of 3 samples")
    page.fill("#search", "1 + 1")
    expect(cards.locator(".prompt")).to_have_text("1 + 1 =")
    page.fill("#search", "")
    page.fill("#reward-from", "0.5")
    expect(cards).to_have_count(2)
    page.fill("#reward-to", "0.9")
    expect(cards.locator(".prompt")).to_have_text("1 + 1 =")
    page.fill("#search", "nothing like this")
    expect(page.locator("#samples")).to_have_text("No sample matches.")
    visit.page.close()


def test_prompts_and_responses_are_text(address: str, browser: Browser) -> None:
    visit = Visit.to(browser, address)
    card = visit.page.locator("#samples .sample").nth(1)
    expect(card.locator(".prompt")).to_have_text(HOSTILE)
    expect(card.locator(".response")).to_have_text(HOSTILE)
    assert card.locator("img, script").count() == 0
    assert "owned" not in visit.page.title()
    assert visit.complaints == []
    visit.page.close()


def test_the_run_is_compared_with_earlier_runs(address: str, browser: Browser) -> None:
    visit = Visit.to(browser, address)
    box = visit.page.locator("#earlier-box")
    expect(box).to_be_visible()
    expect(box.locator("path.curve")).to_have_count(2)
    expect(box.locator("path.range")).to_have_count(1)
    text = box.inner_text()
    for name in ("20260101-010101-earlier", "20260102-010101-earlier"):
        assert name in text
    assert "foreign" not in text
    assert "median (lowest to highest)" in text
    assert "batch 9" in text
    visit.page.close()


def test_without_earlier_runs_there_is_no_comparison(view: RunView, tmp_path: Path, browser: Browser) -> None:
    server = HttpServer(CollectorRegistry(), LivePage(view, tmp_path / "alone"), 0)
    visit = Visit.to(browser, server.page_url)
    expect(visit.page.locator("#samples .sample")).to_have_count(3)
    expect(visit.page.locator("#earlier-box")).to_be_hidden()
    visit.page.close()
    server.close()


def test_the_live_page_follows_new_samples(folder: RunFolder, browser: Browser) -> None:
    view = RunView()
    view.apply(replace(RUN, run=folder.path.name))
    server = HttpServer(CollectorRegistry(), LivePage(view, folder.path), 0)
    visit = Visit.to(browser, server.page_url)
    cards = visit.page.locator("#samples .sample")
    expect(visit.page.locator("#samples")).to_have_text("No sample has been generated yet.")
    view.apply(SAMPLES[0])
    expect(cards).to_contain_text("not trained yet")
    view.apply(TRAINED)
    expect(cards).to_contain_text("trained from v9")
    visit.page.click("#pause")
    view.apply(SAMPLES[2])
    for _ in range(2):  # the first response may have been on its way
        with visit.page.expect_response("**/state.json*"):
            pass
    expect(cards).to_have_count(1)
    visit.page.click("#pause")
    expect(cards).to_have_count(2)
    assert visit.complaints == []
    visit.page.close()
    server.close()


BROKEN_WORDS = """() => {
  const broken = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (text.parentElement.closest("script, pre, svg")) continue;
    for (const word of text.textContent.matchAll(/(--)?[\\p{L}\\p{N}.%]+/gu)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((box) => box.width).map((box) => Math.round(box.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""
"""Words outside samples that are on more than one line."""
OVERFLOWS = """() => {
  const beyond = (box, frame) => box.right > frame.right + 2 || box.left < frame.left - 2;
  const page = document.body.getBoundingClientRect();
  const cells = [...document.querySelectorAll("p, dd, dt, li, h1, h2, figcaption, .bar, .filter")]
    .filter((each) => !each.closest(".scroll") && each.clientWidth && beyond(each.getBoundingClientRect(), page));
  const labels = [...document.querySelectorAll("svg text")]
    .filter((each) => beyond(each.getBoundingClientRect(), each.closest("figure").getBoundingClientRect()));
  return [...cells, ...labels].map((each) => each.textContent);
}"""
"""Texts that are partly outside the page or outside their plot."""
