/* Draws the status of a run: pipeline, window, engines and samples. */

const STATES = {
  fed: "admitted", in_flight: "generating", finished: "held back by the window", queued: "in the queue",
  leased: "in the learner's batch", trained: "trained, weights not live yet",
};
const BOTTLENECK = {
  "rollout-bound": "generate", "trainer-bound": "step", "publish-bound": "publish", "window-bound": "window",
  "filter-bound": "reward", "reward-bound": "reward", "waste-bound": "generate", "concurrency-bound": "generate",
  "staleness-bound": "generate", "save-bound": "step", "evaluation-bound": "step", "tool-bound": "generate",
  "machine-bound": "generate",
};
const DOES = {
  batch: "waits for a batch", step: "trains", publish: "waits for a publish", save: "writes a checkpoint", evaluate: "waits for an evaluation",
};
const BLOCKED = {
  no_engine: "no engine is available", trial: "a prompt that may crash engines is tried alone",
  in_flight: "the in-flight limit is reached", engines: "the engines are full",
  slots: "no slot is free", queue: "the queue is full",
};

const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const $ = (id) => document.getElementById(id);

function stages(now) {
  const { pulse, queue, run, outcomes, step, publish, trainer, slots } = now;
  const filtered = Object.entries(outcomes).filter(([name]) => name === "filtered").reduce((sum, [, n]) => sum + n, 0);
  const routed = now.engines.filter((engine) => engine.state === "routed").length;
  const generating = (slots.counts.in_flight ?? 0);
  return [
    { id: "data", name: "Data", big: number(now.fed), unit: now.fed === 1 ? "group" : "groups",
      details: [pulse?.waits_for ? `waits ${duration(pulse.waits_seconds)}: ${BLOCKED[pulse.waits_for] ?? pulse.waits_for}` : "admitted so far"] },
    { id: "generate", name: "Generate", big: number(generating), unit: generating === 1 ? "group" : "groups",
      details: [`${plural(now.requests, "sample")} at ${routed ? plural(routed, "engine") : "the engines"}`, pulse?.oldest != null ? `oldest ${duration(pulse.oldest_seconds)}` : null] },
    { id: "reward", name: "Reward, filter", big: number(pulse?.rewarding ?? 0), unit: "scoring", details: [`${number(filtered)} filtered out`] },
    { id: "window", name: "Window", big: number(queue?.blocked ?? 0), unit: "held back",
      details: [`W = ${run?.window ?? "–"}`, pulse ? `head waits ${duration(pulse.head_seconds)}` : null] },
    { id: "queue", name: "Queue", big: number(queue?.depth ?? 0), unit: `of ${number(run?.queue_capacity)}`, fill: (queue?.depth ?? 0) / (run?.groups_per_rollout ?? 1),
      details: [`${((queue?.depth ?? 0) / (run?.groups_per_rollout ?? 1)).toFixed(1)} batches of ${run?.groups_per_rollout ?? "–"}`] },
    { id: "gate", name: "Staleness gate", big: number(outcomes.stale ?? 0), unit: "recycled",
      details: [now.staleness_limit === null ? "no limit set" : `limit ${plural(now.staleness_limit, "version")}`, Object.keys(now.staleness).length ? `oldest trained ${Object.keys(now.staleness).at(-1)}` : null] },
    { id: "step", name: "Train", big: number(now.rollouts_done), unit: `of ${number(run?.rollouts)}`,
      details: [trainer && !now.ended ? `${DOES[trainer.does] ?? trainer.does}, ${duration(trainer.for)}` : null,
        pulse?.wanted ? `has ${pulse.collected} of ${pulse.wanted} groups` : step ? `last step ${duration(step.seconds)}` : null,
        now.undone.batches ? `${plural(now.undone.batches, "step")} undone` : null] },
    { id: "publish", name: "Publish", big: publish ? `v${publish.version}` : "–", unit: publish?.live ? "live" : "",
      details: [publish ? `paused ${number(1e3 * publish.paused_seconds)} ms` : null, now.publishing != null ? `v${now.publishing} is being published` : null] },
  ];
}

