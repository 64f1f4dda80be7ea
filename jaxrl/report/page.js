"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** An element with attributes, and children that are nodes or plain text. */
function el(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attrs)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function svg(tag, attrs = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attrs)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

// ---------------------------------------------------------------- theme
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function setTheme(isDark) { document.documentElement.dataset.theme = isDark ? "dark" : "light"; }
setTheme(dark.matches);
dark.addEventListener("change", () => setTheme(dark.matches));
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));

// ---------------------------------------------------------------- numbers
function short(v, unit = "") {
  if (v === null || v === undefined) return "no value";
  const a = Math.abs(v);
  let text;
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) text = v.toExponential(a < 1e-3 ? 1 : 2);
  else if (a >= 1000) text = Math.round(v).toLocaleString("en-US");
  else text = String(+v.toPrecision(a < 1 ? 3 : 4));
  return unit === "s" ? `${text} s` : text;
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(+(i * step).toPrecision(12));
  return out;
}
/** Exponential moving average without the bias of its start; gaps stay gaps. */
function smooth(points, weight) {
  let sum = 0, mass = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, y];
    sum = weight * sum + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, sum / mass];
  });
}

// ---------------------------------------------------------------- charts
const size = { height: 196, left: 50, right: 10, top: 8, bottom: 22 };
const steps = data.charts.flatMap((chart) => chart.lines.flatMap((line) => line.points.map((p) => p[0])));
let lastStep = 1, firstStep = Infinity;
for (const step of steps) { lastStep = Math.max(lastStep, step); firstStep = Math.min(firstStep, step); }
if (firstStep >= lastStep) firstStep = lastStep - 1;
let smoothing = 0;
const MANY = 40; // points from which on smoothing helps

class Chart {
  constructor(spec, parent) {
    Object.assign(this, spec);
    this.withLegend = spec.legend;
    this.lines.forEach((line, i) => { line.color = `var(--c${i % 8})`; line.off = false; });
    this.legend = el("div", { class: "legend" });
    this.canvas = svg("svg", { role: "img", "aria-label": this.title });
    const note = el("span", { class: "note" }, this.note);
    this.node = el("figure", { class: this.kind === "stack" ? "chart wide" : "chart" }, el("h3", {}, this.title, note), this.legend, this.canvas);
    parent.append(this.node);
    for (const line of this.lines) {
      const swatch = el("i", { style: `background:${line.color}` });
      const toggle = () => { line.off = !line.off; button.classList.toggle("off", line.off); this.draw(); };
      const button = el("button", { type: "button", title: "Show or hide", onclick: toggle }, swatch, line.label);
      if (this.withLegend) this.legend.append(button);
    }
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", leave);
  }
  get shown() { return this.lines.filter((line) => !line.off); }

