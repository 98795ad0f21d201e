/* Small multiples with a common time axis and a common cursor. */

function smooth(values, reach) {
  if (reach < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + (value ?? 0));
  return values.map((_, i) => {
    const from = Math.max(0, i - reach), to = Math.min(values.length, i + reach + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/* The plots of one page. `sources` are [{name, figures, shift, other}], which are drawn over each other. */
class Multiples {
  /* Plots of learner metrics go to the element `learner`, if there is one, and the given `plots` to `root`. `tick` is
     the text of a time; `announce` is called with text for screen readers. */
  constructor(root, { plots = PLOTS, learner = null, tick = duration, announce }) {
    this.root = root;
    this.specs = plots;
    this.learner = learner;
    this.tick = tick;
    this.announce = announce;
    this.at = null;
    this.plots = new Map();
    this.sources = [];
    new ResizeObserver(() => this.root.clientWidth !== this.width && this.draw()).observe(root);
    learner?.closest("details").addEventListener("toggle", () => this.draw());
  }

  /* Data before `from` is not drawn, if `from` is given. */
  show(sources, facts, { relative = false, from = null } = {}) {
    this.sources = sources;
    this.facts = facts;
    this.relative = relative;
    const begins = sources.map((s) => s.figures.start - s.shift);
    const ends = sources.map((s) => s.figures.start - s.shift + s.figures.width * Math.max(1, length(s.figures)));
    this.to = Math.max(...ends);
    this.from = from !== null && from < this.to ? Math.max(from, ...begins) : Math.min(...begins);
    this.draw();
  }

  draw() {
    if (!this.sources.length) return;
    const known = [...this.specs.flatMap((spec) => this.perRun(spec)), ...this.learnerPlots()].filter((spec) => this.names(spec).length);
    for (const spec of known) if (!this.plots.has(spec.id)) this.add(spec);
    // All plots have the same width. Reading it once, before anything is drawn, avoids a layout pass per plot.
    const width = known.length ? this.plots.get(known[0].id).svg.clientWidth : 0;
    this.width = this.root.clientWidth;
    for (const spec of known) this.plots.get(spec.id).draw(spec, width || 320);
  }

  /* One plot for each metric that the learner reports; none while they are folded away. */
  learnerPlots() {
    if (!this.learner) return [];
    const names = new Set(this.sources.flatMap((s) => Object.keys(s.figures.series).filter((name) => name.startsWith("step:"))));
    const details = this.learner.closest("details");
    details.hidden = !names.size;
    if (!details.open) return [];
    return [...names].sort().map((name) => ({ id: name, title: name.slice(5).replaceAll("_", " "), unit: "", learner: true, lines: [[name, "", "blue"]] }));
  }

  /* Stacked fractions fill their plot and cannot be drawn over each other, so each run gets its own plot. */
  perRun(spec) {
    if (!spec.stack || this.sources.length === 1) return [spec];
    return this.sources.map((source, i) => ({ ...spec, id: i ? `${spec.id}-other` : spec.id, title: `${spec.title}, ${source.name}`, source }));
  }

  names(spec) {
    const every = new Set(this.sources.flatMap((s) => Object.keys(s.figures.series)));
    return spec.stack ? [...every].filter((name) => name.startsWith(spec.stack)) : spec.lines.map((l) => l[0]).filter((n) => every.has(n));
  }

  add(spec) {
    const plot = new Plot(this, spec);
    this.plots.set(spec.id, plot);
    if (spec.learner) return void this.learner.append(plot.figure);
    // Plots keep the order of their specifications, although their series may appear in a different order.
    const order = (figure) => this.specs.findIndex((each) => figure.id === `plot-${each.id}` || figure.id === `plot-${each.id}-other`);
    this.root.insertBefore(plot.figure, [...this.root.children].find((other) => order(other) > order(plot.figure)) ?? null);
  }

  point(time, from) {
    this.at = time === null ? null : Math.min(this.to, Math.max(this.from, time));
    for (const plot of this.plots.values()) plot.updateCursor();
    if (from && this.at !== null) this.announce(`${this.clock(this.at)}: ${from.spec.title} ${from.valueText()}`);
  }

  clock(time) {
    return this.relative ? (time >= this.to - 1 ? "now" : `${this.tick(this.to - time)} ago`) : this.tick(time);
  }
}

const length = (figures) => Math.max(0, ...Object.values(figures.series).map((series) => series.mean.length));

class Plot {
  constructor(all, spec) {
    this.all = all;
    this.spec = spec;
    this.value = el("span", { className: "value" });
    this.svg = shape("svg", { role: "img" });
    this.figure = el("figure", { className: "plot", tabIndex: 0 },
      el("figcaption", {}, el("span", {}, el("b", { textContent: spec.title }), " ", el("span", { className: "unit", textContent: spec.unit })), this.value),
      this.svg);
    this.figure.id = `plot-${spec.id}`;
    const timeAt = (event) => {
      const box = this.svg.getBoundingClientRect();
      return this.all.from + ((event.clientX - box.left - this.left) / (this.right - this.left)) * (this.all.to - this.all.from);
    };
    this.svg.addEventListener("pointermove", (event) => this.all.point(timeAt(event)));
    this.svg.addEventListener("pointerleave", () => this.all.point(null));
    this.figure.addEventListener("keydown", (event) => this.key(event));
    this.figure.addEventListener("blur", () => this.all.point(null));
  }

  key(event) {
    const { all } = this;
    const step = (all.to - all.from) / (event.shiftKey ? 10 : 60);
    const targets = { ArrowLeft: (all.at ?? all.to) - step, ArrowRight: (all.at ?? all.to) + step, Home: all.from, End: all.to, Escape: null };
    if (!(event.key in targets)) return;
    event.preventDefault();
    all.point(targets[event.key], this);
  }

  x(time) {
    return this.left + ((time - this.all.from) / (this.all.to - this.all.from || 1)) * (this.right - this.left);
  }

  y(value) {
    return this.bottom - ((value - this.low) / (this.high - this.low || 1)) * (this.bottom - this.top);
  }

  /* Each curve as {name, label, colour, points: [[time, mean, low, high]], other}. */
  curves() {
    const curves = [];
    for (const source of this.all.sources) {
      const { start, width, series } = source.figures;
      const time = (i) => start - source.shift + (i + 0.5) * width;
      const lines = this.spec.lines.filter(([name]) => name in series);
      for (const [name, label, tint] of lines) {
        const reach = this.spec.rate ? Math.round(Math.max(5, (this.all.to - this.all.from) / 60) / width) : 0;
        const { mean, low, high } = series[name];
        const points = smooth(mean, reach).map((value, i) => [time(i), value, low?.[i] ?? value, high?.[i] ?? value]);
        curves.push({ name, label, colour: source.other ? (lines.length > 1 ? tint : "orange") : tint, points: points.filter((p) => p[1] !== null && p[0] >= this.all.from), other: source.other });
      }
    }
    return curves;
  }

  draw(spec, width) {
    this.spec = spec;
    const height = 112;
    this.left = 40; this.top = 8; this.bottom = height - 16;
    const names = spec.stack ? Object.values(spec.names) : spec.lines.length > 1 ? spec.lines.map((line) => line[1]) : [];
    this.right = width - (names.length ? 12 + 6.6 * Math.max(...names.map((name) => name.length)) : 10);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (spec.stack) this.drawStack(); else this.drawLines();
    this.axis();
    this.mark = shape("line", { class: "cursor", y1: this.top, y2: this.bottom, visibility: "hidden" });
    this.svg.append(this.mark);
    this.updateCursor();
    this.svg.setAttribute("aria-label", this.summary());
  }

  drawLines() {
    const curves = (this.drawn = this.curves());
    const dots = this.dots();
    const limit = this.spec.limit ? this.all.facts[this.spec.limit] : null;
    const values = [...curves.flatMap((c) => c.points.flatMap((p) => [p[2], p[3]])), ...dots.flatMap((d) => d.slice(1))];
    const highest = Math.max(0, ...values, limit !== null && Math.max(...values) >= limit / 2 ? limit : 0);
    const lowest = Math.min(0, ...values);
    this.high = this.spec.fraction ? Math.max(niceTop(highest), highest > 0.25 ? 1 : 0) : niceTop(highest);
    this.low = lowest < 0 ? -niceTop(-lowest) : 0;
    if (lowest < 0 && highest <= 0) this.high = 0;
    this.gridlines();
    if (limit !== null && limit <= this.high) {
      this.svg.append(shape("line", { class: "limit", x1: this.left, x2: this.right, y1: this.y(limit), y2: this.y(limit) }));
      this.svg.append(shape("text", { class: "label", x: this.left + 4, y: this.y(limit) + 12 }, `limit ${limit}`));
    }
    for (const curve of curves) this.curve(curve);
    for (const [time, value, low, high] of dots) {
      const x = this.x(time), ends = [low, high].map((end) => this.y(end));
      this.svg.append(shape("path", { class: "whisker", d: `M${x} ${ends.join("V")}${ends.map((y) => `M${x - 3} ${y}h6`).join("")}`, stroke: colour("orange") }));
      this.svg.append(shape("circle", { cx: this.x(time), cy: this.y(value), r: 3, fill: colour("orange") }));
    }
    if (dots.length) {
      const [time, value] = dots[dots.length - 1], x = this.x(time), early = x < (this.left + this.right) / 2;
      const label = shape("text", { class: "label", x: early ? x + 7 : x - 7, y: this.y(value) + 4, "text-anchor": early ? "start" : "end" }, "held-out accuracy");
      label.style.fill = colour("orange");
      this.svg.append(label);
    }
    if (this.spec.lines.length > 1) this.labels(curves.filter((c) => !c.other).map((c) => [c.label, c.colour, c.points.at(-1)?.[1]]));
  }

  curve(curve) {
    if (!curve.points.length) return;
    const coordinates = (time, value) => `${this.x(time).toFixed(1)} ${this.y(value).toFixed(1)}`;
    const banded = !curve.other && curve.points.some((p) => p[2] !== p[3]);
    if (banded) {
      const upper = curve.points.map((p) => coordinates(p[0], p[3])), lower = curve.points.map((p) => coordinates(p[0], p[2])).reverse();
      this.svg.append(shape("path", { class: "range", d: `M${[...upper, ...lower].join("L")}Z`, fill: colour(curve.colour) }));
    }
    const points = curve.points.map((p) => coordinates(p[0], p[1]));
    if (points.length === 1) points.push(points[0]);
    this.svg.append(shape("path", { class: `curve${curve.other ? " other" : ""}`, d: `M${points.join("L")}`, stroke: colour(curve.colour) }));
  }

  /* Single observations with their confidence intervals, such as evaluations, as [time, value, low, high]. */
  dots() {
    const { dots } = this.spec;
    if (!dots) return [];
    return this.all.sources.filter((s) => !s.other).flatMap(({ figures: { start, width, series }, shift }) =>
      Object.keys(series).filter((name) => name.startsWith(`${dots}:`)).slice(0, 1).flatMap((name) => {
        const [low, high] = ["low", "high"].map((end) => series[name.replace(dots, `${dots}-${end}`)].mean);
        return series[name].mean.map((value, i) => [start - shift + (i + 0.5) * width, value, low[i], high[i]]).filter((d) => d[1] !== null && d[0] >= this.all.from);
      }));
  }

  drawStack() {
    this.low = 0; this.high = 1;
    this.drawn = [];
    const { figures, shift } = this.spec.source ?? this.all.sources[0];
    // Bars narrower than two seconds, or more than 90 of them, would flicker instead of showing a trend, so buckets are
    // combined into bins.
    const parts = Object.keys(this.spec.colours).map((key) => [key, figures.series[this.spec.stack + key]?.mean]).filter((p) => p[1]);
    const count = length(figures), bin = Math.max(1, Math.ceil(Math.max(count / 90, 2 / figures.width)));
    const base = new Array(Math.ceil(count / bin)).fill(0);
    this.gridlines();
    for (const [key, values] of parts) {
      const points = base.map((low, b) => {
        const part = values.slice(b * bin, (b + 1) * bin);
        const mean = part.reduce((sum, v) => sum + (v ?? 0), 0) / Math.max(1, part.length);
        base[b] = Math.min(1, low + mean);
        return [figures.start - shift + b * bin * figures.width, low, base[b], mean];
      }).filter((p) => p[0] >= this.all.from);
      if (!points.length) continue;
      const end = (i) => Math.min(this.all.to, points[i][0] + bin * figures.width);
      const over = points.map((p, i) => `${this.x(p[0])} ${this.y(p[2])}L${this.x(end(i))} ${this.y(p[2])}`);
      const under = points.map((p, i) => `${this.x(end(i))} ${this.y(p[1])}L${this.x(p[0])} ${this.y(p[1])}`).reverse();
      this.svg.append(shape("path", { d: `M${[...over, ...under].join("L")}Z`, fill: colour(this.spec.colours[key]) }));
      this.drawn.push({ name: key, label: this.spec.names[key], colour: this.spec.colours[key], points: points.map((p) => [p[0] + (bin * figures.width) / 2, p[3], p[1], p[2]]) });
    }
    this.labels(this.drawn.map((c) => [c.label, c.colour, (c.points.at(-1)[2] + c.points.at(-1)[3]) / 2]));
  }

  /* Labels at the ends of the lines, moved apart if they would overlap. */
  labels(entries) {
    const placed = entries.filter((e) => e[2] !== undefined).map(([text, tint, value]) => ({ text, tint, y: this.y(value) + 4 })).sort((a, b) => a.y - b.y);
    for (let i = 1; i < placed.length; i++) placed[i].y = Math.max(placed[i].y, placed[i - 1].y + 13);
    const over = placed.length ? placed[placed.length - 1].y - (this.bottom + 4) : 0;
    for (let i = placed.length - 1, y = this.bottom + 4; over > 0 && i >= 0; i--, y -= 13) placed[i].y = Math.min(placed[i].y, y);
    for (const { text, tint, y } of placed) {
      const label = shape("text", { class: "label", x: this.right + 6, y }, text);
      label.style.fill = colour(tint);
      this.svg.append(label);
    }
  }

  gridlines() {
    const show = this.spec.fraction || this.spec.stack ? percent : number;
    for (const value of this.low < 0 && this.high > 0 ? [this.low, 0, this.high] : [this.low, (this.low + this.high) / 2, this.high]) {
      const y = this.y(value);
      this.svg.append(shape("line", { class: value === 0 ? "zero" : "grid", x1: this.left, x2: this.right, y1: y, y2: y }));
      if (value !== (this.low + this.high) / 2 || value === 0) this.svg.append(shape("text", { x: this.left - 5, y: y + 4, "text-anchor": "end" }, show(value)));
    }
  }

  axis() {
    const { from, to, relative, tick } = this.all, y = this.bottom + 14;
    this.svg.append(shape("text", { x: this.left, y }, relative ? `−${tick(to - from)}` : tick(from)));
    this.svg.append(shape("text", { x: this.right, y, "text-anchor": "end" }, relative ? "now" : tick(to)));
  }

  at(curve) {
    if (!curve.points.length) return null;
    if (this.all.at === null) return curve.points[curve.points.length - 1];
    return curve.points.reduce((best, p) => (Math.abs(p[0] - this.all.at) < Math.abs(best[0] - this.all.at) ? p : best));
  }

  valueText() {
    const show = this.spec.fraction || this.spec.stack ? percent : number;
    return this.drawn.map((c) => [c, this.at(c)]).filter(([, p]) => p)
      .map(([c, p]) => (this.spec.stack || this.drawn.length > 1 ? `${c.other ? "other run " : ""}${c.label || c.name} ` : "") + show(p[1])).join(", ");
  }

  updateCursor() {
    const { at } = this.all;
    const show = this.spec.fraction || this.spec.stack ? percent : number;
    const shown = (curves) => curves.map((c) => `${this.spec.stack ? `${c.label} ` : ""}${show(this.at(c)?.[1] ?? null)}`).join(" · ");
    const chief = this.spec.stack ? this.drawn.slice(0, 1) : this.drawn.filter((c) => !c.other);
    const others = this.drawn.filter((c) => c.other);
    this.value.textContent = shown(chief) + (others.length ? ` vs ${shown(others)}` : "");
    this.mark.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) for (const end of ["x1", "x2"]) this.mark.setAttribute(end, this.x(at));
  }

  summary() {
    const show = this.spec.fraction || this.spec.stack ? percent : number;
    const parts = this.drawn.filter((c) => c.points.length).map((c) => {
      const values = c.points.map((p) => p[1]);
      const name = `${c.other ? "other run, " : ""}${c.label || ""}`.trim();
      return `${name} now ${show(values[values.length - 1])}, between ${show(Math.min(...values))} and ${show(Math.max(...values))}`.trim();
    });
    return `${this.spec.title}, ${this.spec.unit}: ${parts.join("; ") || "no data yet"}`;
  }
}

/* The verdict over time as a band. `phases` are [start, end, verdict]. */
function verdictBand(root, phases, from, to, shift, title) {
  if (!phases.length) return;
  const svg = shape("svg", { role: "img" });
  const figure = el("figure", { className: "plot wide" }, el("figcaption", {}, el("b", { textContent: title })), svg);
  root.append(figure);
  const width = svg.clientWidth || 900, left = 40, right = width - 10;
  svg.setAttribute("viewBox", `0 0 ${width} 44`);
  const x = (time) => left + ((time - from) / (to - from || 1)) * (right - left);
  for (const [start, end, verdict] of phases) {
    const a = x(start - shift), b = x(Math.min(end - shift, to));
    svg.append(shape("rect", { x: a, y: 2, width: Math.max(0.5, b - a), height: 22, fill: colour(VERDICTS[verdict] ?? "gray") }));
    if (b - a > verdict.length * 6.5 + 8) {
      const name = shape("text", { x: a + 6, y: 17 }, verdict);
      name.style.fill = "var(--paper)";
      name.style.fontWeight = 600;
      svg.append(name);
    }
  }
  svg.append(shape("text", { x: left, y: 38 }, duration(from)), shape("text", { x: right, y: 38, "text-anchor": "end" }, duration(to)));
  svg.setAttribute("aria-label", `${title}: ${phases.map(([start, end, verdict]) => `${verdict} from ${duration(start - shift)} to ${duration(end - shift)}`).join(", ") || "none yet"}`);
}