function drawPipeline(now) {
  const culprit = now.ended ? null : BOTTLENECK[now.verdict?.verdict];
  $("pipeline").replaceChildren(...stages(now).map((stage) => {
    const item = el("li", { className: `stage${stage.id === culprit ? " bottleneck" : ""}` },
      el("div", { className: "name", textContent: stage.name }),
      el("div", { className: "big" }, stage.big, " ", el("small", { textContent: stage.unit })));
    if (stage.fill !== undefined) {
      const fill = el("div");
      fill.style.width = `${Math.min(100, 100 * stage.fill)}%`;
      item.append(el("div", { className: "fill" }, fill));
    }
    for (const text of stage.details) if (text) item.append(el("div", { className: "detail", textContent: text }));
    if (stage.id === culprit) item.append(el("div", { className: "flag", textContent: "bottleneck" }));
    return item;
  }));
  const returned = ["stale", "failed", "engine_lost", "head_deadline", "aborted", "partial"].map((reason) => now.outcomes[reason] ?? 0).reduce((a, b) => a + b);
  $("recycled").textContent = `${plural(returned, "prompt")} returned to the front of the data`;
  const held = Object.values(now.slots.counts).reduce((a, b) => a + b, 0);
  $("freed").textContent = `${number(held)}${now.run?.slots ? ` of ${number(now.run.slots)}` : ""} slots held; a publish frees the slots of trained groups`;
}

function drawSlots(now) {
  const { live, head, counts } = now.slots, window = now.run?.window ?? 1;
  const edge = head === null ? -1 : live.findLastIndex(([sequence]) => sequence < head + window);
  $("slots").replaceChildren(...live.map(([sequence, state, age, attempt, feed], index) => el("span", {
    className: `slot ${state}${sequence === head ? " head" : ""}${index === edge && index < live.length - 1 ? " edge" : ""}`,
    title: `group ${sequence} (${feed}${attempt ? `, attempt ${attempt + 1}` : ""}): ${STATES[state]} for ${duration(age)}`,
  })));
  const total = Object.values(counts).reduce((a, b) => a + b, 0);
  const order = Object.keys(STATES).map((state) => `${counts[state] ?? 0} ${STATES[state]}`).join(", ");
  $("slots").setAttribute("aria-label", `${plural(total, "group")}: ${order}. ${head === null ? "No group is waiting to be collected." : `The head is group ${head}.`}`);
  $("slots-legend").replaceChildren(...Object.entries(STATES).map(([state, text]) =>
    el("li", {}, el("span", { className: `slot ${state}`, "aria-hidden": "true" }), `${number(counts[state] ?? 0)} ${text}`)));
  const note = [];
  if (total > live.length) note.push(`${number(total - live.length)} younger groups are not shown.`);
  note.push(head === null ? "No group is waiting to be collected." : `Oldest first. The framed slot is the head, group ${head}. Groups behind the dashed line cannot be collected before the head advances (W = ${window}).`);
  $("slots-note").textContent = note.join(" ");
}

/* Words longer than this many characters, such as paths and names of settings, may be broken between two lines. */
const LONG_WORD = 20;

/* The text in parts, with flags such as --num-rollout that are not broken at their hyphens. */
const withFlags = (text) => text.split(/(--[\w-]+)/).map((part) => (part.startsWith("--") ? el("span", { className: "flag-name", textContent: part }) : part));

/* The text with break opportunities behind the separators of names and paths. */
const breakable = (text) => text.split(/(?<=[._/=,-])/).flatMap((part) => [part, el("wbr")]);

function table(head, rows, empty) {
  if (!rows.length) return el("p", { className: "soft small", textContent: empty });
  const numeric = rows[0].map((cell) => typeof cell === "number");
  const cell = (tag, value, i) => {
    if (value instanceof Node) return el(tag, {}, value);
    const text = typeof value === "number" ? number(value) : String(value ?? "–");
    const long = text.split(/\s/).some((word) => word.length > LONG_WORD);
    return el(tag, { className: numeric[i] ? "number" : long ? "long" : /\s/.test(text) ? "" : "word", ...(tag === "th" ? { scope: "col" } : {}) }, ...(long && !text.includes(" ") ? breakable(text) : withFlags(text)));
  };
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name, i) => cell("th", name, i)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, i) => cell("td", value, i)))))));
}

