/* The live page: requests the state once a second and draws it, or reports that the run does not respond. */

const PERIOD = 1000;
const { state: first, earlier: earlierRuns } = JSON.parse($("state").textContent);
const announce = (text) => ($("spoken").textContent = text);
let span = "recent", paused = false, shown = null, next = null;

const multiples = new Multiples($("plots"), { learner: $("learner"), announce });
const earlier = new Earlier(earlierRuns, announce);
const samples = new Samples();
drawAgesLegend();

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
  earlier.show(state.rewards);
  document.title = `${now.ended ? "ended" : (now.verdict?.verdict ?? "starting")} · ${now.rollouts_done}/${now.run?.rollouts ?? "–"} · ${now.run?.run ?? "miles_async"}`;
}

async function request(address) {
  const response = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (!response.ok) throw new Error(response.statusText);
  return response.json();
}

/* Requests the samples if they changed, unless the user reads one. */
async function refreshSamples(revision) {
  if (revision === shown || (shown !== null && (paused || $("samples").contains(document.activeElement)))) return;
  const answer = await request("samples.json");
  samples.show(answer.samples);
  shown = answer.revision;
}

async function poll() {
  if (!document.hidden) {
    try {
      const state = await request(`state.json?span=${span}`);
      draw(state);
      await refreshSamples(state.samples_revision);
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

draw(first);
poll();
