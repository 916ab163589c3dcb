// Figures with curves: one for each number, all runs in each, drawn by uPlot.

const TOP = 14;  // pixels above the curves, for the marks of events

// The mean of each value and as many neighbours on both sides, `window` in all; what is null is left out.
function smoothed(values, window) {
  const sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value === null ? 0 : value));
    counts.push(counts[i] + (value === null ? 0 : 1));
  });
  const half = Math.floor(window / 2);
  return values.map((value, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const count = counts[i + reach + 1] - counts[i - reach];
    return value === null || !count ? null : (sums[i + reach + 1] - sums[i - reach]) / count;
  });
}

// One run's part of a figure: its columns over its own places, and how each is drawn.
function linesOf(run, number, panel) {
  const curve = run.curves && run.curves[panel.key];
  const places = curve ? placesOf(run) : [];
  if (!places.length) return null;
  const positive = (values) => (panel.log ? values.map((value) => (value > 0 ? value : null)) : values);
  const window = panel.noisy ? Math.floor(curve.mean.length * settings.smoothing) : 0;
  const main = { stroke: () => runColor(number), width: 1.75, dash: runDash(number), spanGaps: false };
  const columns = [places], looks = [];
  const add = (values, look) => { columns.push(positive(values)); looks.push(look); };
  if (curve.low) {
    const edge = { stroke: () => runColor(number) + "80", width: 1 };  // a spike of one bucket is seen by it
    add(curve.high, { ...edge, band: number });
    add(curve.low, edge);
  } else if (window > 1) add(curve.mean, { stroke: () => runColor(number) + "59", width: 1 });
  add(window > 1 ? smoothed(curve.mean, window) : curve.mean, main);
  if (places.length < 3) looks[looks.length - 1].points = { show: true, size: 6 };
  return { columns, looks };
}

// The held-out losses of a run, over their own places.
function heldOut(run, number) {
  const found = run.evaluations;
  if (!found || !found.steps.length) return null;
  const places = found.steps.map((step) => placeOf(run, step));
  const points = { show: true, size: 7, width: 1.5, fill: () => color("paper"), stroke: () => runColor(number) };
  return { columns: [places, found.losses], looks: [{ stroke: () => runColor(number), width: 1, dash: [3, 3], points }] };
}

function partsOf(panel) {
  const parts = [];
  runs.forEach((run, number) => {
    if (settings.hidden.has(number) || !run.updates) return;
    parts.push(linesOf(run, number, panel));
    if (panel.key === "loss") parts.push(heldOut(run, number));
  });
  return parts.filter((part) => part !== null);
}

function optionsOf(panel, parts, width, hooks) {
  const series = [{}], bands = [];
  for (const part of parts) {
    for (const look of part.looks) {
      if (look.band !== undefined) bands.push({ series: [series.length, series.length + 1], fill: () => runColor(look.band) + "33" });
      series.push({ points: { show: false }, ...look, band: undefined });
    }
  }
  const axis = { stroke: () => color("faint"), grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const y = panel.log ? { distr: 3 } : { range: (u, low, high) => rangeOf(panel, low, high) };
  return {
    width, height: 220, series, bands, hooks,
    padding: [TOP, 20, 0, 0],
    legend: { show: false },
    scales: { x: { time: false, range: (u, low, high) => [low, high] }, y },
    axes: [
      { ...axis, size: 28, space: 60, values: (u, splits) => splits.map(short) },
      { ...axis, size: 56, space: 30, values: (u, splits) => splits.map(short) },
    ],
    cursor: {
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: false },
      sync: { key: "report", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => { setRange(null); return null; } },
    },
  };
}

function rangeOf(panel, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return panel.zero && low >= 0 ? [0, high + room || 1] : [low - room, high + room];
}

// Events other than routine ones, as marks over the curves.
function drawEvents(u) {
  const { ctx } = u, { left, top, width, height } = u.bbox, ratio = window.devicePixelRatio || 1;
  ctx.save();
  runs.forEach((run, number) => {
    if (settings.hidden.has(number)) return;
    for (const [kind, steps] of Object.entries(run.events)) {
      const tone = report.tones[kind];
      if (tone === "routine") continue;
      ctx.strokeStyle = color(tone);
      ctx.fillStyle = runs.length > 1 ? runColor(number) : color(tone);
      ctx.setLineDash(tone === "bad" ? [] : [3 * ratio, 3 * ratio]);
      ctx.lineWidth = ratio;
      for (const step of steps) {
        const x = u.valToPos(placeOf(run, step), "x", true);
        if (!(x >= left && x <= left + width)) continue;
        ctx.globalAlpha = 0.55;
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
        ctx.globalAlpha = 1;
        ctx.beginPath();
        ctx.moveTo(x - 4 * ratio, top - 7 * ratio);
        ctx.lineTo(x + 4 * ratio, top - 7 * ratio);
        ctx.lineTo(x, top);
        ctx.fill();
      }
    }
  });
  ctx.restore();
}