function drawTables(now) {
  const router = now.router ? [["router", now.router.up ? "up" : "does not answer", "–", `${now.router.healthy} of ${plural(now.router.engines, "engine")} healthy`]] : [];
  const adapters = Object.entries(now.pulse?.adapters ?? {}).map(([version, requests]) => ["adapter", "loaded", `v${version}`, plural(requests, "request")]);
  $("engines").replaceChildren(table(["engine", "state", "version", ""],
    router.concat(now.engines.map((e) => [e.engine, now.silent[e.engine] ? `silent for ${duration(now.silent[e.engine])}` : e.state, e.version === null ? "–" : `v${e.version}`, e.reason ?? ""]), adapters), "No engine has been started yet."));
  const ages = Object.entries(now.staleness), most = Math.max(1, ...ages.map(([, n]) => n)), sum = ages.reduce((a, [, n]) => a + n, 0);
  $("ages").replaceChildren(table(["staleness", "groups", ""], ages.map(([age, n]) => {
    const bar = el("div");
    bar.style.width = `${(100 * n) / most}%`;
    return [age, n, el("div", { className: "histogram", title: percent(n / sum) }, bar)];
  }), "Nothing has been trained yet."));
  $("outcomes").replaceChildren(table(["outcome", "groups"], Object.entries(now.outcomes).map(([name, n]) => [name.replaceAll("_", " "), n]), "No group has ended yet."));
  $("datasets").replaceChildren(table(["data set", "mean reward, of its last groups", "groups trained", "share", "groups filtered", "epochs"],
    Object.entries(now.datasets).map(([name, of]) => [name, of.reward, of.trained, percent(of.share), of.filtered, of.epochs]), ""));
  $("datasets-box").hidden = !Object.keys(now.datasets).length;
  $("trained-adapters").replaceChildren(table(["adapter", "version", "mean reward, of its last groups", "groups trained", "share", "mean staleness of its last batch", "queue"],
    Object.entries(now.adapters).map(([name, of]) => [name, of.version < 0 ? "–" : `v${of.version}`, of.reward, of.trained, percent(of.share), of.age, of.queue]), ""));
  $("trained-adapters-box").hidden = !Object.keys(now.adapters).length;
  $("scores").replaceChildren(table(["data set", "first, of its samples", "last", "after rollout", "weights"],
    Object.entries(now.scores).map(([name, of]) => [name, score(of[0]), score(of.at(-1)), of.at(-1).rollout < 0 ? "–" : String(of.at(-1).rollout), weights(of.at(-1))]), "Nothing has been evaluated yet."));
  $("notices").replaceChildren(...now.notices.map((notice) => el("li", {}, el("span", { className: "soft", textContent: `${duration(notice.at)}  ` }), notice.text)));
  $("notices-box").hidden = !now.notices.length;
}

function drawVerdict(now) {
  const { verdict } = now;
  const bound = verdict && verdict.verdict !== "balanced";
  $("verdict").classList.toggle("bound", Boolean(bound) && !now.ended);
  const text = now.ended ? `ended: ${now.ended}` : verdict ? verdict.verdict : now.cluster ? "collecting the first measurements" : "engines, router and learner are starting";
  setText($("verdict-name"), text[0].toUpperCase() + text.slice(1));
  setText($("verdict-why"), verdict ? (now.ended ? `Last verdict: ${verdict.verdict}. ` : "") + verdict.why : "");
  setText($("verdict-knob"), verdict?.knob ?? "");
}

/* Shows that a collapse of the policy is announced. */
function drawCollapse({ collapse }) {
  $("collapse").hidden = !collapse;
  setText($("collapse"), collapse ? `The policy may collapse soon. After rollout ${collapse.rollout}, ${collapse.why}: ${collapse.knob}` : "");
}

/* Shows the processes that do not answer, and the age of the rollout worker's figures if they are old. */
function drawSilence(now) {
  const silent = Object.entries(now.silent).map(([name, seconds]) => `${name} has not answered for ${duration(Math.round(seconds))}`);
  if (!now.ended && now.pulse_age > 3) silent.push(`the figures of the rollout worker are ${duration(Math.round(now.pulse_age))} old`);
  $("silent").hidden = !silent.length || Boolean(now.ended);
  setText($("silent"), silent.join("; "));
}

/* Writes only changed text, so that a screen reader announces changes and nothing else. */
function setText(node, text) {
  if (node.textContent !== text) node.replaceChildren(...withFlags(text));
}

/* The displayed samples, with a search in their texts and rewards and a legend of the ages. */
class Samples {
  constructor() {
    this.samples = [];
    for (const id of ["search", "reward-from", "reward-to"]) $(id).addEventListener("input", () => this.draw());
  }

  show(samples) {
    this.samples = samples;
    this.draw();
  }

  draw() {
    const words = $("search").value.toLowerCase(), [from, to] = ["reward-from", "reward-to"].map((id) => $(id).valueAsNumber);
    // A bound that is not set is NaN, with which every comparison is false.
    const found = this.samples.filter((sample) => !(sample.reward < from) && !(sample.reward > to)
      && `${sample.prompt}\n${sample.response}`.toLowerCase().includes(words));
    $("samples").replaceChildren(...found.map(sampleCard));
    const none = this.samples.length ? "No sample matches." : "No sample has been generated yet.";
    if (!found.length) $("samples").append(el("li", { className: "soft small", textContent: none }));
    setText($("found"), this.samples.length ? `${number(found.length)} of ${plural(this.samples.length, "sample")}` : "");
  }
}

const AGES = ["on-policy", "1 version old", "2 versions old", "3 or more versions old"];

function drawAgesLegend() {
  $("ages-legend").replaceChildren(
    ...AGES.map((text, age) => el("li", {}, el("i", { className: `age age-${age}`, textContent: String(age) + (age === 3 ? "+" : "") }), text)),
    el("li", {}, el("i", { className: "age age-none", textContent: "…" }), "not trained, or not sampled by the model"));
}

