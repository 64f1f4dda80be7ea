"use strict";
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
let firstStep = 0, lastStep = 1;
let smoothing = 0;
const MANY = 40; // points from which on smoothing helps

class Chart {
  constructor(spec) {
    this.title = spec.title;
    this.legend = el("div", { class: "legend" });
    this.canvas = svg("svg", { role: "img", "aria-label": this.title });
    this.note = el("span", { class: "note" });
    this.node = el("figure", { class: spec.kind === "stack" ? "chart wide" : "chart" }, el("h3", {}, this.title, this.note), this.legend, this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", leave);
  }
  /** Shows other data; lines that the reader has hidden stay hidden. */
  set(spec) {
    const off = new Set((this.lines || []).filter((line) => line.off).map((line) => line.label));
    this.unit = spec.unit; this.kind = spec.kind; this.scale = spec.scale;
    this.note.textContent = spec.note;
    this.lines = spec.lines.map((line, i) => ({ ...line, color: `var(--c${i % 8})`, off: off.has(line.label) }));
    this.legend.replaceChildren(...(spec.legend ? this.lines.map((line) => this.entry(line)) : []));
  }
  entry(line) {
    const swatch = el("i", { style: `background:${line.color}` });
    const toggle = () => { line.off = !line.off; button.classList.toggle("off", line.off); this.draw(); };
    const button = el("button", { type: "button", title: "Show or hide", class: line.off ? "off" : "", onclick: toggle }, swatch, line.label);
    return button;
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
    const raw = this.kind === "stack" ? [] : this.shown.flatMap((line) => [...line.points, ...edge(line, 1), ...edge(line, 2)]);
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
    for (const line of this.shown) if (line.band) this.band(line);
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
  /** The area between the lowest and the highest run of a line. */
  band(line) {
    const smoothed = smoothing && line.points.length > MANY && this.kind !== "dots";
    const [low, high] = [1, 2].map((i) => (smoothed ? smooth(edge(line, i), smoothing) : edge(line, i)).filter((p) => p[1] !== null));
    const area = `${this.path(high)}${this.path(low.reverse()).replace("M", "L")}Z`;
    if (high.length) this.canvas.prepend(svg("path", { d: area, style: `fill:${line.color}`, "fill-opacity": 0.16 }));
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
      const around = line.band && line.band.find((p) => p[0] === step);
      const text = short(point && point[1], this.unit) + (around ? ` (${short(around[1])} to ${short(around[2])})` : "");
      return point && el("div", {}, el("i", { style: `background:${line.color}` }), line.label, el("span", {}, text));
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
/** The points of the lower (1) or upper (2) edge of a line's band. */
function edge(line, i) { return (line.band || []).map((p) => [p[0], p[i]]); }

let charts = [];
const drawAll = () => charts.forEach((chart) => chart.draw());

/** Shows these charts, and keeps those of the same title with what the reader has set there. */
function showCharts(specs) {
  const known = new Map(charts.map((chart) => [chart.title, chart]));
  const steps = specs.flatMap((spec) => spec.lines.flatMap((line) => line.points.map((p) => p[0])));
  lastStep = steps.length ? maximum(steps) : 1;
  firstStep = steps.length ? minimum(steps) : 0;
  if (firstStep >= lastStep) firstStep = lastStep - 1;
  charts = specs.map((spec) => known.get(spec.title) || new Chart(spec));
  charts.forEach((chart, i) => chart.set(specs[i]));
  byId("charts").replaceChildren(...charts.map((chart) => chart.node));
  byId("curves").hidden = !charts.length;
  if (!charts.length) return;
  if (!smoothingSet) setSmoothing(maximum(specs.flatMap((spec) => spec.lines.map((line) => line.points.length))));
  drawAll();
}
let smoothingSet = false; // by the reader
function setSmoothing(longest) {
  byId("smoothing").value = longest > 300 ? 0.9 : longest > MANY ? 0.7 : 0;
  onSmoothing();
}
function onSmoothing() {
  smoothing = +byId("smoothing").value;
  byId("smoothing-value").textContent = smoothing.toFixed(2);
}
byId("smoothing").addEventListener("input", () => { smoothingSet = true; onSmoothing(); drawAll(); });
new ResizeObserver(drawAll).observe(byId("charts"));
