// The histograms of a page of prepared data, drawn by uPlot. Texts become text nodes, so nothing in them is markup.

const report = JSON.parse(document.getElementById("data").textContent);
const N_COLORS = 7;
const charts = [];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function short(value) {
  for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (value >= scale) return `${Number((value / (unit === "k" ? 1e3 : scale)).toPrecision(3))}${unit}`;
  }
  return String(value);
}

// From 2^n tokens on: 1, 2, 4, ... 1k, 2k.
function binName(n) {
  const size = 2 ** n;
  return size >= 1024 ? `${short(size / 1024)}Ki` : String(size);
}

// A figure over whole numbers 0, 1, 2..., columns for one series, lines for several; `name(i)` tells the i-th, `told(i)` says what is there.
class Columns {
  constructor(key, series, name, told) {
    Object.assign(this, { series, name, told });
    this.place = document.getElementById(key);
    this.readout = document.getElementById(`${key}-read`);
    this.redraw();
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  redraw() {
    if (this.plot) this.plot.destroy();
    const n = this.series[0].length, places = [...Array(n).keys()], several = this.series.length > 1;
    const axis = { stroke: () => color("faint"), grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const looks = this.series.map((_, i) => ({
      stroke: () => color(`run-${i % N_COLORS}`), width: several ? 1.75 : 1,
      ...(several ? { points: { show: true, size: 6 } } : { fill: () => color(`run-${i % N_COLORS}`) + "cc", paths: uPlot.paths.bars({ size: [0.8, 60] }), points: { show: false } }),
    }));
    const options = {
      width: this.place.clientWidth || 320, height: 220, padding: [10, 10, 0, 0], legend: { show: false },
      scales: { x: { time: false, range: () => [-0.6, n - 0.4] }, y: { range: (u, low, high) => [0, (high || 1) * 1.05] } },
      axes: [
        { ...axis, size: 28, splits: () => places, filter: (u, splits) => splits.map((x) => (x % Math.ceil((n * 44) / u.width) ? null : x)), values: (u, splits) => splits.map((x) => (x === null ? "" : this.name(x))) },
        { ...axis, size: 56, values: (u, splits) => splits.map(short) },
      ],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: { setCursor: [(u) => this.read(u)] },
    };
    this.plot = new uPlot({ ...options, series: [{}, ...looks] }, [places, ...this.series], this.place);
    this.read(this.plot);
  }

  read(u) {
    const highest = this.series[0].indexOf(Math.max(...this.series[0]));
    const at = u.cursor.left >= 0 ? Math.round(u.posToVal(u.cursor.left, "x")) : highest;
    this.readout.textContent = this.told(Math.max(0, Math.min(this.series[0].length - 1, at)));
  }

  resize() {
    const width = this.place.clientWidth;
    if (width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: 220 });
  }
}

const { lengths, groups } = report;
if (lengths.length && lengths[0].counts.length) {
  const told = (i) => `${binName(i)} to ${whole(2 ** (i + 1) - 1)} tokens: ${lengths.map((each) => `${each.name} ${whole(each.counts[i])}`).join(", ")}`;
  charts.push(new Columns("chart-lengths", lengths.map((each) => each.counts), binName, told));
}
if (document.getElementById("chart-groups")) {
  const told = (i) => `${whole(groups.counts[i])} groups of ${whole(groups.sizes[i])} documents`;
  charts.push(new Columns("chart-groups", [groups.counts], (i) => String(groups.sizes[i]), told));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
document.documentElement.dataset.drawn = String(charts.length);
