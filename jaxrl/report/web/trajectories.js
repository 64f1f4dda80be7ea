// ---------------------------------------------------------------- trajectories
const phaseNames = { queue: "waits for a process", engine: "engine", environment: "environment, tools", agent: "agent's process", judge: "reward functions, judge" };
const phaseColors = { queue: "var(--c7)", engine: "var(--c0)", environment: "var(--c1)", agent: "var(--c4)", judge: "var(--c3)" };
const colorings = { logp: "logprob", difference: "engine - trainer logprob", advantage: "advantage", mask: "loss mask", none: "no color" };
const isTruncated = (t) => t.finish === "length";
const trajectoryTests = {
  "": ["all", () => true],
  low: ["reward 0 or less", (t) => !(t.reward > 0)],
  truncated: ["truncated", isTruncated],
  error: ["with an error", (t) => Boolean(t.error)],
};
const unknownLast = (v) => (v === null ? -Infinity : v);
const trajectoryOrders = { // larger comes first
  reward: ["lowest reward", (t) => (t.reward === null ? Infinity : -t.reward)],
  difference: ["largest difference", (t) => unknownLast(t.difference)],
  tokens: ["longest", (t) => t.n_tokens],
  time: ["slowest", (t) => duration(t)],
  truncated: ["truncated first", (t) => +isTruncated(t)],
  newest: ["newest", (t) => t.step],
};
let trajectories = [], trajectoryList = [], opened = null; // opened: the key of a trajectory
const keyOf = (t) => JSON.stringify([t.step, t.kind, t.prompt_id, t.sample]);
const duration = (t) => Math.max(0, ...t.spans.map((span) => span[2])) + (t.reward_s || 0);

const trajectoryPager = new Pager(byId("t-pager"), 10, (first, end) => {
  byId("t-table").querySelector("tbody").replaceChildren(...trajectoryList.slice(first, end).map((t) => {
    const last = t.sequences[0].prompt.at(-1);
    const cells = [el("td", { class: "step" }, String(t.step), el("small", {}, kinds[t.kind] || t.kind)), el("td", {}, pill(t)), el("td", {}, t.source),
      el("td", { class: "line" }, last ? last[1].slice(0, 200) : ""), el("td", {}, String(t.n_turns)), el("td", {}, t.n_tokens.toLocaleString("en-US")),
      el("td", {}, t.difference === null ? "not computed" : short(t.difference)), el("td", {}, t.finish)];
    if (t.error) cells.at(-1).append(el("div", { class: "error" }, t.error.slice(0, 200)));
    return el("tr", { class: keyOf(t) === opened ? "open" : null, onclick: () => { opened = keyOf(t); trajectoryPager.refresh(trajectoryList.length); openTrajectory(); } }, ...cells);
  }));
  byId("t-none").hidden = trajectoryList.length > 0;
});
function filterTrajectories() {
  const kind = byId("t-kind").value, source = byId("t-source").value;
  const test = trajectoryTests[byId("t-test").value][1], value = trajectoryOrders[byId("t-order").value][1];
  trajectoryList = trajectories.filter((t) => (!kind || t.kind === kind) && (!source || t.source === source) && test(t));
  trajectoryList.sort((a, b) => value(b) - value(a) || b.step - a.step || 0);
}
for (const id of ["t-kind", "t-source", "t-test", "t-order"]) {
  byId(id).addEventListener("input", () => { filterTrajectories(); trajectoryPager.reset(trajectoryList.length); });
}
options(byId("t-test"), Object.entries(trajectoryTests).map(([key, [label]]) => [key, label]));
options(byId("t-order"), Object.entries(trajectoryOrders).map(([key, [label]]) => [key, label]));

