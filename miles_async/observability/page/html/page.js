/* The live page: requests the state once a second and draws it, or reports that the run does not response. */

const PERIOD = 1000;
let span = "recent", paused = false, shown = null, next = null;

const multiples = new Multiples($("plots"), $("learner"), (text) => ($("spoken").textContent = text));

function draw(state) {
  const { now } = state;
  drawHeader(now);
  drawVerdict(now);
  drawCollapse(now);
  drawSilence(now);
  drawPipeline(now);
  drawSlots(now);
  drawTables(now);
  const whole = state.span === "whole";
  multiples.show([{ figures: state.figures, shift: 0 }], { staleness_limit: now.staleness_limit },
    { relative: !whole, from: now.training_began });
  const newest = now.samples[0]?.sequence;
  if (!paused && newest !== shown && !$("samples").contains(document.activeElement)) {
    drawSamples($("samples"), now.samples);
    shown = newest;
  }
  if (shown === null) drawSamples($("samples"), now.samples);
  document.title = `${now.ended ? "ended" : (now.verdict?.verdict ?? "starting")} · ${now.rollouts_done}/${now.run?.rollouts ?? "–"} · ${now.run?.run ?? "miles_async"}`;
}

async function poll() {
  if (!document.hidden) {
    try {
      const response = await fetch(`state.json?span=${span}`, { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!response.ok) throw new Error(response.statusText);
      draw(await response.json());
      $("lost").hidden = true;
    } catch {
      setText($("lost"), "The run no longer answers: it has ended, or its driver hangs. This page shows its last known state.");
      $("lost").hidden = false;
    }
  }
  clearTimeout(next);
  next = setTimeout(poll, PERIOD);
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    span = button.dataset.span;
    for (const other of document.querySelectorAll("[data-span]")) other.setAttribute("aria-pressed", other === button);
    poll();
  });
}
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
});

draw(JSON.parse($("state").textContent));
next = setTimeout(poll, PERIOD);
