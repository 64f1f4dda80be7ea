// ---------------------------------------------------------------- samples
let samples = [], pictures = {};
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
/** The images of a sample's prompt. */
const images = (sample) => el("div", { class: "images" }, ...(sample.images || []).filter((name) => pictures[name])
  .map((name) => el("img", { src: pictures[name], alt: "image of the prompt", loading: "lazy" })));
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
  /** As reset, on the same page. */
  refresh(count) { this.count = count; this.go(this.page); }
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
/** Fills a select; the chosen value stays chosen if it is still there. */
function options(select, entries, least = 2) {
  const chosen = select.value;
  select.replaceChildren(...entries.map(([value, label]) => el("option", { value }, label)));
  if (entries.some(([value]) => value === chosen)) select.value = chosen;
  select.hidden = entries.length < least;
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
  if (withPrompt) cell.append(images(sample), el("h4", {}, sample.prompt));
  cell.append(textBlock(sample.completion));
  return cell;
}
const tests = {
  all: () => true,
  better: ([a, b]) => b.reward > a.reward,
  worse: ([a, b]) => b.reward < a.reward,
  right: ([a, b]) => isGood(a) && isGood(b),
  wrong: ([a, b]) => !isGood(a) && !isGood(b),
};
const pairNames = { all: "all", better: "improved", worse: "got worse", right: "right both times", wrong: "wrong both times" };
let found = null, pairs = [];
const pairPager = new Pager(byId("pair-pager"), 8, (first, end) => {
  byId("pair-rows").replaceChildren(...pairs.slice(first, end).map(([a, b]) => {
    const prompt = el("div", {}, el("h4", {}, a.source), images(a), textBlock(a.prompt));
    if (a.answer) prompt.append(el("h4", {}, `answer ${a.answer}`));
    const cells = [answerCell(a, found.first, !found.same), answerCell(b, found.last, !found.same)];
    const row = el("div", { class: "pair" }, ...(found.same ? [prompt, ...cells] : cells));
    if (!found.same) row.style.gridTemplateColumns = "1fr 1fr";
    return row;
  }));
});
function filterPairs() { pairs = found.pairs.filter(tests[byId("pair-filter").value]); }
byId("pair-filter").addEventListener("change", () => { filterPairs(); pairPager.reset(pairs.length); });

function showPairs() {
  found = findPairs();
  byId("pairs").hidden = !found;
  if (!found) return;
  byId("pair-hint").textContent = found.same
    ? `The same ${found.kind === "val" ? "validation" : "training"} prompts, answered at step ${found.first} and at step ${found.last}.`
    : `Training samples of step ${found.first} and of step ${found.last}, on different prompts.`;
  options(byId("pair-filter"), Object.keys(tests).map((key) => [key, `${pairNames[key]} (${found.pairs.filter(tests[key]).length})`]));
  filterPairs();
  pairPager.refresh(pairs.length);
}

// ---------------------------------------------------------------- all samples
const unique = (name) => [...new Set(samples.map((s) => s[name]))].filter((v) => v !== "" && v !== null).sort();
const kinds = { train: "training", val: "validation" };
const rewardTests = {
  "": () => true, good: isGood, some: (s) => s.reward > 0 && s.reward <= 0.5, none: (s) => !(s.reward > 0), error: (s) => Boolean(s.error),
};
let rows = [], sort = { key: "step", sign: 1 }, query = "";
const body = byId("table").querySelector("tbody");
const pager = new Pager(byId("pager"), 15, (first, end) => {
  body.replaceChildren(...rows.slice(first, end).map((s) => {
    const step = el("td", { class: "step" }, String(s.step), el("small", {}, kinds[s.kind] || s.kind));
    const completion = el("td", {}, textBlock(s.completion, query));
    if (s.error) completion.append(el("div", { class: "error" }, s.error));
    return el("tr", {}, step, el("td", {}, pill(s)), el("td", {}, String(s.source)), el("td", {}, images(s), textBlock(s.prompt, query)), completion, el("td", {}, String(s.answer)), el("td", {}, String(s.finish)));
  }));
  byId("none").hidden = rows.length > 0;
});
function filterRows() {
  query = byId("search").value.trim().toLowerCase();
  const kind = byId("kind").value, source = byId("source").value, test = rewardTests[byId("reward").value];
  const from = byId("from").value === "" ? -Infinity : +byId("from").value, to = byId("to").value === "" ? Infinity : +byId("to").value;
  rows = samples.filter((s) => (!kind || s.kind === kind) && (!source || s.source === source) && test(s) && s.step >= from && s.step <= to && (!query || s.haystack.includes(query)));
  const { key, sign } = sort;
  rows.sort((a, b) => (a[key] < b[key] ? -sign : a[key] > b[key] ? sign : 0));
}
const onFilter = () => { filterRows(); pager.reset(rows.length); };
for (const id of ["kind", "source", "reward", "from", "to", "search"]) byId(id).addEventListener("input", onFilter);
for (const head of byId("table").querySelectorAll("th[data-key]")) {
  head.addEventListener("click", () => {
    sort = { key: head.dataset.key, sign: sort.key === head.dataset.key ? -sort.sign : 1 };
    onFilter();
  });
}
options(byId("reward"), [["", "any reward"], ["good", "reward above 0.5"], ["some", "between 0 and 0.5"], ["none", "reward 0 or less"], ["error", "reward function failed"]]);

function showSamples() {
  byId("samples").hidden = !samples.length;
  options(byId("kind"), [["", "training and validation"], ...unique("kind").map((k) => [k, kinds[k] || k])], 3);
  options(byId("source"), [["", "all sources"], ...unique("source").map((s) => [s, s])], 3);
  for (const s of samples) s.haystack = `${s.prompt}\n${s.completion}\n${s.answer}`.toLowerCase();
  filterRows();
  pager.refresh(rows.length);
}
