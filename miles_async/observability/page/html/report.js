/* The report on one run, or on two runs drawn over each other. */

/* Shows the values of an object with their names. */
const each = (show) => (values) => Object.entries(values).map(([name, value]) => `${name.replaceAll("_", " ")} ${show(value)}`).join(", ");

/* Figures of steps that were undone, because a lost learner continued from a checkpoint. */
const UNDONE_FIGURES = [
  ["undone_batches", "batches undone", number], ["groups_per_second_gross", "groups per second, with undone batches", number],
  ["tokens_per_second_gross", "prompt and response tokens per second, with undone batches", number], ["lost_learner_seconds", "time of undone and unfinished steps", duration],
];

const FIGURES = [
  ["wall_seconds", "wall time", duration], ["training_seconds", "training time", duration], ["warm_start_seconds", "warm start", duration],
  ["rollouts", "rollouts", number], ["versions", "weight versions", number], ["accuracy_before", "held-out accuracy before", accuracy],
  ["accuracy_after", "held-out accuracy after", accuracy], ["reward_first", "mean reward of the first batches", number], ["reward_last", "mean reward of the last batches", number],
  ["reward_batches", "batches in these means", number],
  ["groups_per_second", "groups trained per second", number], ["tokens_per_second", "prompt and response tokens trained per second", number],
  ["restarts", "restarts", each(number)], ["interrupted_seconds", "time without a rollout worker", each(duration)],
  ["learner_idle_share", "learner idle", percent], ["engine_idle_share", "engines idle", percent],
  ["publish_ms_median", "publish, median ms", number], ["pause_ms_median", "pause, median ms", number], ["pause_ms_max", "pause, longest ms", number],
  ["staleness_max", "highest staleness trained, versions", number], ["recycled", "groups recycled because of staleness", number],
  ["generated_tokens", "response tokens generated", number], ["wasted_share", "response tokens wasted", percent], ["wasted_mainly", "wasted mainly because", String],
  ["left_out_samples", "failed samples left out", number], ["lost_tokens_at_most", "response tokens lost with processes, at most", number],
  ["collapse_announced_after_rollout", "collapse announced after rollout", number],
  ["weight_transfer", "weight transport", String], ["reason", "end of the run", String],
];

const { runs, knobs } = JSON.parse($("state").textContent);
const [main, other] = runs;
const origin = (run) => run.state.now.training_began ?? 0;

/* Whether there is nothing to show: no event, or an object without entries. */
const isEmpty = (value) => value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length);

function figures() {
  const undone = runs.some((run) => run.summary.undone_batches) ? UNDONE_FIGURES : [];
  const rows = [...FIGURES, ...undone].map(([key, label, show]) => {
    const values = runs.map((run) => run.summary[key]);
    if (values.every(isEmpty)) return null;
    const shown = values.map((value, i) => (isEmpty(value) ? "–" : show(value, runs[i].summary[`${key}_interval`])));
    const ratio = other && values.every((value) => typeof value === "number") && values[1] ? `×${number(values[0] / values[1])}` : "";
    return [label, ...shown, ...(other ? [ratio] : [])];
  }).filter((row) => row !== null);
  if (!other) {
    $("figures").append(el("dl", { className: "tiles" }, ...rows.map(([label, value]) => el("div", {}, el("dt", { textContent: label }), el("dd", { textContent: value })))));
    return;
  }
  $("figures").append(table(["", ...runs.map((run) => run.name), "ratio"], rows, ""));
}

function verdicts() {
  const rows = runs.flatMap((run) => {
    const seconds = run.summary.verdict_seconds, longest = {};
    for (const [start, end, verdict] of run.phases) longest[verdict] = Math.max(longest[verdict] ?? 0, end - start);
    const total = Object.values(seconds).reduce((a, b) => a + b, 0);
    return Object.keys(seconds).sort((a, b) => seconds[b] - seconds[a])
      .map((verdict) => [...(other ? [run.name] : []), verdict, percent(seconds[verdict] / total), duration(longest[verdict] ?? 0), knobs[verdict] ?? ""]);
  });
  $("verdicts").append(table([...(other ? ["run"] : []), "verdict", "fraction of the time", "longest phase", "what to change"], rows, "There is no verdict."));
}

/* Shows counts and scores of both runs side by side. The other tables show only the first run, and their headings name it. */
function compareTables() {
  const rows = (of, cells) => [...new Set(runs.flatMap((run) => Object.keys(run.state.now[of])))].map((key) => [key, ...runs.map((run) => cells(run.state.now[of][key]))]);
  const counts = (of) => rows(of, (count) => count ?? 0);
  const names = runs.map((run) => run.name);
  $("ages").replaceChildren(table(["staleness", ...names], counts("staleness").sort((a, b) => a[0] - b[0]), "Nothing has been trained."));
  $("outcomes").replaceChildren(table(["outcome", ...names], counts("outcomes").map(([name, ...of]) => [name.replaceAll("_", " "), ...of]), "No group has ended."));
  $("scores").replaceChildren(table(["data set", ...names], rows("scores", (of) => (of ? `${percent(of[0].accuracy)} to ${score(of.at(-1))}, ${weights(of.at(-1))}` : "–")), "Nothing has been evaluated."));
  for (const heading of ["h-engines", "h-datasets", "h-trained-adapters", "h-earlier", "h-notices", "h-samples"]) $(heading).append(` of ${main.name}`);
}

function bands() {
  $("bands").replaceChildren();
  for (const run of runs) {
    verdictBand($("bands"), run.phases, multiples.from, multiples.to, origin(run), other ? `Verdict, ${run.name}` : "Verdict");
  }
}

function configuration() {
  const settings = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const text = (run, name) => (name in run.config ? JSON.stringify(run.config[name]) : "–");
  if (other) {
    const differing = settings.filter((name) => text(main, name) !== text(other, name));
    $("differences").append(table(["setting that differs", main.name, other.name], differing.map((name) => [name, text(main, name), text(other, name)]), "Both runs have the same settings."));
  }
  $("config").append(table(["setting", ...runs.map((run) => run.name)], settings.map((name) => [name, ...runs.map((run) => text(run, name))]), "The settings are unknown."));
}

const { now } = main.state;
const announce = (text) => ($("spoken").textContent = text);
const multiples = new Multiples($("plots"), { learner: $("learner"), announce });
drawHeader(now);
if (!now.ended) $("when").append(" · without a recorded end");
drawVerdict(now);
drawCollapse(now);
if (main.summary.verdict) {
  const seconds = main.summary.verdict_seconds, total = Object.values(seconds).reduce((a, b) => a + b, 0);
  setText($("verdict-name"), `Mostly ${main.summary.verdict}`);
  setText($("verdict-why"), `for ${percent(seconds[main.summary.verdict] / total)} of the time. ${now.ended ? `End of the run: ${now.ended}.` : ""}`);
  setText($("verdict-knob"), main.summary.knob);
}
figures();
verdicts();
multiples.show(runs.map((run, i) => ({ name: run.name, figures: run.state.figures, shift: origin(run), other: i > 0 })), { staleness_limit: now.staleness_limit }, { from: 0 });
bands();
new ResizeObserver(bands).observe($("plots"));
drawTables(now);
if (other) compareTables();
configuration();
drawAgesLegend();
new Samples().show(main.samples);
new Earlier(main.earlier, announce).show(main.state.rewards, main.summary);
if (other) {
  $("key").append(el("span", { className: "swatch" }), `${main.name}   `, el("span", { className: "swatch other" }), other.name);
}
document.title = `${main.name}${other ? ` and ${other.name}` : ""} · run report`;