/** Shows the trajectories of a run; an open one stays open. */
function showTrajectories(found) {
  trajectories = found;
  byId("trajectories").hidden = !found.length;
  const values = (name) => [...new Set(found.map((t) => t[name]))].sort();
  options(byId("t-kind"), [["", "training and validation"], ...values("kind").map((k) => [k, kinds[k] || k])], 3);
  options(byId("t-source"), [["", "all sources"], ...values("source").map((s) => [s, s])], 3);
  filterTrajectories();
  trajectoryPager.refresh(trajectoryList.length);
  openTrajectory();
}
function openTrajectory() {
  const t = trajectories.find((one) => keyOf(one) === opened);
  byId("trajectory").hidden = !t;
  if (!t) return;
  const more = t.n_sequences > t.sequences.length ? ` (${t.n_sequences - t.sequences.length} more are not in the record)` : "";
  byId("t-title").textContent = `Step ${t.step}, prompt ${t.prompt_id}, sample ${t.sample}${more}`;
  options(byId("t-sequence"), t.sequences.map((s, i) => [String(i), i ? `branch ${i}` : "conversation with the last turn"]));
  const numbers = (named) => Object.entries(named).map(([name, v]) => `${name} ${short(v)}`);
  const facts = [`reward ${short(t.reward)}`, ...numbers(t.parts), ...numbers(t.counts), `finish ${t.finish}`, ...(t.answer ? [`answer ${t.answer}`] : [])];
  byId("t-facts").replaceChildren(el("p", { class: "hint" }, facts.join(" · ")), ...(t.error ? [el("p", { class: "error" }, t.error)] : []));
  byId("t-timeline").replaceChildren(...timeline(t));
  showSequence();
}
/** Bars of an episode's phases on a time axis; the reward functions come after its end. */
function timeline(t) {
  const end = Math.max(0, ...t.spans.map((span) => span[2]));
  const spans = t.reward_s ? [...t.spans, ["judge", end, end + t.reward_s]] : t.spans;
  const total = duration(t);
  if (!total) return [];
  const phases = [...new Set(spans.map((span) => span[0]))];
  return phases.map((phase) => {
    const of = spans.filter((span) => span[0] === phase);
    const sum = of.reduce((seconds, span) => seconds + span[2] - span[1], 0);
    const bars = of.map(([, from, to]) => el("i", { title: `${short(from, "s")} to ${short(to, "s")}`,
      style: `left:${(100 * from) / total}%;width:${Math.max((100 * (to - from)) / total, 0.2)}%;background:${phaseColors[phase] || "var(--c7)"}` }));
    return el("div", { class: "lane" }, el("span", {}, phaseNames[phase] || phase), el("div", {}, ...bars), el("small", {}, short(sum, "s")));
  });
}
const currentTrajectory = () => trajectories.find((one) => keyOf(one) === opened);
function currentSequence() {
  const t = currentTrajectory();
  return t && (t.sequences[+byId("t-sequence").value || 0] || t.sequences[0]);
}
function showSequence() {
  const s = currentSequence();
  if (!s) return;
  const known = Object.entries(colorings).filter(([name]) => !(name in s) || s[name] !== null);
  options(byId("t-color"), known, 1);
  const paint = painter(s, byId("t-color").value);
  byId("t-scale").textContent = paint.scale;
  const hidden = s.n_prompt_messages - s.prompt.length;
  const prompt = s.prompt.map(([role, text]) => message(role, `${role}`, el("div", { class: "text" }, text)));
  if (hidden > 0) prompt.unshift(el("p", { class: "hint" }, `${hidden} earlier messages are not in the record`));
  const summary = el("summary", {}, `Prompt: ${s.n_prompt_messages} messages, ${s.n_prompt_tokens} tokens`);
  const turns = s.turns.map((turn, i) => turnNode(s, turn, i, paint));
  byId("t-turns").replaceChildren(el("details", { open: "" }, summary, ...prompt), ...turns);
}
function message(role, title, ...children) {
  return el("div", { class: role === "assistant" ? "turn own" : "turn" }, el("h4", {}, title), ...children);
}
function turnNode(s, turn, i, paint) {
  const tokens = el("div", { class: "text" });
  for (let k = turn.start; k < turn.end; k++) tokens.append(tokenNode(s, k, paint));
  const left = turn.n_tokens - (turn.end - turn.start);
  if (left > 0) tokens.append(el("em", {}, ` [${left} tokens of this turn are not in the record]`));
  const reward = turn.reward === null ? "" : `, reward ${short(turn.reward)}`;
  const calls = turn.calls.map(([name, args]) => el("div", { class: "call" }, el("b", {}, name), ` ${args}`));
  return message(turn.role, `${i + 1}. ${turn.role}, ${turn.n_tokens} ${turn.n_tokens === 1 ? "token" : "tokens"}${reward}`, tokens, ...calls);
}
const tokenValues = ["logp", "difference", "advantage"];
function tokenNode(s, k, paint) {
  const trained = s.mask[k] === 1;
  const facts = tokenValues.filter((name) => trained && s[name] !== null).map((name) => `${colorings[name]} ${short(s[name][k])}`);
  const title = [`token ${k}`, ...(trained ? facts : ["not in the loss"])].join("\n");
  return el("span", { title, style: paint.style(k) }, s.tokens[k]);
}
/** The background of tokens: style(index), and a text that explains the scale. */
function painter(s, name) {
  const red = "210 69 90", blue = "47 111 219", green = "31 157 106";
  const shade = (color, part) => `background:rgb(${color} / ${(0.75 * Math.min(Math.max(part, 0), 1)).toFixed(3)})`;
  if (name === "mask") return { scale: "blue: in the loss", style: (k) => (s.mask[k] ? shade(blue, 0.4) : null) };
  const values = s[name];
  if (!values) return { scale: "", style: () => null };
  const trained = (k) => s.mask[k] === 1 && values[k] !== null;
  if (name === "logp") return { scale: "red: logprob -5 and lower", style: (k) => (trained(k) ? shade(red, -values[k] / 5) : null) };
  const most = values.reduce((a, v, k) => (trained(k) ? Math.max(a, Math.abs(v)) : a), 0) || 1;
  const [positive, negative] = name === "advantage" ? [green, red] : [blue, red];
  return { scale: `${name === "advantage" ? "green" : "blue"}: up to +${short(most)}, red: down to -${short(most)}`,
    style: (k) => (trained(k) ? shade(values[k] > 0 ? positive : negative, Math.abs(values[k]) / most) : null) };
}
byId("t-sequence").addEventListener("input", showSequence);
byId("t-color").addEventListener("input", showSequence);
