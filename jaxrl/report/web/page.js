// ---------------------------------------------------------------- the page
/** Shows the data of a run: the first time, and again when there is more of it. */
function show(data) {
  showCharts(data.charts);
  pictures = data.pictures;
  samples = data.samples.map((row) => Object.fromEntries(data.fields.map((name, i) => [name, row[i]])));
  showPairs();
  showSamples();
  showTrajectories(data.trajectories);
}
show(JSON.parse(byId("data").textContent));