/* The response as one element per segment of equal age. Older event logs have no segments. */
function segments(sample) {
  const characters = [...sample.response]; // code points, which segments count
  let position = 0;
  const parts = sample.segments.map(({ version, tokens, characters: count }) => {
    const text = characters.slice(position, (position += count)).join("");
    const known = `${plural(tokens, "token")} of v${version}`;
    if (version === null) return el("span", { className: "age age-none", textContent: text, title: tokens ? `${plural(tokens, "token")} that the model did not sample` : "not shown" });
    if (sample.trained === null) return el("span", { className: "age age-none", textContent: text, title: `${known}, not trained` });
    const age = sample.trained - version;
    return el("span", { className: `age age-${Math.min(3, Math.max(0, age))}`, textContent: text, title: `${known}, ${age ? `${plural(age, "version")} old` : "on-policy"} when v${sample.trained} was trained` });
  });
  return [...parts, characters.slice(position).join("")];
}

function fate({ trained, dropped }) {
  if (trained !== null) return `trained from v${trained}`;
  return dropped === null ? "not trained yet" : `not trained: ${dropped.replaceAll("_", " ")}`;
}

function sampleCard(sample) {
  const [oldest, newest] = sample.versions;
  const marks = el("span", { className: "marks", "aria-hidden": "true" }, ...sample.rewards.slice(0, 32).map((reward) => {
    const mark = el("i");
    mark.style.setProperty("--level", `${Math.round(100 * Math.min(1, Math.max(0, reward)))}%`);
    return mark;
  }));
  const mean = sample.rewards.reduce((a, b) => a + b, 0) / sample.rewards.length;
  return el("li", { className: "sample" },
    el("header", {},
      el("span", {}, el("span", { className: "reward", textContent: `reward ${number(sample.reward)}` }), `, mean of the group's ${plural(sample.rewards.length, "sample")} ${number(mean)} `, marks),
      el("span", { textContent: `group ${sample.sequence}, v${oldest}${newest === oldest ? "" : `–v${newest}`}, ${plural(sample.tokens, "token")}${sample.truncated ? ", truncated" : ""}, ${fate(sample)}` })),
    el("pre", { className: "prompt", tabIndex: 0, "aria-label": "prompt", textContent: sample.prompt }),
    el("pre", { className: "response", tabIndex: 0, "aria-label": "response" }, ...segments(sample)),
    sample.label ? el("div", { className: "small soft", textContent: `expected: ${sample.label}` }) : null);
}

/* This run beside earlier runs of the same configuration; the section is absent if there are none. */
class Earlier {
  constructor(earlier, announce) {
    this.earlier = earlier;
    $("earlier-box").hidden = !earlier;
    if (!earlier) return;
    this.plots = new Multiples($("earlier-plots"), { plots: EARLIER_PLOTS, tick: (batch) => `batch ${number(Math.max(1, Math.floor(batch)))}`, announce });
  }

  /* `summary` is that of this run, if it is known. */
  show(rewards, summary = null) {
    if (!this.earlier) return;
    // Batch 1 is the rollout 0 and covers the axis from 0.5 to 1.5.
    this.plots.show([this.earlier.figures, rewards].map((figures) => ({ figures, shift: -0.5 })), {});
    const { runs, spread } = this.earlier;
    const row = (run) => [run.run, run.reason, String(run.rollouts), accuracy(run.accuracy_before, run.accuracy_before_interval),
      accuracy(run.accuracy_after, run.accuracy_after_interval), duration(run.wall_seconds), run.groups_per_second === null ? "–" : number(run.groups_per_second)];
    const range = (name, show) => (spread[name] ? `${show(spread[name][1])} (${show(spread[name][0])} to ${show(spread[name][2])})` : "–");
    $("earlier").replaceChildren(table(["run", "end", "batches", "accuracy before", "accuracy after", "wall time", "groups/s"], [
      ...(summary ? [row({ ...summary, run: `this run, ${summary.run}`, reason: summary.reason ?? "–" })] : []),
      ...runs.map(row),
      ...(runs.length > 1 ? [["earlier runs: median (lowest to highest)", "", "", range("accuracy_before", percent), range("accuracy_after", percent), range("wall_seconds", duration), range("groups_per_second", number)]] : []),
    ], ""));
  }
}

function drawHeader(now) {
  $("run").textContent = now.run ? now.run.run : "The run has not started yet";
  $("when").textContent = `${now.run ? now.run.entry : ""} · ${duration(now.elapsed)}`;
  const done = now.run ? now.rollouts_done / now.run.rollouts : 0;
  $("progress").firstElementChild.style.width = `${100 * done}%`;
  $("progress").setAttribute("aria-valuenow", Math.round(100 * done));
}
