"""One bar on stderr: rollout, queue, staleness, reward."""

from __future__ import annotations

from typing import Any, TextIO

from tqdm import tqdm

from miles_async.events import Event, QueueChanged, RunEnded, RunStarted, StepEnded, StepStarted


class Progress:
    """Writes nothing at all where the stream is no terminal or the bar is switched off."""

    def __init__(self, stream: TextIO, *, enabled: bool) -> None:
        self._stream = stream
        self._enabled = enabled and stream.isatty()
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}

    def observe(self, event: Event) -> None:
        if not self._enabled:
            return
        match event:
            case RunStarted():
                self._bar = tqdm(total=event.rollouts, desc="rollout", unit="batch", file=self._stream)
            case QueueChanged():
                self._show(queue=str(event.depth))
            case StepStarted():
                self._show(staleness=f"{sum(event.staleness) / len(event.staleness):.1f}")
            case StepEnded():
                self._show(reward=f"{event.reward:.3f}")
                if self._bar is not None:
                    self._bar.update(1)
            case RunEnded():
                self.close()
            case _:
                pass

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, **figures: str) -> None:
        if self._bar is not None:
            self._shown |= figures
            # The bar redraws itself at its own pace; drawing at every queue event would cost more than it shows.
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update(0)