// What a run has at a place of the x axis, as text.
function valueAt(run, panel, place) {
  const curve = run.curves && run.curves[panel.key];
  if (!curve) return null;
  const i = nearest(placesOf(run), place);
  const steps = run.first[i] === run.last[i] ? `step ${whole(run.last[i])}` : `steps ${whole(run.first[i])} to ${whole(run.last[i])}`;
  if (curve.mean[i] === null || curve.mean[i] === undefined) return `${steps}: no finite number`;
  if (!curve.low) return `${steps}: ${short(curve.mean[i])}`;
  const spread = `${short(curve.low[i])} to ${short(curve.high[i])}`;
  return `${steps}: mean ${short(curve.mean[i])}, ${spread}, highest at step ${whole(run.first[i] + curve.at[i])}`;
}

function heldOutAt(run, place) {
  const found = run.evaluations;
  if (!found || !found.steps.length) return "";
  const i = nearest(found.steps.map((step) => placeOf(run, step)), place);
  return `; held out ${short(found.losses[i])} at step ${whole(found.steps[i])}`;
}

function swatch(number) {
  return make("i", { class: `swatch run-${number % N_COLORS}`, "aria-hidden": "true" });
}

// A figure of one number. Its chart is reached by the Tab key, and read by the arrow keys.
class CurveFigure {
  constructor(panel, place) {
    this.panel = { ...panel };
    this.readout = make("p", { class: "readout", "aria-live": "polite" });
    this.box = make("div", { class: "chart", tabindex: "0", role: "group", "aria-label": `${panel.title}; arrow keys read the values, plus and minus zoom` });
    const log = make("button", { type: "button", "aria-pressed": String(Boolean(panel.log)), onclick: () => this.toggleLog(log) }, "log");
    const title = make("figcaption", {}, make("div", {}, make("span", {}, panel.title), " ", make("small", {}, panel.unit)), log);
    this.table = make("details", { class: "numbers", ontoggle: () => this.fillTable() }, make("summary", {}, "as a table"));
    place.append(make("figure", {}, title, this.box, this.readout, this.table));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.redraw();
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  redraw() {
    if (this.plot) this.plot.destroy();
    const parts = partsOf(this.panel);
    const data = parts.length ? uPlot.join(parts.map((part) => part.columns)) : [[]];
    const hooks = { draw: [drawEvents], setCursor: [(u) => this.read(u)], setSelect: [(u) => this.zoom(u)] };
    this.plot = new uPlot(optionsOf(this.panel, parts, this.box.clientWidth || 320, hooks), data, this.box);
    this.setRange(settings.range || wholeRange());
    this.showLast();
  }

  resize() {
    const width = this.box.clientWidth;
    if (width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: 220 });
  }

  setRange([min, max]) {
    this.plot.setScale("x", { min, max });
  }

  zoom(u) {
    if (u.select.width < 4) return;
    const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    setRange(range);
  }

  toggleLog(button) {
    this.panel.log = !this.panel.log;
    button.setAttribute("aria-pressed", String(this.panel.log));
    this.redraw();
  }

  read(u) {
    if (u.cursor.left === null || u.cursor.left < 0) this.showLast();
    else this.show(u.posToVal(u.cursor.left, "x"));
  }

  showLast() {
    this.show(wholeRange()[1]);
  }

  show(place) {
    const lines = [];
    runs.forEach((run, number) => {
      if (settings.hidden.has(number) || !run.updates) return;
      const value = valueAt(run, this.panel, place);
      if (value === null) return;
      const also = this.panel.key === "loss" ? heldOutAt(run, place) : "";
      lines.push(make("span", {}, swatch(number), runs.length > 1 ? `${run.name}, ` : "", value + also));
    });
    this.readout.replaceChildren(...lines);
  }

  onKey(event) {
    const { plot } = this, [low, high] = settings.range || wholeRange();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const width = plot.over.clientWidth, from = plot.cursor.left >= 0 ? plot.cursor.left : width;
      plot.setCursor({ left: Math.max(0, Math.min(width, from + move * (event.shiftKey ? 20 : 2))), top: 1 });
    } else if (event.key === "+" || event.key === "-") {
      const middle = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (low + high) / 2;
      const half = ((high - low) / 2) * (event.key === "+" ? 0.5 : 2), [first, last] = wholeRange();
      setRange(half * 2 >= last - first ? null : [Math.max(first, middle - half), Math.min(last, middle + half)]);
    } else if (event.key === "Escape" || event.key === "0") setRange(null);
    else return;
    event.preventDefault();
  }

  fillTable() {
    if (!this.table.open || this.table.querySelector("table")) return;
    const body = make("tbody");
    runs.forEach((run) => {
      const curve = run.curves && run.curves[this.panel.key];
      if (!curve) return;
      curve.mean.forEach((mean, i) => {
        const steps = run.first[i] === run.last[i] ? whole(run.last[i]) : `${whole(run.first[i])} to ${whole(run.last[i])}`;
        const cells = [run.name, steps, short(mean), curve.low ? short(curve.low[i]) : "", curve.low ? short(curve.high[i]) : ""];
        body.append(make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
      });
    });
    const head = make("tr", {}, ...["run", "steps", "mean", "lowest", "highest"].map((title) => make("th", { scope: "col" }, title)));
    this.table.append(make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), body)));
  }
}
