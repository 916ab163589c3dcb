// Maps of many numbers over the steps, a byte a cell: rows are layers or experts, columns steps.

const UNKNOWN = 255, BALANCED = 128, CODES_A_DOUBLING = 32;

// The colour of each code. Loads: idle to balanced to four times as much; parts: from none to one.
function colorsOf(kind) {
  const [idle, middle, busy] = ["cold", "even", "hot"].map((name) => channels(color(name)));
  const found = [];
  for (let code = 0; code < 256; code += 1) {
    if (code === UNKNOWN) found.push(channels(color("unknown")));
    else if (kind === "part") found.push(mixed(middle, idle, Math.pow(1 - code / 254, 0.5)));
    else {
      const doublings = (code - BALANCED) / CODES_A_DOUBLING;
      const part = Math.min(1, Math.abs(code === 0 ? 4 : doublings) / 2);
      found.push(mixed(middle, doublings < 0 ? idle : busy, part));
    }
  }
  return found;
}

function loadOf(code) {
  if (code === UNKNOWN) return "not recorded";
  return code === 0 ? "idle" : `load ${short(Math.pow(2, (code - BALANCED) / CODES_A_DOUBLING))}`;
}

function partOf(code) {
  return code === UNKNOWN ? "not recorded" : `${Math.round((100 * code) / 254)}% of the highest entropy`;
}

// A map in a figure; the cell under the pointer, or reached by the arrow keys, is told below it.
class HeatMap {
  // map: title, codes, nRows, steps (of the columns), rowName (of a row's number), kind ("load" or "part"), height; end, where the last column has several steps
  constructor(map, place) {
    Object.assign(this, map);
    this.codes = bytesOf(map.codes);
    this.nColumns = this.steps.length;
    this.canvas = make("canvas", { width: this.nColumns, height: this.nRows, style: `height:${map.height}px`, tabindex: "0", role: "img", "aria-label": `${map.title}; arrow keys read the cells` });
    this.readout = make("p", { class: "readout", "aria-live": "polite" });
    const ends = make("p", { class: "ends" }, make("span", {}, whole(this.steps[0])), make("span", {}, "step"), make("span", {}, whole(this.end || this.steps[this.nColumns - 1])));
    const title = make("div", {}, make("span", {}, map.title), " ", make("small", {}, map.note || ""));
    place.append(make("figure", { class: "heat" }, make("figcaption", {}, title), this.canvas, ends, this.readout));
    this.cell = [this.nColumns - 1, 0];
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.redraw();
  }

  redraw() {
    const image = new ImageData(this.nColumns, this.nRows);
    const colors = new Uint32Array(Uint8ClampedArray.from(colorsOf(this.kind).flatMap((color) => [...color, 255])).buffer);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i += 1) pixels[i] = colors[this.codes[i]];
    this.canvas.getContext("2d").putImageData(image, 0, 0);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.tell(Math.floor(((event.clientX - box.left) / box.width) * this.nColumns), Math.floor(((event.clientY - box.top) / box.height) * this.nRows));
  }

  onKey(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    this.tell(this.cell[0] + move[0], this.cell[1] + move[1]);
  }

  tell(column, row) {
    column = Math.max(0, Math.min(this.nColumns - 1, column));
    row = Math.max(0, Math.min(this.nRows - 1, row));
    this.cell = [column, row];
    const code = this.codes[row * this.nColumns + column];
    const value = this.kind === "part" ? partOf(code) : loadOf(code);
    this.readout.textContent = `${this.rowName(row)}, step ${whole(this.steps[column])}: ${value}`;
  }
}

const MOST_OPEN = 12;  // maps of experts that stand open; the others are unfolded

function drawLayers(run, place) {
  const found = run.layers;
  if (!found) return;
  const shared = { nRows: found.layers.length, steps: found.steps, end: found.last, rowName: (row) => `layer ${found.layers[row]}`, height: Math.max(48, Math.min(320, 9 * found.layers.length)) };
  const layers = `layers ${found.layers[0]} (top) to ${found.layers[found.layers.length - 1]}`;
  charts.push(new HeatMap({ ...shared, title: "Busiest expert by layer", note: `${layers}; the highest load in each column's steps`, codes: found.busiest, kind: "load" }, place));
  if (found.entropy) charts.push(new HeatMap({ ...shared, title: "Router entropy by layer", note: `${layers}; mean, as a part of log(experts)`, codes: found.entropy, kind: "part" }, place));
}

function drawExperts(run, place) {
  if (!run.experts) return;
  const { layers, steps } = run.experts;
  const draw = (layer, where) => {
    const note = `experts 0 (top) to ${layer.experts - 1}${layer.idle ? `; ${layer.idle} idle at last` : ""}`;
    const height = Math.max(64, Math.min(256, 8 * layer.experts));
    charts.push(new HeatMap({ title: `Layer ${layer.layer}`, note, codes: layer.codes, nRows: layer.experts, steps, kind: "load", height, rowName: (row) => `expert ${row}` }, where));
  };
  const grid = make("div", { class: "grid small" });
  place.append(grid);
  layers.slice(0, MOST_OPEN).forEach((layer) => draw(layer, grid));
  const others = layers.slice(MOST_OPEN);
  if (!others.length) return;
  const more = make("div", { class: "grid small" });
  const details = make("details", { ontoggle: () => { if (!more.childElementCount) others.forEach((layer) => draw(layer, more)); } });
  details.append(make("summary", {}, `${others.length} more layers`), more);
  place.append(details);
}
