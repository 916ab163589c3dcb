// Maps of numbers. The cell under the pointer, or reached by the arrow keys, is told below its map.

let palette = {};  // asking the style sheet for each of a million cells would take seconds

function ink(name) {
  palette[name] = palette[name] || channels(color(name));
  return palette[name];
}

class NumberMap {
  // map: title, note, nRows, nColumns, colorOf(row, column) -> channels, told(row, column) -> text, height (px, or null for squares), onCell(row, column), first
  constructor(map, place) {
    Object.assign(this, map);
    const shape = map.height ? `height:${map.height}px` : `aspect-ratio:${map.nColumns}/${map.nRows}`;
    this.canvas = make("canvas", { width: map.nColumns, height: map.nRows, style: shape, tabindex: "0", role: "img", "aria-label": `${map.title}; arrow keys read the cells` });
    this.readout = make("p", { class: "readout", "aria-live": "polite" });
    this.mark = make("div", { class: "mark", hidden: "" });
    const title = make("div", {}, make("span", {}, map.title), " ", make("small", {}, map.note || ""));
    place.append(make("figure", { class: "heat" }, make("figcaption", {}, title), make("div", { class: "marked" }, this.canvas, this.mark), this.readout));
    this.cell = map.first || [0, 0];
    this.canvas.addEventListener("pointermove", (event) => this.tell(...this.cellAt(event)));
    this.canvas.addEventListener("click", (event) => this.choose(...this.cellAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.redraw();
  }

  redraw() {
    palette = {};
    const image = new ImageData(this.nColumns, this.nRows);
    for (let row = 0, at = 0; row < this.nRows; row += 1) {
      for (let column = 0; column < this.nColumns; column += 1, at += 4) {
        image.data.set(this.colorOf(row, column), at);
        image.data[at + 3] = 255;
      }
    }
    this.canvas.getContext("2d").putImageData(image, 0, 0);
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return [Math.floor(((event.clientY - box.top) / box.height) * this.nRows), Math.floor(((event.clientX - box.left) / box.width) * this.nColumns)];
  }

  onKey(event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Enter: [0, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    this.choose(this.cell[0] + move[0], this.cell[1] + move[1]);
  }

  choose(row, column) {
    this.tell(row, column);
    if (this.onCell) this.onCell(...this.cell);
  }

  tell(row, column) {
    this.cell = [Math.max(0, Math.min(this.nRows - 1, row)), Math.max(0, Math.min(this.nColumns - 1, column))];
    this.readout.textContent = this.told(...this.cell);
  }

  markRow(row) {
    this.mark.hidden = false;
    Object.assign(this.mark.style, { left: "0", right: "0", width: "auto", top: `${(100 * row) / this.nRows}%`, height: `${100 / this.nRows}%` });
  }

  markColumn(column) {
    this.mark.hidden = false;
    Object.assign(this.mark.style, { top: "0", height: "100%", left: `${(100 * column) / this.nColumns}%`, width: `${100 / this.nColumns}%` });
  }
}

// From nothing to all, by the root, so that small parts are seen.
function partColor(part) {
  return part === null ? ink("unknown") : mixed(ink("even"), ink("cold"), Math.sqrt(Math.min(1, part)));
}

function percent(part) {
  if (part === null) return "not a number";
  return part > 0 && part < 0.001 ? "<0.1%" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;
}
