// ---------------------------------------------------------------- a page that follows a run
const PAUSE_S = 3; // between two questions to the server
let version = "";
async function refresh() {
  const start = performance.now();
  const live = byId("live");
  live.hidden = false;
  try {
    const answer = await fetch("data", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      const data = await answer.json();
      version = answer.headers.get("ETag");
      update(data);
    }
    live.textContent = answer.ok || answer.status === 304 ? byId("subtitle").dataset.state : `the server answers ${answer.status}`;
    live.classList.remove("lost");
  } catch (error) {
    live.textContent = "the server has stopped";
    live.classList.add("lost");
  }
  // Reading a long run takes the server a while; it is left alone for ten times as long.
  setTimeout(refresh, Math.max(PAUSE_S * 1000, 10 * (performance.now() - start)));
}
const nKeys = JSON.parse(byId("data").textContent).n_keys;
function update(data) {
  if (data.n_keys !== nKeys) location.reload(); // the run has begun: the page gets its configuration
  document.title = `${data.title} · jaxrl`;
  byId("title").textContent = data.title;
  byId("subtitle").textContent = data.subtitle;
  byId("subtitle").dataset.state = `live, last change ${new Date().toLocaleTimeString()}`;
  byId("notice").textContent = data.notice;
  byId("notice").hidden = !data.notice;
  byId("cards").replaceChildren(...data.cards.map(([label, value, note]) =>
    el("div", { class: "card" }, el("h3", {}, label), el("p", {}, value), el("small", {}, note))));
  show(data);
}
refresh();
