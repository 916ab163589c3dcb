// The page: its settings, which act on all figures at once, and the figures themselves.

function redrawAll() {
  for (const chart of charts) chart.redraw();
}

function fillToolbar(place) {
  const axes = [["steps", "steps"], ["tokens", "tokens"], ["hours", "hours in steps"]];
  const known = axes.filter(([name]) => name === "steps" || runs.some((run) => run[name]));
  place.append(chooser("over", known, settings.axis, (value) => { settings.axis = value; settings.range = null; redrawAll(); setRange(null); }));
  const smoothing = [["0", "none"], ["0.01", "1%"], ["0.02", "2%"], ["0.05", "5%"], ["0.1", "10%"]];
  place.append(chooser("smoothing", smoothing, String(settings.smoothing), (value) => { settings.smoothing = Number(value); redrawAll(); }));
  place.append(make("button", { type: "button", id: "whole", disabled: "", onclick: () => setRange(null) }, "whole run"));
  if (runs.length < 2) return;
  runs.forEach((run, number) => {
    const button = make("button", { type: "button", class: "run", "aria-pressed": "true" }, swatch(number), run.name);
    button.addEventListener("click", () => {
      const hides = !settings.hidden.has(number);
      if (hides) settings.hidden.add(number); else settings.hidden.delete(number);
      button.setAttribute("aria-pressed", String(!hides));
      redrawAll();
    });
    place.append(button);
  });
}

function drawCurves() {
  for (const panel of report.panels) charts.push(new CurveFigure(panel, document.getElementById(`curves-${panel.section}`)));
}

function drawMaps() {
  runs.forEach((run, number) => {
    const place = document.getElementById(`maps-${number}`);
    if (!place) return;
    const grid = make("div", { class: "grid" });
    place.append(grid);
    drawLayers(run, grid);
    drawExperts(run, place);
  });
}

fillToolbar(document.getElementById("toolbar"));
drawCurves();
if (document.getElementById("timeline")) charts.push(new TimeLine(document.getElementById("timeline")));
drawMaps();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; redrawAll(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; redrawAll(); });
document.documentElement.dataset.drawn = String(charts.length);
