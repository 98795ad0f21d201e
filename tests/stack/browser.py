"""A real headless Chromium, and what tests measure of a page in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("no Chromium was found; install it: sudo apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, as containers do; the pages are our own.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that was opened, with all it asked for and complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @staticmethod
    def to(browser: Browser, url: str, *, width: int = 1280, **options: Any) -> Visit:
        visit = Visit(browser.new_page(viewport={"width": width, "height": 900}, **options))
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.on("console", lambda message: visit.complaints.append(message.text))
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.goto(url)
        return visit

    @property
    def first_paint_ms(self) -> float:
        return float(self.page.evaluate(_FIRST_PAINT))

    @property
    def scrolls_sideways(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))

    def contrasts(self) -> dict[str, float]:
        """WCAG contrast with the paper of every colour that text is set in."""
        return dict(self.page.evaluate(_CONTRASTS))

    def tab_through(self, most: int = 200) -> list[str]:
        """Names of the elements that the keyboard can focus, in order."""
        reached: list[str] = []
        for _ in range(most):
            self.page.keyboard.press("Tab")
            name = self.page.evaluate("document.activeElement.id || document.activeElement.className")
            if self.page.evaluate("document.activeElement === document.body"):
                break
            reached.append(str(name))
        return reached


_FIRST_PAINT = """() => new Promise((told) => {
  const seen = (list) => list.getEntriesByName("first-contentful-paint").forEach((entry) => told(entry.startTime));
  new PerformanceObserver(seen).observe({ type: "paint", buffered: true });
})"""
_CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = style.getPropertyValue(name);
    const parts = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255);
    probe.remove();
    const [r, g, b] = parts.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return ["--ink", "--soft", "--blue", "--orange", "--green", "--pink", "--alarm"]
    .map((name) => [name, contrast(light(name), light("--paper"))]);
}"""
