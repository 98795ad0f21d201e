"use strict";
/* Shared by the live page and the report: DOM helpers, number formats, colours and the list of plots. Data of a run is
   only ever inserted as text, never as HTML. */

const SVG = "http://www.w3.org/2000/svg";

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + " k";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/* The weight versions that an evaluation ran on. */
const weights = ({ versions: [oldest, newest] }) => (oldest === newest ? `v${oldest}` : `v${oldest} to v${newest}`);
const percent = (value) => (value === null ? "–" : `${Math.round(100 * value)}%`);

/* An accuracy with its 95 % confidence interval, which is kept on one line by word joiners. */
const accuracy = (value, interval) => percent(value) + (interval ? ` (${Math.round(100 * interval[0])}\u2060–\u2060${percent(interval[1])})` : "");

/* The accuracy of an evaluation, of how many samples (`problems`), and how many samples have no score. */
const score = (event) => `${accuracy(event.accuracy, event.interval)} of ${number(event.problems)}` + (event.missing ? `, ${event.missing} missing` : "");

function duration(seconds) {
  const past = seconds < 0 ? "−" : "";
  const s = Math.abs(seconds);
  const unit = (value, name) => `${value}\u00a0${name}`; // a no-break space keeps number and unit on one line
  if (s < 1) return past + unit(number(Math.round(100 * s) / 100), "s");
  if (s < 90) return past + unit(Math.round(s), "s");
  if (s < 5400) return past + unit(Math.floor(s / 60), "min") + (s % 60 >= 1 && s < 600 ? ` ${unit(Math.floor(s % 60), "s")}` : "");
  return past + `${unit(Math.floor(s / 3600), "h")} ${unit(Math.floor((s % 3600) / 60), "min")}`;
}

const colour = (name) => `var(--${name})`;
const TRAINER = { step: "blue", batch: "orange", publish: "pink", evaluate: "green", save: "gray", interrupted: "yellow" };
const VERDICTS = {
  "rollout-bound": "sky", "trainer-bound": "blue", "publish-bound": "pink", "window-bound": "orange",
  "filter-bound": "yellow", "reward-bound": "green", "waste-bound": "orange", "concurrency-bound": "sky",
  "staleness-bound": "orange", "save-bound": "pink", "evaluation-bound": "green", "tool-bound": "green",
  "machine-bound": "gray", balanced: "gray", interrupted: "gray",
};

/* The plots. A line is [series, label, colour]. `rate` lines are smoothed, because all groups of a step are counted in
   one moment. */
const PLOTS = [
  { id: "queue", title: "Queue", unit: "groups", lines: [["queue", "queued", "green"], ["blocked", "held back", "orange"]] },
  { id: "staleness", title: "Staleness when trained", unit: "versions", lines: [["staleness", "", "blue"]], limit: "staleness_limit" },
  { id: "reward", title: "Reward", unit: "mean of the batch", lines: [["reward", "trained", "blue"]], dots: "eval" },
  { id: "rate", title: "Throughput", unit: "groups/s", lines: [["generated", "generated", "green"], ["trained", "trained", "blue"]], rate: true },
  { id: "trainer", title: "Learner's time", unit: "fraction", stack: "trainer:", colours: TRAINER,
    names: { batch: "waits for a batch", step: "trains", publish: "publishes", evaluate: "evaluates", save: "saves", interrupted: "restarts" } },
  { id: "engines", title: "Busy engines", unit: "fraction of time", lines: [["engines_busy", "", "sky"]], rate: true, fraction: true },
  { id: "flight", title: "In flight", unit: "groups", lines: [["generating", "generating", "sky"], ["slots", "slots held", "gray"]] },
  { id: "head", title: "Age of the window's head", unit: "s", lines: [["head_seconds", "", "orange"]] },
  { id: "publish", title: "Publish", unit: "ms", lines: [["pause_ms", "paused", "pink"], ["stage_ms", "staged", "gray"]] },
  { id: "lag", title: "Learner ahead of engines", unit: "versions", lines: [["version_lag", "", "pink"]] },
  { id: "length", title: "Response length", unit: "tokens", lines: [["response_length", "", "blue"]] },
  { id: "truncated", title: "Truncated at the length limit", unit: "fraction of samples", lines: [["truncated", "", "orange"]], fraction: true },
  { id: "lost", title: "Dropped groups", unit: "groups/s", lines: [["recycled", "stale", "orange"], ["dropped", "other", "gray"]], rate: true },
  { id: "step", title: "Step time", unit: "s per batch", lines: [["step_seconds", "", "blue"]] },
  { id: "loop", title: "Event-loop lag", unit: "ms", lines: [["loop_lag_ms", "", "gray"]] },
];
const EARLIER_PLOTS = [
  { id: "reward-by-batch", title: "Reward", unit: "mean of the batch", lines: [["earlier", "earlier runs", "gray"], ["reward", "this run", "blue"]] },
];
