// ---------------------------------------------------------------- the page
showCharts(JSON.parse(byId("data").textContent).charts);