  /** The curves as drawn: smoothed, or summed from below in a stack. */
  curves() {
    const stacked = this.kind === "stack";
    const below = [];
    return this.shown.map((line) => {
      if (this.kind === "dots") return { line, points: line.points };
      const points = smoothing && line.points.length > MANY ? smooth(line.points, smoothing) : line.points;
      if (!stacked) return { line, points };
      const sums = points.map(([x, y], i) => [x, (below[i] || 0) + (y || 0)]);
      const area = { line, points: sums, base: sums.map(([x], i) => [x, below[i] || 0]) };
      sums.forEach(([, y], i) => { below[i] = y; });
      return area;
    });
  }
  domain(curves) {
    const raw = this.kind === "stack" ? [] : this.shown.flatMap((line) => line.points);
    const values = [...curves.flatMap((c) => c.points), ...raw].map((p) => p[1]).filter((v) => v !== null);
    const positive = values.filter((v) => v > 0);
    this.log = this.scale === "log" && positive.length > 0;
    if (this.log) {
      const low = Math.floor(Math.log10(minimum(positive))), high = Math.ceil(Math.log10(maximum(positive)));
      return [low, Math.max(high, low + 1)];
    }
    if (this.unit === "fraction") return [0, 1];
    if (!values.length) return [0, 1];
    let low = minimum(values), high = maximum(values);
    if (this.kind === "stack" || (low >= 0 && low < 0.6 * high)) low = 0;
    if (high - low <= 1e-6 * Math.abs(high)) { low = Math.min(0, 2 * low); high = Math.max(0, 2 * high) || 1; }
    const room = 0.04 * (high - low);
    return [low === 0 ? 0 : low - room, high + room];
  }
  draw() {
    const width = this.canvas.parentNode.clientWidth - 28, { height, left, right, top, bottom } = size;
    if (width < 60) return;
    this.width = width;
    const curves = this.curves(), [low, high] = this.domain(curves);
    this.x = (step) => left + ((step - firstStep) / (lastStep - firstStep)) * (width - left - right);
    const y = (v) => height - bottom - ((v - low) / (high - low)) * (height - top - bottom);
    this.y = this.log ? (v) => y(v > 0 ? Math.max(Math.log10(v), low) : low) : y;
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.canvas.setAttribute("height", height);
    this.canvas.replaceChildren();
    this.axes(low, high);
    for (const { line, points, base } of curves) this.curve(line, points, base);
    this.cross = svg("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    this.canvas.append(this.cross);
  }
  axes(low, high) {
    const { height, left, right, top, bottom } = size;
    let values = this.log ? ticks(low, high, 4).filter(Number.isInteger).map((v) => 10 ** v) : ticks(low, high, 4);
    for (const v of values) {
      const at = this.y(v);
      this.canvas.append(svg("line", { class: "gridline", x1: left, x2: this.width - right, y1: at, y2: at }));
      this.canvas.append(svg("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, this.log ? v.toExponential(0) : short(v)));
    }
    this.canvas.append(svg("line", { class: "axis", x1: left, x2: this.width - right, y1: height - bottom, y2: height - bottom }));
    for (const step of ticks(firstStep, lastStep, Math.max(this.width / 90, 2)).filter(Number.isInteger)) {
      this.canvas.append(svg("text", { x: this.x(step), y: height - 5, "text-anchor": "middle" }, step.toLocaleString("en-US")));
    }
  }
  path(points) {
    let out = "", pen = "M";
    for (const [step, v] of points) {
      if (v === null) { pen = "M"; continue; }
      out += `${pen}${this.x(step).toFixed(1)} ${this.y(v).toFixed(1)}`;
      pen = "L";
    }
    return out;
  }
  curve(line, points, base) {
    const style = `stroke:${line.color}`;
    if (base) {
      const back = this.path([...base].reverse()).replace("M", "L");
      this.canvas.append(svg("path", { d: `${this.path(points)}${back}Z`, style: `fill:${line.color}`, "fill-opacity": 0.82 }));
      return;
    }
    if (points !== line.points && this.kind === "line") {
      this.canvas.append(svg("path", { d: this.path(line.points), style, fill: "none", "stroke-opacity": 0.25, "stroke-width": 1.2 }));
    }
    this.canvas.append(svg("path", { d: this.path(points), style, fill: "none", "stroke-width": 1.9, "stroke-linejoin": "round" }));
    if (this.kind === "dots" || points.length === 1) {
      for (const [step, v] of points) {
        if (v !== null) this.canvas.append(svg("circle", { cx: this.x(step), cy: this.y(v), r: points.length > 60 ? 2 : 3.4, style: `fill:${line.color}` }));
      }
    }
  }
  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * this.width;
    const step = this.nearest(at);
    if (step === null) return;
    for (const chart of charts) chart.mark(step);
    const rows = this.shown.map((line) => {
      const point = line.points.find((p) => p[0] === step);
      return point && el("div", {}, el("i", { style: `background:${line.color}` }), line.label, el("span", {}, short(point[1], this.unit)));
    });
    const tip = byId("tip");
    tip.replaceChildren(el("b", {}, `step ${step.toLocaleString("en-US")}`), ...rows.filter(Boolean));
    tip.hidden = false;
    const beside = event.clientX + 16 + tip.offsetWidth > window.innerWidth ? -tip.offsetWidth - 16 : 16;
    tip.style.left = `${event.clientX + beside}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  }
  nearest(at) {
    let best = null, distance = Infinity;
    for (const line of this.shown) for (const [step] of line.points) {
      const d = Math.abs(this.x(step) - at);
      if (d < distance) { distance = d; best = step; }
    }
    return best;
  }
  mark(step) {
    if (!this.cross) return;
    const x = this.x(step);
    this.cross.setAttribute("x1", x); this.cross.setAttribute("x2", x);
    this.cross.setAttribute("visibility", "visible");
  }
}
function minimum(values) { return values.reduce((a, b) => Math.min(a, b)); }
function maximum(values) { return values.reduce((a, b) => Math.max(a, b)); }
function leave() {
  byId("tip").hidden = true;
  for (const chart of charts) chart.cross.setAttribute("visibility", "hidden");
}
const charts = data.charts.map((spec) => new Chart(spec, byId("charts")));
const drawAll = () => charts.forEach((chart) => chart.draw());
if (charts.length) {
  byId("curves").hidden = false;
  const longest = maximum(data.charts.flatMap((chart) => chart.lines.map((line) => line.points.length)));
  const slider = byId("smoothing");
  slider.value = longest > 300 ? 0.9 : longest > MANY ? 0.7 : 0;
  const onSmoothing = () => { smoothing = +slider.value; byId("smoothing-value").textContent = smoothing.toFixed(2); drawAll(); };
  slider.addEventListener("input", onSmoothing);
  onSmoothing();
  new ResizeObserver(drawAll).observe(byId("charts"));
}

// ---------------------------------------------------------------- samples
const samples = data.samples.map((row) => Object.fromEntries(data.fields.map((name, i) => [name, row[i]])));
const isGood = (sample) => sample.reward > 0.5;
const pill = (sample) => el("span", { class: isGood(sample) ? "pill good" : "pill" }, short(sample.reward));

function textBlock(text, query = "") {
  const node = el("div", { class: "text clamped", title: "Click to show all or less", onclick: () => {
    if (!String(window.getSelection())) node.classList.toggle("clamped");
  } });
  const lower = text.toLowerCase();
  let at = 0;
  for (let hit; query && (hit = lower.indexOf(query, at)) >= 0; at = hit + query.length) {
    node.append(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + query.length)));
  }
  node.append(text.slice(at));
  return node;
}
/** Buttons that page through `count` items; calls show(first, end) whenever the page changes. */
class Pager {
  constructor(node, perPage, show) {
    this.perPage = perPage; this.show = show; this.page = 0;
    this.back = el("button", { type: "button", "aria-label": "Previous page", onclick: () => this.go(this.page - 1) }, "‹");
    this.next = el("button", { type: "button", "aria-label": "Next page", onclick: () => this.go(this.page + 1) }, "›");
    this.words = el("span");
    node.replaceChildren(this.back, this.words, this.next);
  }
  reset(count) { this.count = count; this.go(0); }
  go(page) {
    const pages = Math.max(Math.ceil(this.count / this.perPage), 1);
    this.page = Math.min(Math.max(page, 0), pages - 1);
    const first = this.page * this.perPage, end = Math.min(first + this.perPage, this.count);
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page === pages - 1;
    this.words.textContent = this.count ? `${(first + 1).toLocaleString("en-US")} to ${end.toLocaleString("en-US")} of ${this.count.toLocaleString("en-US")}` : "none";
    this.show(first, end);
  }
}
function options(select, entries) {
  select.replaceChildren(...entries.map(([value, label]) => el("option", { value }, label)));
  select.hidden = entries.length < 2;
}

// ---------------------------------------------------------------- early against late
function findPairs() {
  for (const kind of ["val", "train"]) {
    const of = samples.filter((s) => s.kind === kind);
    if (!of.length) continue;
    const first = minimum(of.map((s) => s.step)), last = maximum(of.map((s) => s.step));
    if (first === last) continue;
    const early = of.filter((s) => s.step === first), late = of.filter((s) => s.step === last);
    const byPrompt = new Map();
    for (const s of late) if (!byPrompt.has(s.prompt_id)) byPrompt.set(s.prompt_id, s);
    const once = new Set();
    const same = early.filter((s) => byPrompt.has(s.prompt_id) && !once.has(s.prompt_id) && once.add(s.prompt_id))
      .map((s) => [s, byPrompt.get(s.prompt_id)]);
    if (same.length) return { kind, first, last, same: true, pairs: same };
    const count = Math.min(early.length, late.length);
    return { kind, first, last, same: false, pairs: early.slice(0, count).map((s, i) => [s, late[i]]) };
  }
  return null;
}
function answerCell(sample, step, withPrompt) {
  const head = el("h4", {}, `step ${step}`, pill(sample));
  if (sample.error) head.append(el("span", { class: "error" }, sample.error));
  const cell = el("div", {}, head);
  if (withPrompt) cell.append(el("h4", {}, sample.prompt));
  cell.append(textBlock(sample.completion));
  return cell;
}
const found = findPairs();
if (found) {
  byId("pairs").hidden = false;
  byId("pair-hint").textContent = found.same
    ? `The same ${found.kind === "val" ? "validation" : "training"} prompts, answered at step ${found.first} and at step ${found.last}.`
    : `Training samples of step ${found.first} and of step ${found.last}, on different prompts.`;
  const tests = {
    all: () => true,
    better: ([a, b]) => b.reward > a.reward,
    worse: ([a, b]) => b.reward < a.reward,
    right: ([a, b]) => isGood(a) && isGood(b),
    wrong: ([a, b]) => !isGood(a) && !isGood(b),
  };
  const names = { all: "all", better: "improved", worse: "got worse", right: "right both times", wrong: "wrong both times" };
  options(byId("pair-filter"), Object.keys(tests).map((key) => [key, `${names[key]} (${found.pairs.filter(tests[key]).length})`]));
  let rows = [];
  const pager = new Pager(byId("pair-pager"), 8, (first, end) => {
    byId("pair-rows").replaceChildren(...rows.slice(first, end).map(([a, b]) => {
      const prompt = el("div", {}, el("h4", {}, a.source), textBlock(a.prompt));
      if (a.answer) prompt.append(el("h4", {}, `answer ${a.answer}`));
      const cells = [answerCell(a, found.first, !found.same), answerCell(b, found.last, !found.same)];
      const row = el("div", { class: "pair" }, ...(found.same ? [prompt, ...cells] : cells));
      if (!found.same) row.style.gridTemplateColumns = "1fr 1fr";
      return row;
    }));
  });
  const onFilter = () => { rows = found.pairs.filter(tests[byId("pair-filter").value]); pager.reset(rows.length); };
  byId("pair-filter").addEventListener("change", onFilter);
  onFilter();
}

// ---------------------------------------------------------------- all samples
if (samples.length) {
  byId("samples").hidden = false;
  const unique = (name) => [...new Set(samples.map((s) => s[name]))].filter((v) => v !== "" && v !== null).sort();
  const kinds = { train: "training", val: "validation" };
  options(byId("kind"), [["", "training and validation"], ...unique("kind").map((k) => [k, kinds[k] || k])]);
  if (unique("kind").length < 2) byId("kind").hidden = true;
  options(byId("source"), [["", "all sources"], ...unique("source").map((s) => [s, s])]);
  if (unique("source").length < 2) byId("source").hidden = true;
  options(byId("reward"), [["", "any reward"], ["good", "reward above 0.5"], ["some", "between 0 and 0.5"], ["none", "reward 0 or less"], ["error", "reward function failed"]]);
  const rewardTests = {
    "": () => true, good: isGood, some: (s) => s.reward > 0 && s.reward <= 0.5, none: (s) => !(s.reward > 0), error: (s) => Boolean(s.error),
  };
  for (const s of samples) s.haystack = `${s.prompt}\n${s.completion}\n${s.answer}`.toLowerCase();
  let rows = samples, sort = { key: "step", sign: 1 }, query = "";
  const body = byId("table").querySelector("tbody");
  const pager = new Pager(byId("pager"), 15, (first, end) => {
    body.replaceChildren(...rows.slice(first, end).map((s) => {
      const step = el("td", { class: "step" }, String(s.step), el("small", {}, kinds[s.kind] || s.kind));
      const completion = el("td", {}, textBlock(s.completion, query));
      if (s.error) completion.append(el("div", { class: "error" }, s.error));
      return el("tr", {}, step, el("td", {}, pill(s)), el("td", {}, String(s.source)), el("td", {}, textBlock(s.prompt, query)), completion, el("td", {}, String(s.answer)), el("td", {}, String(s.finish)));
    }));
    byId("none").hidden = rows.length > 0;
  });
  const apply = () => {
    query = byId("search").value.trim().toLowerCase();
    const kind = byId("kind").value, source = byId("source").value, test = rewardTests[byId("reward").value];
    const from = byId("from").value === "" ? -Infinity : +byId("from").value, to = byId("to").value === "" ? Infinity : +byId("to").value;
    rows = samples.filter((s) => (!kind || s.kind === kind) && (!source || s.source === source) && test(s) && s.step >= from && s.step <= to && (!query || s.haystack.includes(query)));
    const { key, sign } = sort;
    rows.sort((a, b) => (a[key] < b[key] ? -sign : a[key] > b[key] ? sign : 0));
    pager.reset(rows.length);
  };
  for (const id of ["kind", "source", "reward", "from", "to", "search"]) byId(id).addEventListener("input", apply);
  for (const head of byId("table").querySelectorAll("th[data-key]")) {
    head.addEventListener("click", () => {
      sort = { key: head.dataset.key, sign: sort.key === head.dataset.key ? -sort.sign : 1 };
      apply();
    });
  }
  apply();
}
